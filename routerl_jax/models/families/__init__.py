"""The supported model families."""
