"""Readers of web pages: from a URL to the title and the main text."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import re
from collections.abc import Sequence
from typing import Protocol

from routerl_jax.core.packages import needs
from routerl_jax.core.text import replace_surrogates
from routerl_jax.knowledge.web.addresses import Network, Refused
from routerl_jax.knowledge.web.fetch import Document, Fetcher, checked_url
from routerl_jax.knowledge.web.search import WebError
from routerl_jax.services.http import HttpClient, HttpError

_THREADS = 4  # extractions at once; one takes some 20 ms of a CPU for an ordinary page
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
    """Title and main text of a document: HTML without menus, advertisements and scripts; plain text unchanged."""
    if document.type in ("text/plain", "text/markdown"):
        return "", document.text
    import trafilatura

    extracted = trafilatura.bare_extraction(
        document.text,
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
