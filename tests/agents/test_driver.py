"""The driver: batching, order, and tools that fail."""

import asyncio
import dataclasses
import json
import re
import sys
import threading
import types
from asyncio import CancelledError
from typing import Any

import numpy as np
import pytest

from routerl_jax.agents.agent import LLM, Agent, Tools
from routerl_jax.agents.driver import DriverStats, no_room, run
from routerl_jax.core.background import in_thread, shared_loop
from routerl_jax.core.time_limit import seconds_left
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Episode, Example, Passage
from routerl_jax.evaluation.records import episode_record
from tests import tiny
from tests.agents.scripted import AGENT, ANSWER, SEARCH, ScriptedEngine, knowledge

EXAMPLES = [Example(id=f"q{i}", question=f"Question {i}?", answers=("Accra",)) for i in range(6)]


def script(example, sample, turn):
    return [SEARCH.format("text"), ANSWER][turn]


def test_all_outstanding_searches_go_out_in_one_batch():
    kbs = knowledge()
    stats = DriverStats()
    episodes = run(AGENT, EXAMPLES, ScriptedEngine(script, rows=64), kbs, samples=4, stats=stats)
    assert [(e.example.id, e.sample) for e in episodes] == [(f"q{i}", s) for i in range(6) for s in range(4)]
    assert [len(batch) for batch in kbs["text"].batches] == [24]
    assert (stats.tool_calls, stats.tool_errors) == (24, 0)


@pytest.mark.parametrize("deterministic", [True, False])
def test_observations_of_all_attempts_are_encoded_together(monkeypatch, deterministic):
    """One by one, they have the same tokens."""

    def ledgers():
        episodes = run(AGENT, EXAMPLES, ScriptedEngine(script, rows=64), knowledge(), deterministic=deterministic)
        return [episode.sequences[0].tokens.tolist() for episode in episodes]

    batches, prepare = [], Tokenizer.prepare

    def counted(self, texts):
        batches.append(list(texts))
        prepare(self, batches[-1])

    monkeypatch.setattr(Tokenizer, "prepare", counted)
    together = ledgers()
    assert [len(batch) for batch in batches] == [6]
    monkeypatch.setattr(Tokenizer, "prepare", lambda self, texts: None)
    assert ledgers() == together


def test_no_more_agents_than_rows_run_at_once():
    engine = ScriptedEngine(script, rows=5)
    assert len(run(AGENT, EXAMPLES, engine, knowledge(), samples=3)) == 18
    assert engine.peak == 5


def test_rows_that_were_freed_decode_in_the_next_segment():
    """The first attempt's turn takes three segments; each of the others takes one, on the second row."""

    class Slow(ScriptedEngine):
        decoding = ()

        def step(self):
            self.decoding += (len(self._wanted),)
            held = {key: wanted for key, wanted in self._wanted.items() if self._ids[key] == "q0" and self.steps < 2}
            for key in held:
                del self._wanted[key]
            finished = super().step()
            self._wanted |= held
            return finished

    engine = Slow(lambda *_: ANSWER, rows=2)
    assert [episode.answer for episode in run(AGENT, EXAMPLES[:4], engine, knowledge())] == ["Accra"] * 4
    assert engine.decoding == (2, 2, 2)


def test_a_tool_that_raises_becomes_an_observation():
    class Broken:
        def search(self, queries, k):
            raise ConnectionError("the index is on fire")

    stats = DriverStats()
    episodes = run(AGENT, EXAMPLES, ScriptedEngine(script), knowledge(text=Broken()), stats=stats)
    for episode in episodes:
        assert episode.answer == "Accra"
        assert episode.calls[0].error == "ConnectionError: the index is on fire"
        assert "the index is on fire" in episode.turns[0].observation
    assert stats.tool_errors == 6


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), StopIteration(), GeneratorExit(), CancelledError()]
)
def test_a_tool_that_exits_ends_no_run(error):
    class Exits:
        def search(self, queries, k):
            raise error

    for episode in run(AGENT, EXAMPLES[:2], ScriptedEngine(script), knowledge(text=Exits())):
        assert episode.answer == "Accra"
        assert episode.calls[0].error.startswith(f"{type(error).__name__}: ")


