"""Talking with a policy that searches: in the terminal, and on a local page."""
