"""VRAG-RL beside a knowledge base of pages on a true server: it shows the same, and no other picture travels."""

import base64
import collections
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.driver import run
from routerl_jax.core.types import Episode, Example
from routerl_jax.extras.kb_server.app import Served, create_app
from routerl_jax.knowledge.client.kb import HttpKB
from routerl_jax.knowledge.client.transport import RequestRefused, Retries, Unavailable
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.pages.build import PagesConfig, build_pages
from routerl_jax.knowledge.pages.kb import PageKB
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.services.cache import MemoryCache
from tests.agents.scripted import SeeingScript
from tests.extras.kb_server.servers import error_of, running, scripted, search
from tests.knowledge import late

EXAMPLES = [Example(id=f"q{i}", question=f"What is on slide {i}?", answers=("42",)) for i in range(3)]
LOOK, ANSWER = "<bbox>[4, 4, 24, 20]</bbox>", "<answer>42</answer>"
AGENT = VRAGAgent(tool="pages", max_turns=5, max_turn_tokens=200, answer_tokens=40)
FAST = Retries(attempts=2, base=0.01, cap=0.02, seed=0)


def script(name: str, _sample: int, turn: int) -> str:
    search = f"<search>what is on slide {name}?</search>"
    return [search, LOOK, search, LOOK, ANSWER][turn]


class Meter:
    """An ASGI application's replies, in bytes by the last part of the path."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.bytes: collections.Counter[str] = collections.Counter()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def metered(message: Any) -> None:
            if message["type"] == "http.response.body":
                self.bytes[scope["path"].rpartition("/")[2]] += len(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, metered if scope["type"] == "http" else send)


class Bases(NamedTuple):
    here: PageKB
    url: str
    meter: Meter


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    """Twelve pages of 480 x 640 in a knowledge base, here and served."""
    home = tmp_path_factory.mktemp("pages")
    for i in range(12):
        late.write_picture(home / "slides" / f"slide{i}.png", i, (480, 640))
    config = PagesConfig(corpus=str(home / "slides"), encoder="late", precision="float32")
    build_pages(config, home / "pages", progress=False, encoder=late.model())
    kb = load_kb(home / "pages", encoder=late.model())  # type: ignore[arg-type]
    assert isinstance(kb, PageKB)
    meter = Meter(create_app([Served("pages", {"default": kb})]))
    with running(meter) as url:
        yield Bases(kb, f"{url}/pages", meter)


class SearchAlone:
    """A knowledge base as a tool that can only be searched, as any other program's is."""

    def __init__(self, kb: SearchTool) -> None:
        self.search = kb.search


def play(tool: SearchTool, agent: VRAGAgent = AGENT) -> list[Episode]:
    return run(agent, EXAMPLES, SeeingScript(script, max_length=1500), {"pages": tool})


def digests(episodes: list[Episode]) -> list[list[str]]:
    return [[item.digest for turn in episode.turns for item in turn.shown] for episode in episodes]


def test_only_what_is_shown_travels(bases: Bases) -> None:
    """Two searches of ten pages an episode, of each of which one is shown: at most two pages' bytes, and not twenty's."""
    here = play(bases.here)
    sent = {}
    for name, tool in (("before", SearchAlone(HttpKB(bases.url))), ("now", HttpKB(bases.url))):
        bases.meter.bytes.clear()
        there = play(tool)
        sent[name] = dict(bases.meter.bytes)
        assert digests(there) == digests(here)
        for one, other in zip(there, here):
            assert [turn.observation for turn in one.turns] == [turn.observation for turn in other.turns]
            np.testing.assert_array_equal(one.sequences[0].tokens, other.sequences[0].tokens)
            assert [[p.id for p in call.passages] for call in one.calls] == [
                [p.id for p in call.passages] for call in other.calls
            ]
    page = len(base64.b64encode(pathlib.Path(bases.here.search(["x"], 1)[0][0].image).read_bytes()))
    assert sent["before"]["search"] == pytest.approx(60 * page, rel=0.1)
    fetched = {(i, episode.turns[i].shown[0].passage) for episode in there for i in (0, 2)}  # each once a batch
    assert 2 <= len(fetched) <= 6
    assert sent["now"]["pictures"] == pytest.approx(len(fetched) * page, rel=0.1)
    assert sent["now"]["search"] < 0.01 * sent["before"]["search"]
    print(f"bytes of 3 episodes of 2 searches: {sent}")
    shown = [[passage for call in episode.calls for passage in call.passages if passage.image] for episode in there]
    assert [len(passages) for passages in shown] == [2] * 3  # the record has no more of them, either