def test_work_that_exits_ends_no_loop_that_others_share():
    async def exits():
        raise SystemExit(3)

    for work in (exits(), in_thread(lambda: sys.exit(3), "exits")):
        with pytest.raises(RuntimeError, match="SystemExit: 3"):
            shared_loop().run(work, timeout=30)
    assert shared_loop().run(in_thread(lambda: 1, "works"), timeout=30) == 1


def test_one_bad_query_spoils_no_other():
    class Picky(tiny.ScriptedKB):
        def search(self, queries, k):
            if any("bad" in query for query in queries):
                raise ValueError("bad query")
            return super().search(queries, k)

    def say(example, sample, turn):
        query = "bad one" if example == "q3" else f"about {example}"
        search = f"<think>x</think><sub-question>{query}</sub-question><ret>text retriever</ret>"
        return [search, ANSWER][turn]

    episodes = run(AGENT, EXAMPLES, ScriptedEngine(say), knowledge(text=Picky()))
    assert [e.calls[0].error for e in episodes] == [None, None, None, "ValueError: bad query", None, None]
    assert all(len(e.calls[0].passages) == 2 for e in episodes if e.example.id != "q3")


def test_queries_of_a_failed_batch_share_one_more_timeout(monkeypatch):
    """By a clock on which each try takes 20 s: of six queries three begin within 50 s, and the others say that they did not."""
    now = [0.0]
    monkeypatch.setattr("routerl_jax.agents.calls.time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow:
        def search(self, queries, k):
            now[0] += 20
            raise ConnectionError("down")

    episodes = run(AGENT, EXAMPLES, ScriptedEngine(script), knowledge(text=Slow()), tool_timeout=50)
    errors = [e.calls[0].error for e in episodes]
    assert errors[:3] == ["ConnectionError: down"] * 3
    untried = "TimeoutError: the batch failed, and 3 of its 6 queries could not be tried by themselves within 50 s"
    assert all(error.startswith(untried) for error in errors[3:])
    assert [e.answer for e in episodes] == ["Accra"] * 6


def test_a_tool_is_told_how_long_it_is_waited_for_and_a_late_batch_is_not_tried_again():
    """It gives up by itself when that is over, and what it says is the error."""
    told = []

    class Patient:
        def search(self, queries, k):
            told.append((len(queries), seconds_left()))
            while seconds_left():
                threading.Event().wait(0.01)
            raise ConnectionError("nobody answered")

    episodes = run(AGENT, EXAMPLES[:3], ScriptedEngine(script), knowledge(text=Patient()), tool_timeout=20.0 / 19)
    assert [count for count, _ in told] == [3]
    assert 0 < told[0][1] <= 1.0
    assert {e.calls[0].error for e in episodes} <= {
        "ConnectionError: nobody answered",
        "TimeoutError: no reply within 1.05263 s",
    }
    assert seconds_left(5.0) == 5.0  # the limit was the search's alone


def test_a_tool_that_hangs_times_out():
    release = threading.Event()

    class Hanging:
        def search(self, queries, k):
            release.wait()
            return [[] for _ in queries]

    episodes = run(AGENT, EXAMPLES[:2], ScriptedEngine(script), knowledge(text=Hanging()), tool_timeout=0.3)
    release.set()
    assert [e.calls[0].error for e in episodes] == ["TimeoutError: no reply within 0.3 s"] * 2
    assert [e.answer for e in episodes] == ["Accra"] * 2


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_agent_may_give_a_search_up(deterministic):
    """Its reply, when it comes, disturbs nobody."""
    gave_up = threading.Event()

    class Slow(tiny.ScriptedKB):
        def search(self, queries, k):
            assert gave_up.wait(20)
            return super().search(queries, k)

    class Hasty(Agent):
        async def run(self, example, llm, tools):
            chat = llm.conversation(f"Question: {example.question}")
            searched = asyncio.ensure_future(tools["text"].search(example.id, k=1))
            if example.id == "q0":
                await asyncio.sleep(0.01)
                searched.cancel()
                gave_up.set()
            else:
                chat.observe((await searched).passages[0].text)
            turn = await chat.generate(max_tokens=100)
            return chat.episode(answer=turn.text)

    kbs = knowledge(text=Slow("text"))
    engine = ScriptedEngine(lambda *_: ANSWER, rows=64)
    episodes = run(Hasty(), EXAMPLES[:3], engine, kbs, deterministic=deterministic, tool_timeout=20)
    assert [len(episode.calls) for episode in episodes] == [0, 1, 1]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_tool_without_a_sensible_price_ends_the_run_and_is_named(deterministic):
    class Dear(tiny.ScriptedKB):
        cost = None

    tools = knowledge(text=Dear("text"))
    with pytest.raises(RuntimeError, match=r"failed on example .*: tool 'text' has cost=None; give a number"):
        run(AGENT, EXAMPLES[:2], ScriptedEngine(script), tools, deterministic=deterministic)
    assert not tools["text"].batches
    Dear.cost = np.float32(2.0)
    episodes = run(AGENT, EXAMPLES[:2], ScriptedEngine(script), tools, deterministic=deterministic)
    assert [episode.calls[0].cost for episode in episodes] == [2.0, 2.0]


def test_what_a_tool_says_of_its_failure_is_cut():
    class Verbose:
        def search(self, queries, k):
            raise ValueError("no " * 4000)

    [episode] = run(AGENT, EXAMPLES[:1], ScriptedEngine(script), knowledge(text=Verbose()))
    assert len(episode.calls[0].error) < 320
    assert episode.calls[0].error.endswith(" ..")
    assert "The search failed: ValueError: no no" in episode.turns[0].observation


@pytest.mark.parametrize("name", ["id", "title", "text"])
def test_passages_of_no_text_fail_their_query_and_halves_of_letters_are_mended(name):
    class Odd:
        def __init__(self, value):
            self.value = value

        def search(self, queries, k):
            return [[Passage(**{"id": "1", "title": "a", "text": "b", name: self.value})] for _ in queries]

    def played(value):
        [episode] = run(AGENT, EXAMPLES[:1], ScriptedEngine(script), knowledge(text=Odd(value)))
        return episode.calls[0]

    assert played(None).error == f"tool 'text' gave a Passage with {name}=None, which is no string"
    call = played("cut \ud83d short")
    assert call.error is None
    assert getattr(call.passages[0], name) == "cut ? short"


def test_replies_of_a_megabyte_are_kept_whole_and_shown_as_far_as_they_fit():
    """Of a search that works and of one that fails."""

    class Huge:
        def search(self, queries, k):
            if "fail" in queries[0]:
                raise ValueError("no " * 400_000)
            return [[Passage(id="1", title="", text="word " * 200_000), PASSAGE] for _ in queries]

    def say(example, sample, turn):
        return [SEARCH.format("text"), SEARCH.format("text").replace("capital", "fail"), ANSWER][turn]

    engine = ScriptedEngine(say, rows=1)
    episodes = run(AGENT, EXAMPLES[:2], engine, knowledge(text=Huge()))
    assert [episode.answer for episode in episodes] == ["Accra"] * 2
    for episode in episodes:
        assert [len(passage.text) for passage in episode.calls[0].passages] == [10**6, 4]
        assert len(episode.calls[1].error) < 320
        assert sum(len(sequence) for sequence in episode.sequences) <= engine.max_length
    assert engine.live == []


def test_scores_of_any_kind_of_number_are_written_down_and_others_fail_their_query():
    class Scored:
        def __init__(self, score):
            self.score = score

        def search(self, queries, k):
            return [[Passage(id="1", title="a", text="b", score=self.score)] for _ in queries]

    def played(score):
        [episode] = run(AGENT, EXAMPLES[:1], ScriptedEngine(script), knowledge(text=Scored(score)))
        return episode

    assert json.loads(json.dumps(episode_record(played(np.float32(0.5)))))["turns"][0]["calls"][0]["error"] is None
    assert played("high").calls[0].error == "tool 'text' gave a Passage with score='high', which is no number"


PASSAGE = Passage(id="1", title="", text="fine")


@pytest.mark.parametrize(
    ("result", "given"),
    [
        (None, "NoneType"),
        ("no luck", "str"),
        ("", "str"),
        ({}, "dict"),
        (iter([PASSAGE]), "list_iterator"),
        (["x"], "a list with str in it"),
        ([PASSAGE, {"text": "x"}], "a list with dict in it"),
    ],
)
def test_nonsense_for_a_query_is_an_error_of_that_query(result, given):
    class Odd:
        def search(self, queries, k):
            return [result if query == "odd" else [PASSAGE] for query in queries]

    def say(example, sample, turn):
        query = "odd" if example == "q1" else "even"
        return [SEARCH.format("text").replace("capital of Ghana", query), ANSWER][turn]

    episodes = run(AGENT, EXAMPLES[:3], ScriptedEngine(say), knowledge(text=Odd()))
    error = f"tool 'text' gave {given} instead of "
    assert [e.calls[0].error is None for e in episodes] == [True, False, True]
    assert episodes[1].calls[0].error.startswith(error)
    assert error in episodes[1].turns[0].observation
    assert [e.calls[0].passages for e in episodes] == [(PASSAGE,), (), (PASSAGE,)]
    assert [e.answer for e in episodes] == ["Accra"] * 3


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (lambda queries: None, "TypeError: tool 'text' gave NoneType instead of a list of results"),
        (lambda queries: "?" * len(queries), "TypeError: tool 'text' gave str instead of a list of results"),
        (
            lambda queries: {query: [PASSAGE] for query in queries},
            "TypeError: tool 'text' gave dict instead of a list of results",
        ),
        (
            lambda queries: ([PASSAGE] for _ in queries),
            "TypeError: tool 'text' gave generator instead of a list of results",
        ),
        (lambda queries: [], "ValueError: tool 'text' gave 0 results for 1 queries"),
        (lambda queries: [[PASSAGE]] * (len(queries) + 1), "ValueError: tool 'text' gave 2 results for 1 queries"),
    ],
)
def test_nonsense_for_a_batch_is_an_error_of_each_query(reply, error):
    class Odd:
        def search(self, queries, k):
            return reply(queries)

    episodes = run(AGENT, EXAMPLES[:2], ScriptedEngine(script), knowledge(text=Odd()))
    assert [e.calls[0].error for e in episodes] == [error] * 2
    assert [e.answer for e in episodes] == ["Accra"] * 2


