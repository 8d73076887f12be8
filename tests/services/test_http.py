"""Sessions of HTTP clients."""

import gc
import weakref
from typing import Any

import pytest

from routerl_jax.core.background import shared_loop
from routerl_jax.services.http import HttpClient, HttpError, open_session

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


def test_half_a_json_reply_is_asked_for_again_and_a_page_is_not() -> None:
    from aiohttp import web

    from tests.web_servers import serving

    replies = ['{"a": [1', '{"a": 1}', "<p>a page", '{"a"', '{"a"']
    types = ["json", "json", "html", "json", "json"]

    async def handler(request: Any) -> web.Response:
        kind = types.pop(0)
        return web.Response(text=replies.pop(0), content_type="text/html" if kind == "html" else "application/json")

    with serving(handler) as server:
        client = HttpClient(timeout=5.0, retries=1, backoff=0.01)

        def ask() -> Any:
            return shared_loop().run(client.request("GET", server.url))

        whole = ask()
        assert (whole.json(), whole.tries) == ({"a": 1}, 2)
        assert ask().body == b"<p>a page"
        with pytest.raises(HttpError, match=r"not JSON.*tried 2 times") as failure:
            ask()
        assert (failure.value.fault, failure.value.tries) == ("half_reply", 2)
        shared_loop().run(client.close())
