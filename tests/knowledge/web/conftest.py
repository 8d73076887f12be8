"""A small web with its search engine and its summariser, and a knowledge base of them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from routerl_jax.knowledge.web.config import (
    CacheConfig,
    ReaderConfig,
    SearchConfig,
    SnapshotConfig,
    SummaryConfig,
    WebConfig,
)
from routerl_jax.knowledge.web.kb import WebKB, web_kb
from routerl_jax.services.config import ChatModelConfig
from tests.web_servers import Chats, Searches, Server, Web, serving


def summary_of(messages) -> str:
    """What a good summariser would write: the page's fact."""
    return (
        " ".join(dict.fromkeys(re.findall(r"Fact \d+ is[^.]*\.", messages[-1]["content"])))
        or "Nothing to say about this."
    )


class World:
    """The servers, and what the search engine finds for each query: `found[query]` are paths; others find /page/1 to 8."""

    def __init__(self, tmp_path, servers) -> None:
        self.pages, self.web, self.searches, self.search_server, self.chats, self.chat_server = servers
        self.found: dict[str, list[str]] = {}
        self._tmp_path = tmp_path
        self._open: list[WebKB] = []

    def answers(self, query: str) -> list[str]:
        paths = self.found.get(query, [f"/page/{i}" for i in range(1, 9)])
        return [path if "://" in path else self.pages.url + path for path in paths]

    def config(self, **changes: Any) -> WebConfig:
        """`section__key=value` for keys of sections."""
        config = WebConfig(
            search=SearchConfig(url=self.search_server.url, api_key_env="TEST_KEY", retries=2, timeout=20.0),
            reader=ReaderConfig(allow_networks=("127.0.0.0/8",), timeout=20.0),
            summary=SummaryConfig(model=ChatModelConfig(model="writer", base_url=f"{self.chat_server.url}/v1")),
            cache=CacheConfig(path=str(self._tmp_path / "cache.sqlite")),
            snapshot=SnapshotConfig(),
            deadline=60.0,
        )
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            if section:
                value, name = dataclasses.replace(getattr(config, section), **{name: value}), section
            config = dataclasses.replace(config, **{name: value})
        return config

    def kb(self, **changes: Any) -> WebKB:
        kb = web_kb(self.config(**changes))
        self._open.append(kb)
        return kb

    def close(self) -> None:
        for kb in self._open:
            kb.close()

    @property
    def requests(self) -> tuple[int, int, int]:
        """Requests to the search engine, the pages and the summariser so far."""
        return self.search_server.seen.total(), self.pages.seen.total(), self.chat_server.seen.total()


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_KEY", "key-123")
    monkeypatch.setattr(
        "routerl_jax.services.http.random.uniform", lambda low, high: 0.02
    )  # short pauses before retries
    holder: dict[str, World] = {}
    web, chats = Web(), Chats(summary_of)
    searches = Searches(lambda query: holder["world"].answers(query))
    with serving(web) as pages, serving(searches) as search_server, serving(chats) as chat_server:
        made = World(tmp_path, (pages, web, searches, search_server, chats, chat_server))
        holder["world"] = made
        yield made
        made.close()


__all__ = ["Server", "World"]
