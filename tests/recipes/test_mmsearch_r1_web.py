"""MMSearch-R1 over the web that it is made for (Google Lens and Google through SerpApi, Jina Reader, a summariser), on local
servers where one request in ten fails in each of all ways: every attempt ends with an answer, and nothing is lost."""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Call, Episode, Example
from routerl_jax.evaluation.metrics import summarize
from routerl_jax.knowledge.web.config import (
    CacheConfig,
    ReaderConfig,
    SearchConfig,
    SummaryConfig,
    WebConfig,
)
from routerl_jax.knowledge.web.kb import web_kb
from routerl_jax.recipes.mmsearch_r1.agents import MMSearchAgent
from routerl_jax.services.config import ChatModelConfig
from tests import seeing
from tests.agents.scripted import SeeingScript
from tests.web_servers import Chats, Faulty, Jina, Searches, Web, serving

ATTEMPTS = 64
SECONDS = 8.0  # for a reply; what is slow never comes
PASSING = ("429", "500", "slow", "closed", "broken")  # may be gone at the next attempt, and there is one
# What goes wrong, by the last digit of the attempt's number, and with pages and thumbnails by the result's rank.
SEARCHES = {0: "429", 1: "500", 2: "slow", 3: "closed", 4: "broken", 5: "empty"}
PICTURES = {(6, 0): "damaged", (7, 0): "500", (8, 1): "closed", (9, 0): "slow", (9, 1): "damaged"}
PAGES = {(6, 0): "429", (7, 0): "500", (8, 0): "closed", (9, 0): "slow", (6, 1): "broken", (7, 1): "empty"}
SUMMARIES = {(8, 1): "500", (9, 1): "429", (0, 0): "closed", (1, 1): "broken", (2, 0): "empty"}
RESULTS, SHOWN = 4, 2  # of a search, and what the policy is shown of it


def always(number: int) -> bool:
    """Whether what goes wrong does so at every attempt; else at the first one alone."""
    return number // 10 % 2 == 1


def text_digit(number: int) -> int:
    """The digit that decides for an attempt's search in words: where that by the picture has gone well, mostly."""
    return (number + 5) % 10


def lost(kind: str, number: int) -> bool:
    """Whether a request fails for good, by the rules of retries."""
    return kind == "damaged" or (kind in PASSING and always(number))


def ranks(table: dict[tuple[int, int], str], number: int, *, retried: bool) -> list[int]:
    """Ranks of results of which nothing comes."""
    digit = text_digit(number) if retried else number % 10
    return [
        j for (d, j), kind in table.items() if d == digit and (kind == "empty" or not retried or lost(kind, number))
    ]


def summarised(number: int) -> list[int]:
    """Ranks of the pages that are summarised: the first ones that can be read."""
    failed = ranks(PAGES, number, retried=True)
    return [j for j in range(RESULTS) if j not in failed][:SHOWN]


class World:
    """The servers and the two knowledge bases."""

    def __init__(self) -> None:
        self.url = ""  # of the web, where pages and thumbnails lie
        self.searches = Faulty(searches := Searches(self.found, key="key-123"), self.of_search)
        searches.thumbnails = lambda url, rank: f"{self.url}/picture?red={rank}&at={url.rpartition('/page/')[2]}"
        self.pictures = Faulty(Web(), self.of_picture)
        self.jina = Faulty(Jina(self.read, key="key-123"), self.of_page)
        self.chats = Faulty(Chats(self.summary), self.of_summary)

    def found(self, query: str) -> list[str]:
        """Of the picture's address, or of words that end in a number."""
        number = int(re.findall(r"\d+$", query)[0])
        digit = number % 10 if "photo" in query else text_digit(number)
        return [f"{self.url}/page/{number}-{j}" for j in range(RESULTS)] if SEARCHES.get(digit) != "empty" else []

    def read(self, url: str) -> tuple[str, str]:
        number, j = map(int, url.rpartition("/")[2].split("-"))
        empty = PAGES.get((text_digit(number), j)) == "empty"
        return (
            f"Country {number}",
            "" if empty else f"Country {number} has a capital, says page {number}-{j}. It is Accra.",
        )

    def summary(self, messages: list[dict[str, str]]) -> str:
        number, j = place(messages[-1]["content"])
        return "" if SUMMARIES.get((text_digit(number), j)) == "empty" else f"Summary of {number}-{j}: it is Accra."

    async def of_search(self, request: Any) -> tuple[str, bool]:
        asked = request.query
        number = int(re.findall(r"\d+$", asked.get("url") or asked["q"])[0])
        return fault(SEARCHES, number % 10 if "url" in asked else text_digit(number)), always(number)

    async def of_picture(self, request: Any) -> tuple[str, bool]:
        number, j = map(int, request.query["at"].split("-"))
        return fault(PICTURES, (number % 10, j)), True

    async def of_page(self, request: Any) -> tuple[str, bool]:
        number, j = map(int, request.path.rpartition("/")[2].split("-"))
        return fault(PAGES, (text_digit(number), j)), always(number)

    async def of_summary(self, request: Any) -> tuple[str, bool]:
        number, j = place((await request.json())["messages"][-1]["content"])
        return fault(SUMMARIES, (text_digit(number), j)), always(number)


