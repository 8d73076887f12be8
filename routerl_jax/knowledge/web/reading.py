"""Reads pages of untrusted URLs: only public addresses, with limits of time, size and redirects; then title and main text."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import ipaddress
import itertools
import re
import socket
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from routerl_jax.core.packages import needs
from routerl_jax.core.text import replace_surrogates
from routerl_jax.knowledge.corpora.documents import decode
from routerl_jax.knowledge.web.config import ReaderConfig
from routerl_jax.knowledge.web.snapshot import WebError
from routerl_jax.services.http import HttpClient, HttpError, decompressed, import_aiohttp, open_session

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_PROTOCOLS = ipaddress.IPv4Network("192.0.0.0/24")  # IETF protocol assignments, which older Pythons consider public


class Refused(Exception):
    """An address must not be contacted."""


def networks(names: Sequence[str]) -> tuple[Network, ...]:
    """Networks in CIDR notation, or single addresses. Raises ValueError that names the wrong one."""
    try:
        return tuple(ipaddress.ip_network(name, strict=False) for name in names)
    except ValueError as error:
        raise ValueError(f"allow_networks: {error}; give networks such as 10.1.0.0/16") from error


def check_address(address: str, allowed: Sequence[Network] = ()) -> Address:
    """The address, if it is public or allowed. An IPv4 address inside an IPv6 address is checked too.

    Raises:
      Refused: the address is private, loopback, link-local (cloud metadata), multicast, reserved, a tunnel (6to4, Teredo), or
        no address.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError as error:
        raise Refused(f"{address!r} is not an IP address") from error
    inner = _embedded_ipv4(parsed)
    for candidate in {parsed, inner}:
        if any(candidate.version == network.version and candidate in network for network in allowed):
            return parsed
    odd = isinstance(inner, ipaddress.IPv6Address) and (inner.sixtofour or inner.teredo or inner.is_site_local)
    if odd or inner in _PROTOCOLS or not inner.is_global or inner.is_multicast or inner.is_reserved:
        raise Refused(f"{address} is not a public address")
    return parsed


def check_host(host: str, allowed: Sequence[Network] = ()) -> None:
    """Refuses hosts that are addresses, unless they are in the usual notation and public. The resolver checks names."""
    if not host:
        raise Refused("the URL has no host")
    if ":" in host or host.replace(".", "").isdigit():
        check_address(host, allowed)


class CheckedResolver:
    """A resolver for aiohttp that returns only checked addresses. Connections are made only to these.

    So a name that resolves to another address later (DNS rebinding) has no effect. A name with any refused address is refused.
    """

    def __init__(self, allowed: Sequence[Network] = ()) -> None:
        self._allowed = tuple(allowed)

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[dict[str, Any]]:
        """The host's addresses in aiohttp's form. Raises Refused, or OSError for an unknown name."""
        addresses = await asyncio.get_running_loop().getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        result = []
        for kind, _, protocol, _, address in addresses:
            check_address(str(address[0]), self._allowed)
            result.append(
                {
                    "hostname": host,
                    "host": address[0],
                    "port": port,
                    "family": kind,
                    "proto": protocol,
                    "flags": socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                }
            )
        return result

    async def close(self) -> None:
        """Does nothing; part of the interface."""


