"""Fetches pages from untrusted URLs: only public addresses, with limits of time, size and redirects."""

from __future__ import annotations

import asyncio
import dataclasses
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

from routerl_jax.knowledge.web.addresses import CheckedResolver, Network, Refused, check_host, networks
from routerl_jax.knowledge.web.charset import decode
from routerl_jax.knowledge.web.config import ReaderConfig
from routerl_jax.knowledge.web.search import WebError
from routerl_jax.services.http import import_aiohttp, open_session

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_READABLE = ("text/html", "application/xhtml+xml", "text/plain", "application/xml", "text/xml", "text/markdown")
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; routerl_jax)",
    "Accept": "text/html,application/xhtml+xml,text/plain;q=0.9,*/*;q=0.1",
    "Accept-Language": "en,*;q=0.5",
}
_PICTURES = ("image/jpeg", "image/png", "image/webp", "image/gif", "image/avif", "image/bmp")


@dataclasses.dataclass(frozen=True)
class Document:
    """A fetched document as text.

    Attributes:
      url: the final URL, after redirects.
      type: media type, such as "text/html".
      cut: whether it was longer than the limit.
    """

    url: str
    type: str
    text: str
    cut: bool = False


class _Download(NamedTuple):
    url: str
    type: str
    charset: str | None
    content: bytes
    cut: bool


class Fetcher:
    """Fetches documents for coroutines of one event loop.

    Only http and https are allowed. Addresses are checked after resolution and at every redirect, and connections are made
    only to checked addresses. User names and passwords in URLs, cookies and proxies are not used. A document is cut at
    `max_bytes`.
    """

    def __init__(self, config: ReaderConfig) -> None:
        self._config, self._allowed = config, networks(config.allow_networks)
        self._session: Any = None
        self._slots: asyncio.Semaphore | None = None

    async def fetch(self, url: str) -> Document:
        """The document at a URL. Raises WebError if it is refused, missing, not text, or too slow."""
        download = await self._fetch(url, _READABLE)
        try:
            text = decode(download.content, download.charset)
        except ValueError as error:
            raise WebError(f"{url}: {error}") from error
        return Document(url=download.url, type=download.type or "text/html", text=text, cut=download.cut)

    async def picture(self, url: str) -> tuple[str, bytes]:
        """Media type and bytes of the picture at a URL. Raises WebError, also if it is too large."""
        download = await self._fetch(url, _PICTURES)
        if download.cut:
            raise WebError(f"{url}: a picture of more than {self._config.max_bytes} bytes")
        return download.type or "image/jpeg", download.content

    async def close(self) -> None:
        """Closes the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _fetch(self, url: str, kinds: Sequence[str]) -> _Download:
        aiohttp = import_aiohttp()
        if self._session is None or self._session.closed:
            self._open(aiohttp)
        assert self._slots is not None
        try:
            async with self._slots, asyncio.timeout(self._config.timeout):
                return await self._follow(url, kinds)
        except TimeoutError:
            raise WebError(f"{url}: not read within {self._config.timeout:g} s") from None
        except Refused as error:
            raise WebError(f"{url}: refused, {error}") from error
        except (aiohttp.ClientError, OSError, ValueError, EOFError) as error:
            refused = _refusal(error)
            if refused is not None:
                raise WebError(f"{url}: refused, {refused}") from error
            raise WebError(f"{url}: {type(error).__name__}: {error}") from error

    def _open(self, aiohttp: Any) -> None:
        connector = aiohttp.TCPConnector(
            resolver=CheckedResolver(self._allowed),
            use_dns_cache=False,
            limit=self._config.concurrency,
            limit_per_host=8,
        )
        self._session = open_session(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(10.0, self._config.timeout)),
            trust_env=False,
            headers=_HEADERS,
        )
        self._slots = asyncio.Semaphore(self._config.concurrency)

    async def _follow(self, url: str, kinds: Sequence[str]) -> _Download:
        for _ in range(self._config.redirects + 1):
            target = checked_url(url, self._allowed)
            async with self._session.get(target, allow_redirects=False) as reply:
                redirect = reply.headers.get("Location")
                if reply.status not in _REDIRECTS or not redirect:
                    return await self._read_reply(str(reply.url), reply, kinds)
                url = urllib.parse.urljoin(str(target), redirect)
        raise WebError(f"{url}: more than {self._config.redirects} redirects")

    async def _read_reply(self, url: str, reply: Any, kinds: Sequence[str]) -> _Download:
        if reply.status != 200:
            raise WebError(f"{url}: HTTP {reply.status} {reply.reason}")
        kind = reply.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind and kind not in kinds:
            raise WebError(f"{url}: content of type {kind}, which is not read here")
        content, cut = await self._read(reply)
        return _Download(url, kind, reply.charset, content, cut)

    async def _read(self, reply: Any) -> tuple[bytes, bool]:
        content = bytearray()
        async for chunk in reply.content.iter_chunked(1 << 16):
            content += chunk
            if len(content) > self._config.max_bytes:
                reply.close()
                return bytes(content[: self._config.max_bytes]), True
        return bytes(content), False


def checked_url(url: str, allowed: Sequence[Network] = ()) -> Any:
    """The URL as a yarl.URL, without user name, password and fragment.

    Raises:
      Refused: the URL is not http(s), or its host is an address that is neither public nor allowed.
    """
    import yarl

    try:
        parts = urllib.parse.urlsplit(url.strip())
        port = f":{parts.port}" if parts.port else ""
        host = parts.hostname or ""
    except ValueError as error:
        raise Refused(f"not a URL ({error})") from error
    if parts.scheme not in ("http", "https"):
        raise Refused(f"only http and https are fetched, not {parts.scheme or 'a relative URL'!r}")
    netloc = f"[{host}]{port}" if ":" in host else f"{host}{port}"
    try:
        checked = yarl.URL(urllib.parse.urlunsplit((parts.scheme, netloc, parts.path, parts.query, "")))
    except ValueError as error:
        raise Refused(f"not a URL ({error})") from error
    check_host(
        checked.raw_host or "", allowed
    )  # yarl's host: wide digits and ideographic full stops are normalised there
    return checked


def _refusal(error: BaseException | None) -> Refused | None:
    """The resolver's refusal, which aiohttp may have wrapped."""
    while error is not None:
        if isinstance(error, Refused):
            return error
        error = error.__cause__ or error.__context__
    return None
