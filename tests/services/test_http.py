"""Sessions of HTTP clients, and bodies of replies."""

import asyncio
import gc
import gzip
import weakref
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from routerl_jax.core.background import shared_loop
from routerl_jax.services.http import (
    Damaged,
    HttpClient,
    HttpError,
    bounded,
    decompressed,
    open_session,
    parse_reply,
)

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


async def sent(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


TEXT = bytes(range(256)) * 1000
RAW = zlib.compressobj(wbits=-15)


@pytest.mark.parametrize("size", [1, 1000, 10**9])
@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("", TEXT),
        ("identity", TEXT),
        ("gzip", gzip.compress(TEXT)),
        ("GZIP", gzip.compress(TEXT[:500]) + gzip.compress(TEXT[500:])),
        ("gzip", gzip.compress(TEXT) + bytes(700)),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", RAW.compress(TEXT) + RAW.flush()),
    ],
)
def test_a_compressed_reply_is_read(encoding: str, content: bytes, size: int) -> None:
    size = max(size, len(content) // 300)
    assert asyncio.run(bounded(sent(content, size), len(TEXT), encoding)) == TEXT
    with pytest.raises(ValueError, match=f"larger than {len(TEXT) - 1} bytes"):
        asyncio.run(bounded(sent(content, size), len(TEXT) - 1, encoding))


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_what_a_bomb_becomes_is_never_held(encoding: str) -> None:
    bomb = (gzip if encoding == "gzip" else zlib).compress(bytes(10_000_000), 1)

    async def read() -> list[int]:
        return [len(piece) async for piece in decompressed(sent(bomb, 1 << 16), encoding)]

    sizes = asyncio.run(read())
    assert (sum(sizes), max(sizes)) == (10_000_000, 1 << 16)


@pytest.mark.parametrize("content", [b"no gzip", gzip.compress(TEXT)[:-5], gzip.compress(TEXT)[:200] + bytes(900)])
def test_damaged_data_are_told_from_those_that_are_too_many(content: bytes) -> None:
    with pytest.raises(Damaged, match="the reply's gzip data"):
        asyncio.run(bounded(sent(content, 100), 10**9, "gzip"))
    with pytest.raises(ValueError, match="'br', which was not asked for"):
        asyncio.run(bounded(sent(content, 100), 10**9, "br"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 150 + b"]" * 150, "nested too deeply"),
        (b'{"a":' * 600 + b"1" + b"}" * 600, "nested too deeply"),
        (b"9" * 5000, "4300"),
        (b"[" + b"[]," * 2_000_000 + b"1]", "more than 2,000,000 values"),
        (b"\xff", "utf-8"),
        (b"{", "Expecting"),
    ],
)
def test_json_that_is_none_or_too_much(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_reply(content)
