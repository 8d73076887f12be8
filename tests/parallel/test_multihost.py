"""What processes say to each other; two real ones are in tests/invariants/test_devices_and_processes.py."""

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from routerl_jax.parallel import multihost


def test_exchange_sends_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size that is sent compiles a program; what arrives is what was said, to the byte."""
    sent = set()

    def process_allgather(value: np.ndarray) -> np.ndarray:
        sent.add(value.size)
        return np.stack([value, value])

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(multihost_utils, "process_allgather", process_allgather)
    for size in (0, 1, 999, 2**16 - 2, 2**16 - 1, 100_000, 2**17 - 2, 130_000):  # a string has two quotes
        assert multihost.exchange("x" * size) == ["x" * size] * 2
    assert multihost.exchange({"ä": [1, None]}) == [{"ä": [1, None]}] * 2
    assert sent == {1, 2**16, 2**17}


@pytest.mark.parametrize(("said", "error"), [([True, "no such key"], ValueError), ([False, "disk full"], RuntimeError)])
def test_what_fails_on_the_main_process_fails_on_all(
    monkeypatch: pytest.MonkeyPatch, said: list[bool | str], error: type[Exception]
) -> None:
    monkeypatch.setattr(multihost, "is_main", lambda: False)
    monkeypatch.setattr(multihost, "exchange", lambda own: [said, own])
    with pytest.raises(error, match=str(said[1])):
        multihost.on_main(lambda: pytest.fail("done by another process than the main one"))
