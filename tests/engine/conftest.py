"""What tests of the engine's TPU path need on machines without one."""

import functools
from collections.abc import Callable, Iterator

import pytest

from routerl_jax.engine import programs


@pytest.fixture
def interpreted(monkeypatch):
    """Runs Pallas TPU kernels as plain XLA on the CPU (jax's paged kernel itself has no such option)."""
    from jax._src import literals
    from jax.experimental import pallas as pl

    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    # jax 0.10.2's interpreter asks the kernel's constant indices for their shape, which they lack.
    monkeypatch.setattr(literals.TypedInt, "shape", (), raising=False)


@pytest.fixture
def as_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """`as_on_cpu(False)`: engines made from now on take the sizes and orders of another device. They share no earlier programs,
    which were traced otherwise."""

    def choose(cpu: bool) -> None:
        programs._shared_programs.cache_clear()
        for module in ("rows", "segments"):
            monkeypatch.setattr(f"routerl_jax.engine.{module}.on_cpu", lambda mesh: cpu)

    yield choose
    programs._shared_programs.cache_clear()
