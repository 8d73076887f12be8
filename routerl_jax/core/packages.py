"""Messages for missing packages: they give the command that installs the right extra of setup.py."""

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
    checkout = root if (root / "setup.py").is_file() else "CHECKOUT"  # this package was installed without its checkout
    if importlib.util.find_spec("pip") is None:
        return f'`uv pip install --python {sys.executable} -e "{checkout}[{extra}]"`'
    return f'`{sys.executable} -m pip install -e "{checkout}[{extra}]"`'


@contextlib.contextmanager
def needs(feature: str, extra: str) -> Iterator[None]:
    """Turns an ImportError in its block into a ValueError with the command that installs the missing packages.

    Args:
      feature: the feature that needs the packages, for the message.
      extra: the extra that has them; see `install_hint`.
    """
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f"{feature} needs packages that can't be imported ({error}). Run {install_hint(extra)}"
        ) from error