def fault(table: dict[Any, str], key: Any) -> str:
    """What the server does; that nothing is found, or written, is an answer like others."""
    return "" if (kind := table.get(key, "")) == "empty" else kind


def place(text: str) -> tuple[int, int]:
    """The page that a text is about."""
    number, j = re.findall(r"says page (\d+)-(\d+)", text)[0]
    return int(number), int(j)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[World, dict[str, Any]]]:
    monkeypatch.setenv("TEST_KEY", "key-123")
    monkeypatch.setattr(
        "routerl_jax.services.http.random.uniform", lambda low, high: 0.02
    )  # short pauses before retries
    made = World()
    with (
        serving(made.pictures) as web,
        serving(made.searches) as search,
        serving(made.jina) as jina,
        serving(made.chats) as chats,
    ):
        made.url = web.url
        service: dict[str, Any] = {"url": search.url, "api_key_env": "TEST_KEY", "concurrency": ATTEMPTS}
        model = ChatModelConfig(model="writer", base_url=f"{chats.url}/v1", retries=1, concurrency=2 * ATTEMPTS)
        text = WebConfig(
            search=SearchConfig(**service, candidates=RESULTS, timeout=SECONDS, retries=1),
            reader=ReaderConfig(
                kind="jina",
                url=jina.url,
                api_key_env="TEST_KEY",
                timeout=SECONDS,
                retries=1,
                concurrency=2 * ATTEMPTS,
                allow_networks=("127.0.0.0/8",),
            ),
            summary=SummaryConfig(model=model, instruction="general", about="question"),
            cache=CacheConfig(disk=False),
            pages=SHOWN,
            deadline=300.0,
        )
        reader = ReaderConfig(timeout=SECONDS, concurrency=2 * ATTEMPTS, allow_networks=("127.0.0.0/8",))
        image = WebConfig(
            mode="image", search=text.search, reader=reader, cache=text.cache, pages=SHOWN, deadline=300.0
        )
        tools = {"image": web_kb(image), "text": web_kb(text)}
        yield made, tools
        for kb in tools.values():
            kb.close()


def asked(stage: dict[str, int]) -> tuple[int, int]:
    return stage["asked"], stage["failures"]


def search_lost(digit: int, number: int) -> bool:
    return lost(SEARCHES.get(digit, ""), number)


def said(episode: Episode, call: Call) -> str:
    """What the policy reads of a call."""
    (observation,) = (turn.observation for turn in episode.turns if call in turn.calls)
    return observation.partition("<information>")[2].partition("</information>")[0]


REASONS = {
    "429": "HTTP 429: busy (tried 2 times)",
    "500": "HTTP 500: busy (tried 2 times)",
    "slow": "no reply within 8 s",
}
REASONS |= {"closed": "ServerDisconnectedError", "broken": "the reply is not JSON"}


