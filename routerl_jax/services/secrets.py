"""Keys and passwords. They are in environment variables, and configurations name these variables."""

from __future__ import annotations

import os


def secret(variable: str) -> str:
    """The value of an environment variable; "" if no variable is named. Raises ValueError if the variable is not set."""
    if not variable:
        return ""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise ValueError(f"the environment variable {variable} is not set: export {variable}=... before you start")
    return value
