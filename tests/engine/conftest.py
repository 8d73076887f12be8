"""What tests of the engine's TPU path need on machines without one."""

import functools

import pytest


@pytest.fixture
def interpreted(monkeypatch):
    """Runs Pallas TPU kernels as plain XLA on the CPU (jax's paged kernel itself has no such option)."""
    from jax._src import literals
    from jax.experimental import pallas as pl

    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    # jax 0.10.2's interpreter asks the kernel's constant indices for their shape, which they lack.
    monkeypatch.setattr(literals.TypedInt, "shape", (), raising=False)