def test_pages_as_text_bring_no_picture(bases: Bases) -> None:
    bases.meter.bytes.clear()
    play(HttpKB(bases.url), dataclasses.replace(AGENT, shows="text", looks=False))
    assert bases.meter.bytes["pictures"] == 0
    assert bases.meter.bytes["search"] < 20_000


def test_a_search_by_itself_brings_its_pictures(bases: Bases) -> None:
    """As docs/serving.md has it: `kb.search` as if it were here."""
    kb = HttpKB(bases.url)
    (found,) = kb.search(["red"], 3)
    (listed,) = kb.listing.search(["red"], 3)
    assert [dataclasses.replace(passage, image="") for passage in found] == listed
    assert kb.pictures([passage.id for passage in found]) == [passage.image for passage in found]
    content = base64.b64decode(found[0].image.partition(",")[2])
    assert content == pathlib.Path(bases.here.pictures([found[0].id])[0]).read_bytes()


def test_pictures_are_kept_by_the_pages_id(bases: Bases) -> None:
    kb = HttpKB(bases.url, cache=MemoryCache(1 << 24))
    play(kb)
    bases.meter.bytes.clear()
    again = play(kb)
    assert bases.meter.bytes == {}
    assert digests(again) == digests(play(bases.here))


def test_a_picture_that_can_t_be_had_is_a_failed_search(bases: Bases) -> None:
    """The policy is told, and the page was not shown: the next search brings it again."""
    ids = [passage.id for passage in bases.here.search(["what is on slide q0?"], 2)[0]]
    about = {"size": 12, "cost": 2.0, "reads": ["text"], "pictures": True}
    hello = (200, {}, {"name": "pages", "default_mode": "default", "modes": {"default": about}})
    found = [{"id": id, "title": "", "text": "", "score": 1.0, "image": ""} for id in ids]
    listing = (200, {}, {"results": [found] * 3, "query_seconds": [0.1] * 3})
    with scripted(hello, listing, (200, {}, {"images": ["/etc/hostname"]})) as (url, seen):
        kb = HttpKB(url, retries=FAST)
        kb.listing.search([example.question for example in EXAMPLES], 2)
        with pytest.raises(Unavailable, match="no data URI"):
            kb.pictures(ids[:1])
    assert seen[1:] == ["/v1/search", "/v1/pictures"]

    class Lost(HttpKB):
        lost = 1

        def pictures(self, ids: Any) -> list[str]:
            if self.lost:
                self.lost -= 1
                raise Unavailable("the disk is gone")
            return super().pictures(ids)

    (episode,) = run(
        AGENT,
        EXAMPLES[:1],
        SeeingScript(lambda name, s, turn: script(name, s, 2 * turn), max_length=1500),
        {"pages": Lost(bases.url)},
    )
    assert "The search failed: Unavailable: the disk is gone" in episode.turns[0].observation
    assert [[item.passage for item in turn.shown] for turn in episode.turns] == [[], [ids[0]], []]
    assert [call.error for call in episode.calls] == ["Unavailable: the disk is gone", None]


def test_what_is_no_picture_is_refused(bases: Bases) -> None:
    def refused(body: Any) -> tuple[int, str, str]:
        return error_of(search(bases.url, body, "/v1/pictures"))

    assert refused({"ids": ["nowhere.pdf#1"]}) == (
        400,
        "invalid_request",
        "'nowhere.pdf#1' is no page of knowledge base 'pages'",
    )
    assert refused({"ids": "slide1.png#1"})[2].startswith("ids must be a list of strings")
    assert refused({"ids": [], "k": 3})[2] == "unknown key 'k'; known: ids, mode"
    assert refused({"ids": ["x"] * 1025})[:2] == (413, "too_large")
    assert refused({"ids": [], "mode": "graph"})[1] == "unknown_mode"
    with pytest.raises(RequestRefused, match="is no page of"):
        HttpKB(bases.url).pictures(["nowhere.pdf#1"])
