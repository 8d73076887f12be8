"""Client of a retrieval server with Search-R1's protocol (`POST /retrieve`).

The protocol is that of Search-R1's `search_r1/search/retrieval_server.py` (a14dc3a); verl's and SkyRL's search tools use it
too. For a server of this project, use `knowledge.client.kb.HttpKB`, whose `/v1/search` also has sizes and modes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.client.breaker import CircuitBreaker
from routerl_jax.knowledge.client.documents import Documents, document_passage
from routerl_jax.knowledge.client.policy import Retries, Timeouts, Unavailable
from routerl_jax.knowledge.client.transport import Connection
from routerl_jax.knowledge.counts import Counts, StageCounts
from routerl_jax.services.background import gather_bounded, shared_loop

_PATH = "/retrieve"


class RetrieveKB(KnowledgeBase):
    """Passages behind `POST /retrieve {queries, topk, return_scores}`. Safe to use from several threads.

    Args:
      urls: `http://host:port/retrieve`, of one server or of several equal ones.
      token: default: ROUTERL_KB_TOKEN in the environment.
      timeouts, retries: time limits, and attempts per request.
      batch: queries per request; longer lists are sent in several requests, `concurrency` at a time.
      breaker: makes the circuit breaker of a server.

    Raises:
      ValueError: a URL has another form.
      Unavailable: while searching: no server answered in this protocol.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        retries: Retries | None = None,
        batch: int = 256,
        concurrency: int = 4,
        breaker: Callable[[], CircuitBreaker] = CircuitBreaker,
    ) -> None:
        addresses = [urls] if isinstance(urls, str) else list(urls)
        for url in addresses:
            if not url.startswith(("http://", "https://")) or not url.rstrip("/").endswith(_PATH):
                raise ValueError(f"{url!r} is no address of Search-R1's protocol: http://host:port{_PATH}")
        if not addresses or batch < 1 or concurrency < 1:
            raise ValueError(f"RetrieveKB needs a URL, batch={batch} and concurrency={concurrency} of at least 1")
        self.name = addresses[0]
        self._batch, self._concurrency = batch, concurrency
        settings: dict[str, Any] = {
            "token": os.environ.get("ROUTERL_KB_TOKEN", "") if token is None else token,
            "timeouts": timeouts or Timeouts(),
            "retries": retries or Retries(),
            "breaker": breaker,
        }
        self._connection = Connection(addresses, settings)
        self._counts = StageCounts(uncached=("server",))
        self._documents = Documents(self.name, self._counts, _passage)

    def __len__(self) -> int:
        raise TypeError(f"{self.name}: the protocol does not tell how many passages there are")

    def stage_counts(self) -> Counts:
        """Counts of queries to the server."""
        return self._counts()

    def close(self) -> None:
        """Closes the connections. The next search opens new ones."""
        self._connection.close()

    def _search(self, queries: list[Any], k: int) -> list[list[Passage]]:
        parts = [queries[i : i + self._batch] for i in range(0, len(queries), self._batch)]

        async def ask(queries: list[str]) -> list[list[Passage]]:
            body = {"queries": queries, "topk": k, "return_scores": True}
            return self._read(await self._connection.request("POST", "", body), len(queries), k)

        self._counts.add("server", asked=len(queries))
        try:
            replies = shared_loop().run(gather_bounded(ask, parts, self._concurrency))
        except Exception:
            self._counts.add("server", failures=len(queries))
            raise
        return [passages for reply in replies for passages in reply]

    def _read(self, reply: Any, count: int, k: int) -> list[list[Passage]]:
        try:
            results = self._documents(reply["result"], k)
        except (KeyError, TypeError, ValueError) as error:
            raise Unavailable(f"{self.name}: a reply in another form than Search-R1's protocol ({error!r})") from error
        if len(results) != count:
            raise Unavailable(f"{self.name}: {len(results)} results for {count} queries")
        return results


def _passage(item: Any, rank: int = 0) -> Passage:
    return document_passage(item)
