"""What a finished run came to, as a short table.

python -m tasks.report runs/demo
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tasks.manifest import Manifest


def summary(manifest: Manifest) -> Table:
    """The short table at the end of a run."""
    table = Table(show_header=False)
    table.add_row("rows", f"{manifest.rows_in:,}")
    table.add_row("ok", f"{manifest.rows_ok:,}")
    table.add_row("failed", f"{manifest.rows_failed:,}")
    if manifest.rows_truncated:
        table.add_row("truncated", f"{manifest.rows_truncated:,}")
    for name in ("strict", "flexible"):
        accuracy = getattr(manifest, f"accuracy_{name}")
        if accuracy is not None:
            low, high = getattr(manifest, f"accuracy_{name}_95")
            figure = f"{accuracy:.1%} of {manifest.rows_scored:,} (95 %: {low:.1%} to {high:.1%})"
            table.add_row(f"accuracy, {name}", figure)
    table.add_row("tokens/s", f"{manifest.tokens_per_s:,.0f}")
    table.add_row("model", Text(manifest.model))
    table.add_row("everything in", Text(manifest.output))
    return table


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = Path(sys.argv[1], "manifest.json")
    if not path.is_file():
        sys.exit(f"{path}: no such file; the folder holds no finished run")
    Console().print(summary(Manifest.model_validate_json(path.read_text())))


if __name__ == "__main__":
    main()
