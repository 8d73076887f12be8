"""The configuration of a web knowledge base: the service and limits of every stage, caches and snapshots."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from routerl_jax.core.config import Count, NonNegative, Positive, Size, checked
from routerl_jax.services.config import ChatModelConfig

DAY = 86_400.0


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SearchConfig:
    """The search engine."""

    engine: str = "serpapi"  # "serpapi", "serper", or package.module:Class
    url: str = ""  # URL of the service; empty: that of the engine
    api_key_env: str = "SEARCH_API_KEY"  # environment variable with the key; empty: none is sent
    candidates: Size = 10  # results to request: the pages wanted, and some to replace failed ones
    country: str = ""  # Google's gl, such as "us"
    language: str = ""  # Google's hl, such as "en"
    timeout: Positive = 20.0  # seconds for one attempt
    retries: Count = 3  # attempts after the first
    concurrency: Size = 16  # requests under way at once
    rate: NonNegative = 0.0  # requests per second; 0: no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ReaderConfig:
    """The reader of pages."""

    kind: Literal["local", "jina"] = "local"  # local: this program reads and extracts them; jina: Jina's reader does
    url: str = ""  # jina: URL of the service; empty: https://r.jina.ai
    api_key_env: str = ""  # jina: environment variable with the key; empty: none is sent
    timeout: Positive = 20.0  # seconds for one page, redirects included (jina: one attempt)
    retries: Count = 1  # jina: attempts after the first
    concurrency: Size = 64  # pages that are read at once
    rate: NonNegative = 0.0  # jina: requests per second; 0: no limit
    max_bytes: Size = 3 << 20  # local: most bytes of a page or picture, after decompression
    max_chars: Size = 30_000  # most characters of a page's text
    redirects: Count = 5  # local: most redirects
    allow_networks: tuple[
        str, ...
    ] = ()  # networks that are allowed although they are not public, such as "10.1.0.0/16"


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SummaryConfig:
    """The summariser of pages."""

    kind: Literal["model", "extract"] = "model"  # extract: the page's first sentences, no model
    model: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)
    # relevant: first what bears on the question; general: the page's main content, which need not (MMSearch-R1, table 4)
    instruction: Literal["relevant", "general"] = "relevant"
    # whose question: the search's own query, or the user's, where a query carries it (core.types.TextAndImage.question)
    about: Literal["query", "question"] = "query"
    sentences: Size = 5  # sentences of a summary
    max_chars: Size = 30_000  # most characters of the page that the model reads (MMSearch-R1, appendix C)
    max_tokens: Size = 512  # most tokens of a reply
    extract_chars: Size = 1_200  # most characters of a summary, or of the page's beginning without one
    timeout: Positive = 60.0  # seconds for one page


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class CacheConfig:
    """Caches of the results of all stages, between queries and runs."""

    disk: bool = True  # cache in SQLite
    path: str = ""  # path of the SQLite file; empty: cache.sqlite in $ROUTERL_CACHE
    redis_env: str = ""  # environment variable with the URL of a Redis, for caches and rate limits; empty: none
    search_seconds: NonNegative = 30 * DAY  # how long a query's URLs are kept
    page_seconds: NonNegative = 30 * DAY  # how long a page's text is kept
    summary_seconds: NonNegative = 365 * DAY  # how long a summary is kept


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SnapshotConfig:
    """A snapshot of the web as it was seen."""

    directory: str = ""  # directory of the snapshot; empty: no snapshot
    # record: make a new snapshot; auto: answer from it, and record what it lacks; replay: answer from it alone
    mode: Literal["record", "replay", "auto"] = "auto"
    missing: Literal["error", "empty"] = "error"  # replay: the result of a query that was not recorded


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class UploadConfig:
    """Upload of pictures without a URL (HTTP PUT), so that the search engine can see them."""

    url: str = ""  # pictures go to {url}/{digest}.jpg; empty: only pictures given by their URL can be searched for
    public_url: str = ""  # URL at which the search engine reads them, {public_url}/{digest}.jpg; empty: as `url`
    authorization_env: str = ""  # environment variable with the value of the Authorization header


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class WebConfig:
    """A web knowledge base: MMSearch-R1's text search by default, its image search with mode="image"."""

    kind: str = "web"  # kind of the knowledge base
    name: str = "web"  # name of the knowledge base
    # text: web pages; image: reverse image search, which finds thumbnails with titles
    mode: Literal["text", "image"] = "text"
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    reader: ReaderConfig = dataclasses.field(default_factory=ReaderConfig)
    summary: SummaryConfig = dataclasses.field(default_factory=SummaryConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    snapshot: SnapshotConfig = dataclasses.field(default_factory=SnapshotConfig)
    upload: UploadConfig = dataclasses.field(default_factory=UploadConfig)
    pages: Size = 5  # most passages of a query; further URLs are tried until this many succeed
    # search snippets instead of pages that fail, or of all pages
    snippets: Literal["never", "fallback", "only"] = "never"
    # most seconds for one query. Its result is what is ready then, or when the rollout's time limit is reached
    deadline: Positive = 45.0
    # the result of a query that an error left without passages: raise the error, or no passages
    failures: Literal["raise", "empty"] = "raise"
    cost: NonNegative = 1.0  # cost of a query, in units of a dense search

    @property
    def asks_model(self) -> bool:
        """Whether pages are read, and summarised by a language model."""
        return self.mode == "text" and self.snippets != "only" and self.summary.kind == "model"

    def __post_init__(self) -> None:
        if self.search.candidates < self.pages:
            raise ValueError(f"search.candidates={self.search.candidates} must be at least pages={self.pages}")


def mmsearch_r1(writer: ChatModelConfig | None = None, **changes: Any) -> WebConfig:
    """MMSearch-R1's web, appendix C: SerpApi, Jina Reader, and summaries of a page's first 30,000 characters in five
    sentences; the prompt has the user's question (table 4).

    Args:
      writer: the language model for summaries.
    """
    jina = ReaderConfig(kind="jina", api_key_env="JINA_API_KEY", timeout=30.0)
    summary = SummaryConfig(model=writer or ChatModelConfig(), instruction="general", about="question")
    return dataclasses.replace(WebConfig(reader=jina, summary=summary), **changes)


def r1_searcher(**changes: Any) -> WebConfig:
    """R1-Searcher's web, section 4.4: Google, whole pages (not snippets), and summaries by GPT-4o-mini for the policy."""
    writer = ChatModelConfig(
        model="gpt-4o-mini", base_url="https://api.openai.com/v1", api_key_env="OPENAI_API_KEY", concurrency=32
    )
    return dataclasses.replace(WebConfig(summary=SummaryConfig(model=writer)), **changes)