def _embedded_ipv4(address: Address) -> Address:
    """The IPv4 address inside a mapped or NAT64 IPv6 address; the address itself for others."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address


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
        content, most = bytearray(), self._config.max_bytes
        encoding = reply.headers.get("Content-Encoding", "")
        async for piece in decompressed(reply.content.iter_chunked(1 << 16), encoding):
            content += piece
            if len(content) > most:
                reply.close()
                break
        return _Download(url, kind, reply.charset, bytes(content[:most]), len(content) > most)


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


_THREADS = 4  # extractions at once; one takes some 20 ms of a CPU for an ordinary page
_TAG = re.compile(r"<[a-zA-Z/]")
_MOST_TAGS = 30_000  # trafilatura took 1.4 s of a CPU for 18,000 tags, whatever stands in them
_GAPS = re.compile(r"\n{3,}")
_ERROR_PAGE = "Target URL returned error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """A page as text."""

    url: str
    title: str
    text: str


class Reader(Protocol):
    """Reads pages. For coroutines of one event loop."""

    name: str

    async def read(self, url: str) -> Page:
        """The page at a URL. Raises WebError."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class LocalReader:
    """Fetches pages itself, and extracts their main text with trafilatura, on threads.

    Args:
      max_chars: most characters of a page's text; the rest is cut.
    """

    name = "local"

    def __init__(self, fetcher: Fetcher, *, max_chars: int) -> None:
        with needs("the local reader", "web"):
            import trafilatura  # noqa: F401 - here, so that the error comes before the first query
        self._fetcher, self._max_chars = fetcher, max_chars
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="reader")

    async def read(self, url: str) -> Page:
        """Fetches the page and extracts its text. Raises WebError, also for a page without text."""
        document = await self._fetcher.fetch(url)
        loop = asyncio.get_running_loop()
        try:
            title, text = await loop.run_in_executor(self._threads, main_text, document)
        except Exception as error:  # parsers raise many classes
            raise WebError(f"{url}: its text can't be extracted ({type(error).__name__}: {error})") from error
        return page_of(url, title, text, self._max_chars)

    async def close(self) -> None:
        """Closes the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()


class JinaReader:
    """Jina Reader (`GET https://r.jina.ai/URL`), or a server with its interface. It renders pages, and reads PDFs too.

    A server of your own may have access to private addresses. URLs with such addresses are refused here, but the server must
    check the addresses of host names.

    Args:
      http: HTTP client, whose `secret` should be the key.
      key: API key; without one, Jina allows few requests per minute.
      allowed: networks that are allowed although they are not public.
    """

    name = "jina"
    default_url = "https://r.jina.ai"

    def __init__(
        self,
        http: HttpClient,
        key: str = "",
        url: str = "",
        *,
        max_chars: int,
        allowed: Sequence[Network] = (),
    ) -> None:
        self._http, self._max_chars, self._allowed = http, max_chars, tuple(allowed)
        self._url = (url or self.default_url).rstrip("/")
        self._headers = {"Accept": "application/json", "X-Retain-Images": "none"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def read(self, url: str) -> Page:
        """The page as the service reads it. Raises WebError."""
        try:
            checked_url(url, self._allowed)
        except Refused as error:
            raise WebError(f"{url}: refused, {error}") from error
        try:
            reply = await self._http.request("GET", f"{self._url}/{url}", headers=self._headers)
        except HttpError as error:
            raise WebError(f"{url}: {error}") from error
        try:
            reply_json = reply.json()
        except ValueError as error:
            if "json" in reply.headers.get("Content-Type", ""):  # a broken JSON reply, not the text of a page
                raise WebError(f"{url}: {self._url}: {error}") from error
            title, text, warning = _plain_reply(reply.body.decode(errors="replace"))
            return self._page(url, title, text, warning)
        data = reply_json.get("data") if isinstance(reply_json, dict) else None
        if not isinstance(data, dict):
            raise WebError(f"{url}: {self._url}: the reply has no object `data`")
        return self._page(
            url, *(text if isinstance(text := data.get(key), str) else "" for key in ("title", "content", "warning"))
        )

    def _page(self, url: str, title: str, text: str, warning: str) -> Page:
        if warning.startswith(_ERROR_PAGE):  # Jina reads the error page, and returns status 200
            raise WebError(f"{url}: {' '.join(warning.split())[:200]}")
        return page_of(url, title, text, self._max_chars)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()


def main_text(document: Document) -> tuple[str, str]:
    """Title and main text of a document: HTML without menus, advertisements and scripts; plain text unchanged. Of HTML, the
    first _MOST_TAGS tags are read."""
    if document.type in ("text/plain", "text/markdown"):
        return "", document.text
    import trafilatura

    beyond = next(itertools.islice(_TAG.finditer(document.text), _MOST_TAGS, None), None)
    extracted = trafilatura.bare_extraction(
        document.text[: beyond.start()] if beyond else document.text,
        url=document.url,
        include_comments=False,
        include_tables=True,
        favor_recall=True,
        with_metadata=True,
    )
    if extracted is None or isinstance(extracted, dict):
        return "", ""
    return extracted.title or "", extracted.text or ""


def page_of(url: str, title: str, text: str, max_chars: int) -> Page:
    """A page with normalised white space and its text cut. Raises WebError if there is no text."""
    lines = (" ".join(line.split()) for line in replace_surrogates(text[: 4 * max_chars]).splitlines())
    text = _GAPS.sub("\n\n", "\n".join(lines)).strip()
    if not text:
        raise WebError(f"{url}: no text was found on the page")
    return Page(url=url, title=" ".join(replace_surrogates(title).split()), text=text[:max_chars])


def _plain_reply(text: str) -> tuple[str, str, str]:
    """Title, text and warning of Jina's plain form: a few `Name: value` lines, then `Markdown Content:`."""
    head, mark, content = text.partition("Markdown Content:\n")
    if not mark:
        return "", text, ""
    title, warning = (re.search(rf"^{name}: (.*)$", head, re.MULTILINE) for name in ("Title", "Warning"))
    return (title.group(1) if title else ""), content, (warning.group(1) if warning else "")
