"""Sessions of HTTP clients."""

import gc
import weakref
from typing import Any

import pytest

from routerl_jax.core.background import shared_loop
from routerl_jax.services.http import open_session

pytest.importorskip("aiohttp", reason="HTTP clients need the extra `web`")


def test_a_session_that_nobody_closed_is_kept_until_it_is() -> None:
    """aiohttp logs an error for an open session that is collected."""

    async def opened() -> Any:
        return weakref.ref(open_session())

    first = shared_loop().run(opened())
    gc.collect()
    assert first() is not None
    shared_loop().run(first().close())
    second = shared_loop().run(opened())
    gc.collect()
    assert first() is None
    shared_loop().run(second().close())