def test_an_agent_that_raises_is_named():
    class Faulty(Agent):
        async def run(self, example, llm, tools):
            raise KeyError("oops")

    with pytest.raises(RuntimeError, match=r"the agent failed on example 'q0', sample 0.*oops"):
        run(Faulty(), EXAMPLES, ScriptedEngine(script), knowledge())


class Forgetful(Agent):
    async def run(self, example, llm, tools):
        llm.conversation("Question: ").episode(answer="x")


class Lost(Agent):
    async def run(self, example, llm, tools):
        assert "nope" not in tools
        assert tools.get("nope") is None
        await tools["tabel"].search("x")


class NotAsync(Agent):
    def run(self, example, llm, tools):
        return llm.conversation("Question: ").episode(answer="x")


class AnswersWithATurn(Agent):
    async def run(self, example, llm, tools):
        chat = llm.conversation("Question: ")
        return chat.episode(answer=await chat.generate(max_tokens=100))


@pytest.mark.parametrize(
    ("agent", "error", "message"),
    [
        (
            Forgetful(),
            ValueError,
            "Forgetful.run gave None on example 'q0', sample 0, and no Episode: let it end with `return",
        ),
        (
            Lost(),
            ValueError,
            "there is no tool 'tabel'; did you mean 'table'? There are: text, table (config.knowledge names",
        ),
        (NotAsync(), ValueError, "NotAsync.run is no coroutine: write it as `async def run`"),
        (AnswersWithATurn(), RuntimeError, "an answer is a string, or None where there is none, and not a Turn"),
    ],
)
def test_an_agent_s_mistakes_are_named(agent, error, message):
    engine = ScriptedEngine(script)
    with pytest.raises(error, match=re.escape(message)):
        run(agent, EXAMPLES, engine, knowledge())
    assert not engine.live


