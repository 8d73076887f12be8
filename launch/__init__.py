"""Programs: each is `python -m launch.<name>`, with --help."""
