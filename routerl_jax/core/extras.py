"""What a missing package is answered with: the command that installs the extra of setup.py that brings it."""

from __future__ import annotations

import contextlib
import importlib.util
import pathlib
import sys
from collections.abc import Iterator


def install_hint(extra: str) -> str:
    """The command that installs an extra into this Python from the checkout that this package was imported from.

    Environments that uv made have no pip, so there the command is uv's.

    Args:
      extra: a key of `EXTRAS` in setup.py.
    """
    root = pathlib.Path(__file__).resolve().parents[2]
    place = root if (root / "setup.py").is_file() else "CHECKOUT"  # a copy that was installed without one
    if importlib.util.find_spec("pip") is None:
        return f'`uv pip install --python {sys.executable} -e "{place}[{extra}]"`'
    return f'`{sys.executable} -m pip install -e "{place}[{extra}]"`'


@contextlib.contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Imports of packages that an extra brings: an ImportError becomes a ValueError that says so.

    Args:
      what: it is that needs them, for the message.
      extra: as of `install_hint`.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{what} needs packages that can't be imported ({error}). Run {install_hint(extra)}"
        ) from error