def test_ids_must_be_distinct():
    with pytest.raises(ValueError, match="example id 'q0' occurs twice"):
        run(AGENT, [EXAMPLES[0], EXAMPLES[0]], ScriptedEngine(script), knowledge())


class Comparing(Agent):
    """Asks two knowledge bases at once."""

    async def run(self, example, llm, tools):
        chat = llm.conversation(f"Question: {example.question}")
        await chat.generate(stop=("</ret>",), max_tokens=100)
        calls = await asyncio.gather(*(tools[name].search(example.id, k=1) for name in ("text", "table")))
        chat.observe(" ".join(call.passages[0].text for call in calls))
        turn = await chat.generate(stop=("</answer>",), max_tokens=100)
        return chat.episode(answer=turn.text)


def test_agents_may_call_tools_in_parallel():
    kbs = knowledge()
    episodes = run(Comparing(), EXAMPLES, ScriptedEngine(script, rows=64), kbs)
    assert [len(batch) for kb in kbs.values() for batch in kb.batches] == [6, 6]
    assert all([call.tool for call in e.calls] == ["text", "table"] for e in episodes)


PICTURED = []


class Late(Agent):
    """Fetches the pictures of what it found only after its next turn."""

    async def run(self, example, llm, tools):
        chat = llm.conversation(f"Question: {example.question}")
        calls = [await tools["text"].search(example.id, k=1)]
        await chat.generate(stop=("</ret>",), max_tokens=100)
        calls.append(await tools["table"].search(example.id, k=1))
        turn = await chat.generate(stop=("</answer>",), max_tokens=100)
        PICTURED[:] = [await tools[call.tool].with_pictures(call, call.passages) for call in calls]
        return chat.episode(answer=turn.text)


