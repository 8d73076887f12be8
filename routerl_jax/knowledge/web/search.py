"""Clients of search engine APIs: SerpApi and Serper, for text and (with Google Lens) for pictures."""

from __future__ import annotations

import dataclasses
import urllib.parse
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from routerl_jax.core.registry import Registry
from routerl_jax.core.text import replace_surrogates
from routerl_jax.services.http import HttpClient, HttpError, ReplyError, error_of


class WebError(Exception):
    """A stage failed. The message says which one, where and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hit:
    """One result of a search engine.

    Attributes:
      thumbnail: URL of a small picture; "" if there is none.
    """

    url: str
    title: str = ""
    snippet: str = ""
    thumbnail: str = ""


Kind = Literal["text", "image"]


class SearchEngine(Protocol):
    """Finds pages for a text or for the URL of a picture. For coroutines of one event loop."""

    name: str

    async def search(self, query: str, count: int, kind: Kind = "text") -> list[Hit]:
        """Up to `count` results, best first; [] if there are none. Raises WebError."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


class SerpApi:
    """https://serpapi.com: `engine=google` (`organic_results`) and `engine=google_lens` (`visual_matches`).

    Args:
      http: HTTP client, whose `secret` should be the key, because SerpApi takes it in the URL.
      country, language: Google's `gl` and `hl`; "" leaves them out.
    """

    name = "serpapi"
    default_url = "https://serpapi.com"

    def __init__(self, http: HttpClient, key: str, url: str = "", *, country: str = "", language: str = "") -> None:
        self._http, self._key = http, key
        self._url = f"{(url or self.default_url).rstrip('/')}/search.json"
        self._where = {name: value for name, value in (("gl", country), ("hl", language)) if value}

    async def search(self, query: str, count: int, kind: Kind = "text") -> list[Hit]:
        """Up to `count` results; the query of kind "image" is the URL of a picture."""
        if kind == "image":
            params = {"engine": "google_lens", "url": query}
            if "hl" in self._where:
                params["hl"] = self._where["hl"]
        else:
            params = {"engine": "google", "q": query, "num": str(count), **self._where}
        try:
            reply = await self._http.request(
                "GET", self._url, params={**params, "api_key": self._key}, failure=_serpapi_failure
            )
        except HttpError as error:
            if error.status == 400 and "hasn't returned any results" in str(error):
                return []
            raise WebError(f"search failed: {error}") from error
        fields = _object(reply, self._url)
        rows = fields.get("visual_matches" if kind == "image" else "organic_results")
        if rows is None:
            return []
        return _hits(rows, self._url, "thumbnail")[:count]

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()


class Serper:
    """https://serper.dev: `POST /search` and `POST /lens`, both with `organic` results."""

    name = "serper"
    default_url = "https://google.serper.dev"

    def __init__(self, http: HttpClient, key: str, url: str = "", *, country: str = "", language: str = "") -> None:
        self._http = http
        self._url = (url or self.default_url).rstrip("/")
        self._headers = {"X-API-KEY": key} if key else {}
        self._where = {name: value for name, value in (("gl", country), ("hl", language)) if value}

    async def search(self, query: str, count: int, kind: Kind = "text") -> list[Hit]:
        """Up to `count` results; the query of kind "image" is the URL of a picture."""
        query_fields = {"url": query} if kind == "image" else {"q": query, "num": count}
        url = f"{self._url}/{'lens' if kind == 'image' else 'search'}"
        try:
            reply = await self._http.request("POST", url, headers=self._headers, body={**query_fields, **self._where})
        except HttpError as error:
            raise WebError(f"search failed: {error}") from error
        return _hits(_object(reply, url).get("organic") or [], url, "thumbnailUrl")[:count]

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.close()


SEARCH_ENGINES: Registry[Any] = Registry("search engine")
SEARCH_ENGINES.register("serpapi")(SerpApi)
SEARCH_ENGINES.register("serper")(Serper)


def _serpapi_failure(reply: Any) -> ReplyError | None:
    """An error that is not how SerpApi says that there are no results, and that does not stand beside some."""
    error = error_of(reply)
    found = isinstance(reply, dict) and any(reply.get(key) for key in ("organic_results", "visual_matches"))
    return None if error is None or found or "any results" in error.message else error


def _object(reply: Any, url: str) -> Mapping[str, Any]:
    try:
        fields = reply.json()
    except ValueError as error:
        raise WebError(f"search failed: {url}: {error}") from error
    if not isinstance(fields, dict):
        raise WebError(f"search failed: {url}: the reply is a JSON {type(fields).__name__}, expected an object")
    return fields


def _hits(rows: Any, url: str, thumbnail: str) -> list[Hit]:
    """The usable results, each page once. A row without a link to a web page is skipped."""
    if not isinstance(rows, list):
        raise WebError(f"search failed: {url}: results are a JSON {type(rows).__name__}, expected an array")
    hits: dict[str, Hit] = {}
    for row in rows:
        if not isinstance(row, dict):
            continue
        address = _text(row.get("link"))
        if _scheme(address) not in ("http", "https"):
            continue
        hit = Hit(
            url=address,
            title=_text(row.get("title")),
            snippet=_text(row.get("snippet")),
            thumbnail=_text(row.get(thumbnail)),
        )
        hits.setdefault(address.partition("#")[0], hit)
    return list(hits.values())


def _text(value: Any) -> str:
    return replace_surrogates(value.strip()) if isinstance(value, str) else ""


def _scheme(url: str) -> str:
    try:
        return urllib.parse.urlsplit(url).scheme
    except ValueError:  # brackets without an address between them
        return ""
