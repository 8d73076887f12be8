"""Readers: from the URL of a page to its title and its main text."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import re
import urllib.parse
from typing import Protocol

from routerl_jax.knowledge.web.fetch import Document, Fetcher
from routerl_jax.knowledge.web.search import WebError
from routerl_jax.remote.http import HttpClient, HttpError

_GAPS = re.compile(r"\n{3,}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """A page as text."""

    url: str
    title: str
    text: str


class Reader(Protocol):
    """Reads pages; for coroutines of one event loop."""

    name: str

    async def read(self, url: str) -> Page:
        """The page at a URL. Raises WebError."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class LocalReader:
    """Fetches pages itself and takes their main text with trafilatura, on threads.

    Args:
      max_chars: of a page's text; the rest is cut.
      threads: extractions at once. One takes some 20 ms of a CPU for an ordinary page.
    """

    name = "local"

    def __init__(self, fetcher: Fetcher, *, max_chars: int = 30_000, threads: int = 4) -> None:
        try:
            import trafilatura  # noqa: F401 - here, so that the error comes before the first query
        except ImportError as error:
            raise ImportError("the local reader needs trafilatura: pip install routerl_jax[web]") from error
        self._fetcher, self._max_chars = fetcher, max_chars
        self._threads = concurrent.futures.ThreadPoolExecutor(threads, thread_name_prefix="reader")

    async def read(self, url: str) -> Page:
        """Fetches the page and takes out its text. Raises WebError, also for a page without text."""
        document = await self._fetcher.fetch(url)
        loop = asyncio.get_running_loop()
        title, text = await loop.run_in_executor(self._threads, main_text, document)
        return page_of(url, title, text, self._max_chars)

    async def close(self) -> None:
        """Closes the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()


class JinaReader:
    """Jina Reader (`GET https://r.jina.ai/URL`), or a server with its interface, which renders pages and reads PDFs too.

    Args:
      http: its `secret` should be the key.
      key: without one, Jina allows few requests a minute.
    """

    name = "jina"
    default_url = "https://r.jina.ai"

    def __init__(self, http: HttpClient, key: str = "", url: str = "", *, max_chars: int = 30_000) -> None:
        self._http, self._max_chars = http, max_chars
        self._url = (url or self.default_url).rstrip("/")
        self._headers = {"Accept": "application/json", "X-Retain-Images": "none"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    async def read(self, url: str) -> Page:
        """What the service makes of the page. Raises WebError."""
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise WebError(f"{url}: refused, only http and https are fetched")
        try:
            reply = await self._http.request("GET", f"{self._url}/{url}", headers=self._headers)
        except HttpError as error:
            raise WebError(f"{url}: {error}") from error
        try:
            found = reply.json()
        except ValueError:
            return page_of(url, *_plain_reply(reply.body.decode(errors="replace")), self._max_chars)
        data = found.get("data") if isinstance(found, dict) else None
        if not isinstance(data, dict):
            raise WebError(f"{url}: {self._url}: the reply has no object `data`")
        return page_of(url, str(data.get("title") or ""), str(data.get("content") or ""), self._max_chars)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()


def main_text(document: Document) -> tuple[str, str]:
    """Title and main text of a document: of HTML without menus, advertisements and scripts; plain text as it is."""
    if document.type in ("text/plain", "text/markdown"):
        return "", document.text
    import trafilatura

    found = trafilatura.bare_extraction(
        document.text,
        url=document.url,
        include_comments=False,
        include_tables=True,
        favor_recall=True,
        with_metadata=True,
    )
    if found is None or isinstance(found, dict):
        return "", ""
    return found.title or "", found.text or ""


def page_of(url: str, title: str, text: str, max_chars: int) -> Page:
    """A page with its white space put in order and its text cut. Raises WebError if there is no text."""
    lines = (" ".join(line.split()) for line in text[: 4 * max_chars].splitlines())
    text = _GAPS.sub("\n\n", "\n".join(lines)).strip()
    if not text:
        raise WebError(f"{url}: no text was found on the page")
    return Page(url=url, title=" ".join(title.split()), text=text[:max_chars])


def _plain_reply(text: str) -> tuple[str, str]:
    """Title and text of Jina's plain form: a few `Name: value` lines, then `Markdown Content:`."""
    head, mark, content = text.partition("Markdown Content:\n")
    title = re.search(r"^Title: (.*)$", head, re.MULTILINE)
    return (title.group(1) if mark and title else ""), (content if mark else text)