class Twice(Agent):
    """Searches, then fetches the pictures of all that it found."""

    async def run(self, example, llm, tools):
        chat = llm.conversation(f"Question: {example.question}")
        call = await tools["text"].search(example.id, k=1, pictures=False)
        PICTURED[:] = [await tools["text"].with_pictures(call, call.passages)]
        turn = await chat.generate(stop=("</ret>", "</answer>"), max_tokens=100)
        return chat.episode(answer=turn.text)


def test_a_search_in_every_knowledge_base_asks_none_for_the_pictures_of_another():
    agent = Twice().alternatives(("text", "table"))["every_kb"]
    (episode,) = run(agent, EXAMPLES[:1], ScriptedEngine(script), knowledge())
    assert [call.tool for call in episode.calls] == ["text", "table"]
    assert PICTURED[0].error is None
    assert PICTURED[0].passages == tuple(call.passages[0] for call in episode.calls)


def test_pictures_may_be_fetched_after_another_turn():
    """They go to the calls whose they are."""
    (episode,) = run(Late(), EXAMPLES[:1], ScriptedEngine(script), knowledge())
    assert [[call.tool for call in turn.calls] for turn in episode.turns] == [["text", "table"], []]
    assert all(found is pictured for found, pictured in zip(episode.calls, PICTURED, strict=True))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrievesFirst(Agent):
    """Searches before the policy has written anything."""

    async def run(self, example, llm, tools):
        found = await tools["text"].search(example.question, k=1)
        chat = llm.conversation(f"{found.passages[0].text} Question: {example.question}\n")
        turn = await chat.generate(stop=("</ret>",), max_tokens=100)
        await tools["table"].search("more", k=1)
        await chat.generate(stop=("</answer>",), max_tokens=100)
        return chat.episode(answer=turn.text)


def test_searches_before_the_first_turn_are_the_episode_s():
    for episode in run(RetrievesFirst(), EXAMPLES, ScriptedEngine(script, rows=64), knowledge(), samples=2):
        assert [[call.tool for call in turn.calls] for turn in episode.turns] == [["text", "table"], []]


