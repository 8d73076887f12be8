"""Run configurations; each `get_config` states its command, expected time and result."""
