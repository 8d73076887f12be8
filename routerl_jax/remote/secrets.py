"""Keys and passwords: they are in environment variables, and configurations name these variables."""

from __future__ import annotations

import os


def secret(variable: str) -> str:
    """What the environment variable holds; "" for no variable. Raises ValueError if it is not set."""
    if not variable:
        return ""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError(f"the environment variable {variable} is not set: export {variable}=... before you start")
    return value
