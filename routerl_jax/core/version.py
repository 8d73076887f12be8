"""Which code this is: the package's version, and the commit of the checkout that it runs from."""

from __future__ import annotations

import importlib.metadata
import pathlib
import subprocess

_PACKAGE = pathlib.Path(__file__).parents[1]


def code_version() -> dict[str, str]:
    """The package's version as `routerl_jax`. In a git checkout also its `commit`, with "+changes" if files differ from it."""
    try:
        versions = {"routerl_jax": importlib.metadata.version("routerl_jax")}
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        versions = {}
    commit = _git("rev-parse", "HEAD")
    if not commit or _git("ls-files", "core/version.py") != "core/version.py":  # not another repository around it
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
