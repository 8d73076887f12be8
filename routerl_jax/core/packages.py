"""This installation: its version, and the commands that install missing packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import pathlib
import subprocess
import sys
from collections.abc import Iterator

# --- missing packages --------------------------------------------------------------------------------------------------


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


# --- the version of the code -------------------------------------------------------------------------------------------

_PACKAGE = pathlib.Path(__file__).parents[1]


def code_version() -> dict[str, str]:
    """The package's version as `routerl_jax`. In a git checkout also its `commit`, with "+changes" if files differ from it."""
    try:
        versions = {"routerl_jax": importlib.metadata.version("routerl_jax")}
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        versions = {}
    commit = _git("rev-parse", "HEAD")
    if not commit or _git("ls-files", "core/packages.py") != "core/packages.py":  # not another repository around it
        return versions
    return versions | {"commit": f"{commit}+changes" if _git("status", "--porcelain", "--", ".") else commit}


def _git(*arguments: str) -> str:
    """The output of a git command in the package's directory; "" if it fails or git is not installed."""
    try:
        result = subprocess.run(
            ["git", *arguments], cwd=_PACKAGE, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
