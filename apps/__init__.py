"""What stays up: the inference app and what it is made of. Imports nothing from `tasks` or `workflows`."""