def test_a_picture_without_a_url_where_the_search_engine_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy is told, and answers; the counts say which stage failed."""
    monkeypatch.setenv("TEST_KEY", "key-123")
    search = SearchConfig(url="http://127.0.0.1:9", api_key_env="TEST_KEY")
    kb = web_kb(WebConfig(mode="image", search=search, cache=CacheConfig(disk=False)))
    turns = ("<reason>?</reason><search><img></search>", "<reason>so</reason><answer>Accra</answer>")
    example = Example(id="q", question="Where?", answers=("Accra",), images=(seeing.picture(0),))
    agent = MMSearchAgent(image_tool="image", text_tool="text", max_turn_tokens=200)
    engine = SeeingScript(lambda _e, _s, turn: turns[turn], max_length=2000)
    (episode,) = run(agent, [example], engine, {"image": kb, "text": kb})
    kb.close()
    assert episode.answer == "Accra"
    (call,) = episode.calls
    assert "give http(s) URLs, or set upload.url to a place that takes PUT" in (call.error or "")
    assert f"The search failed: {call.error}" in episode.turns[0].observation
    assert asked(kb.stage_counts()["upload"]) == (1, 1)


@pytest.mark.slow
def test_a_storm_on_every_stage(world: tuple[World, dict[str, Any]]) -> None:
    servers, tools = world
    examples = [
        Example(
            id=f"{i}",
            question="What is its capital?",
            answers=("Accra",),
            images=(seeing.picture(i),),
            metadata={"image_urls": [f"{servers.url}/photo/{i}"]},
        )
        for i in range(ATTEMPTS)
    ]
    agent = MMSearchAgent(
        image_tool="image", text_tool="text", k=SHOWN, image_k=SHOWN, max_turn_tokens=200, answer_tokens=40
    )

    def script(example: str, _: int, turn: int) -> str:
        return (
            "<reason>which?</reason><search><img></search>",
            f"<reason>so it is</reason><text_search>capital of country {example}</text_search>",
            "<reason>so</reason><answer>Accra</answer>",
        )[turn]

    engine = SeeingScript(script, rows=ATTEMPTS, max_length=4000)
    episodes = run(agent, examples, engine, tools, tool_timeout=300.0)

    assert [episode.answer for episode in episodes] == ["Accra"] * ATTEMPTS
    assert not any(episode.truncated or turn.forced for episode in episodes for turn in episode.turns)
    for number, episode in enumerate(episodes):
        assert [call.tool for call in episode.calls] == ["image", "text"]
        for call, digit in zip(episode.calls, (number % 10, text_digit(number))):
            told, kind = said(episode, call), SEARCHES.get(digit, "")
            if search_lost(digit, number):
                assert call.passages == ()
                assert REASONS[kind] in (call.error or "")
                assert f"The search failed: {call.error}" in told
            else:
                assert call.error is None
                assert len(call.passages) == (0 if kind == "empty" else SHOWN)
                assert kind != "empty" or "Nothing was found." in told
        by_picture, in_words = episode.calls
        seen = [item for turn in episode.turns for item in turn.shown if item.digest and item.passage]
        assert [item.passage for item in seen] == [passage.id for passage in by_picture.passages]
        if by_picture.passages:
            kept = [j for j in range(RESULTS) if j not in ranks(PICTURES, number, retried=False)][:SHOWN]
            assert [passage.id[-1] for passage in by_picture.passages] == [str(j) for j in kept]
        if in_words.passages:
            assert [passage.id[-1] for passage in in_words.passages] == [str(j) for j in summarised(number)]
            for passage, j in zip(in_words.passages, summarised(number)):
                kind = SUMMARIES.get((text_digit(number), j), "")
                whole = kind != "empty" and not lost(kind, number)
                assert passage.text.startswith(
                    f"Summary of {number}-{j}" if whole else f"Country {number} has a capital"
                )
                assert passage.text in said(episode, in_words)

    numbers = range(ATTEMPTS)
    failed = {
        "image": [i for i in numbers if search_lost(i % 10, i)],
        "text": [i for i in numbers if search_lost(text_digit(i), i)],
    }
    counts = {name: tools[name].stage_counts() for name in tools}
    for name, lost_ones in failed.items():
        assert asked(counts[name]["query"]) == asked(counts[name]["search"]) == (ATTEMPTS, len(lost_ones))
    shown = [i for i in numbers if i not in failed["image"] and SEARCHES.get(i % 10) != "empty"]
    pictures = sum(len(ranks(PICTURES, i, retried=False)) for i in shown)
    assert asked(counts["image"]["picture"]) == (SHOWN * len(shown) + pictures, pictures)
    read = [i for i in numbers if i not in failed["text"] and SEARCHES.get(text_digit(i)) != "empty"]
    pages = sum(len(ranks(PAGES, i, retried=True)) for i in read)
    assert asked(counts["text"]["page"]) == (SHOWN * len(read) + pages, pages)
    kinds = [(i, SUMMARIES.get((text_digit(i), j), "")) for i in read for j in summarised(i)]
    bad = sum(kind == "empty" or lost(kind, i) for i, kind in kinds)
    assert asked(counts["text"]["summary"]) == (SHOWN * len(read), bad)
    found = summarize(episodes, budget=2)
    assert found["tool_error_rate"] == (len(failed["image"]) + len(failed["text"])) / (2 * ATTEMPTS)
    assert found["em"] == found["search_ratio"] == 1

    # as many failures as there were to be: each attempt that the rules allow has met with one
    given = Counter[str]()
    for i in numbers:
        for digit in (i % 10, text_digit(i)):
            if kind := fault(SEARCHES, digit):
                given[kind] += 2 if kind in PASSING and always(i) else 1
    given["closed"] = servers.searches.given[
        "closed"
    ]  # a client asks once more by itself where a kept connection was closed
    assert servers.searches.given == given
    assert min(given.values()) >= 12
    assert set(servers.pictures.given) == {"damaged", "500", "closed", "slow"}
    assert set(servers.jina.given) == {"429", "500", "closed", "slow", "broken"}
    assert set(servers.chats.given) == {"500", "429", "closed", "broken"}
