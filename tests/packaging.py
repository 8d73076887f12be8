"""What setup.py declares."""

from __future__ import annotations

import sys
import types
from typing import Any
from unittest import mock

from tests.programs import ROOT


def declared() -> dict[str, Any]:
    """The arguments of setup.py's call of `setup`; `packages` are the patterns that it looks for."""
    told: dict[str, Any] = {}
    setuptools = types.SimpleNamespace(setup=lambda **given: told.update(given), find_packages=lambda include: include)
    with mock.patch.dict(sys.modules, {"setuptools": setuptools}):
        exec((ROOT / "setup.py").read_text("utf-8"), {"__file__": str(ROOT / "setup.py")})
    return told
