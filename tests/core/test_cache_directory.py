"""Where things are kept."""

import pathlib

import pytest

from routerl_jax.core.files import cache_directory


def test_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("ROUTERL_CACHE", "/somewhere")
    assert cache_directory() == pathlib.Path("/somewhere")
    monkeypatch.setenv("ROUTERL_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "routerl_jax"
