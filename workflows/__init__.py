"""What you `flyte run`: one driver a file."""
