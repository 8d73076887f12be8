"""The console of results."""

import pytest

from routerl_jax.core.console import open_console

WIDE = "x" * 150


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    open_console().print(WIDE)
    return capsys.readouterr().out.split()


def test_a_log_is_wide(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert printed(capsys) == [WIDE]


def test_the_environment_says_how_wide(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert [len(line) for line in printed(capsys)] == [100, 50]