def test_overlap_gives_the_same_episodes_and_does_not_wait_for_slow_tools():
    """The text tool replies only after the callers of the table tool have gone on to their second turns."""
    went_on = threading.Event()

    class Slow(tiny.ScriptedKB):
        def search(self, queries, k):
            if not went_on.wait(5):
                raise TimeoutError("nothing was decoded meanwhile")
            return super().search(queries, k)

    class Engine(ScriptedEngine):
        def step(self):
            if self.steps == 1:
                went_on.set()
            return super().step()

    def say(example, sample, turn):
        number = int(example[1:])
        return [*[SEARCH.format("table" if number % 2 else "text")] * (1 + number % 3), ANSWER][turn]

    plain = run(AGENT, EXAMPLES, ScriptedEngine(say, rows=64), knowledge())
    overlapped = run(AGENT, EXAMPLES, Engine(say, rows=64), knowledge(text=Slow("text")), deterministic=False)
    for a, b in zip(plain, overlapped):
        assert a.sequences[0].tokens.tolist() == b.sequences[0].tokens.tolist()


def test_runs_inside_a_running_event_loop():
    async def notebook():
        return run(AGENT, EXAMPLES[:2], ScriptedEngine(script), knowledge())

    assert [e.answer for e in asyncio.run(notebook())] == ["Accra", "Accra"]


def test_cassette_replays_a_run_without_the_tools(tmp_path):
    from routerl_jax.knowledge.cassette import Cassette

    def recorded(mode, kbs):
        cassette = Cassette(tmp_path / "calls.jsonl", mode=mode)
        return run(AGENT, EXAMPLES, ScriptedEngine(script), {n: cassette.wrap(n, kb) for n, kb in kbs.items()})

    class Gone:
        def search(self, queries, k):
            raise AssertionError("the real tool was called")

    first = recorded("record", knowledge())
    again = recorded("replay", knowledge(text=Gone(), table=Gone()))
    for a, b in zip(first, again):
        assert a.sequences[0].tokens.tolist() == b.sequences[0].tokens.tolist()
        assert a.calls[0].passages == b.calls[0].passages
    assert isinstance(again[0].calls[0].passages[0], Passage)


# --- prompts that leave no room for a turn are found without a model's help ---


SHORT = Example(id="short", question="Who?", answers=("x",))
LONG = Example(id="long", question="Who? " * 100, answers=("x",))


def room(agent: Agent, examples: list[Example], max_length: int) -> str:
    engine: Any = ScriptedEngine(lambda *_: "", max_length=max_length)
    found = no_room(agent, examples, engine, ("text", "table"))
    assert engine.live == []
    return found


def test_one_question_that_fits_is_enough() -> None:
    assert room(AGENT, [SHORT], 1000) == ""
    assert room(AGENT, [LONG, SHORT], 100) == ""
    assert "'long'" in room(AGENT, [LONG], 100)
    assert room(AGENT, [], 1) == ""


def test_a_prompt_alone_is_no_conversation() -> None:
    """The agent keeps room for its answer; where only the prompt fits, no turn is asked for."""
    engine = ScriptedEngine(lambda *_: "")
    prompt = len(AGENT.opening(SHORT, engine.tokenizer))
    reserve = AGENT.answer_tokens + len(engine.tokenizer.encode(AGENT.last_opening))
    assert room(AGENT, [SHORT], prompt + reserve) == ""
    told = room(AGENT, [SHORT], prompt + reserve - 1)
    assert told == f"the prompt of example 'short' has {prompt} tokens, and a turn does not fit beside it"


@dataclasses.dataclass(frozen=True)
class SearchesFirst(Agent):
    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        try:
            await tools["text"].search(example.question)
        except Exception:
            pytest.fail("what ends the trial is nobody's error")
        raise AssertionError("a tool was asked, and answered")


def test_an_agent_that_asks_a_tool_first_is_not_judged() -> None:
    assert room(SearchesFirst(), [LONG], 10) == ""


class AsksForNoTool(Agent):
    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        await tools["texts"].search(example.question)
        raise AssertionError("there is no such tool")


def test_what_is_wrong_with_an_agent_is_told_here_as_by_the_driver() -> None:
    with pytest.raises(ValueError, match="example 'short': there is no tool 'texts'; did you mean 'text'"):
        room(AsksForNoTool(), [SHORT], 1000)
    with pytest.raises(ValueError, match=r"NotAsync\.run is no coroutine: write it as `async def run`"):
        room(NotAsync(), [SHORT], 1000)
