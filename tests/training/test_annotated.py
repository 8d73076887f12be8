"""Worked examples of annotated questions: what is asked, what is learnt from it, and what is left out."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.readers import open_dataset
from routerl_jax.knowledge.load import load_kb
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.training import annotated, sft
from routerl_jax.training.annotated import drawn_examples, reading_examples, worked_examples
from routerl_jax.training.checks import check_workdir
from routerl_jax.training.config import AgentConfig, DataConfig, KnowledgeConfig, TrainConfig, WarmStartConfig
from routerl_jax.training.demonstrations import open_demonstrations
from routerl_jax.training.knowledge import open_knowledge
from routerl_jax.training.setup import build_recipe
from routerl_jax.training.sft import supervised
from tests.programs import two_processes
from tests.training.small_run import make_sft_config, write_rows

PASSAGES = {
    "ew": Passage(id="ew", title="Ew!", text='"Ew!" is a song by Jimmy Fallon. It was released in 2014.'),
    "fallon": Passage(
        id="fallon",
        title="Jimmy Fallon (host)",
        text="Jimmy Fallon is a television host. He was born in Bay Ridge, Brooklyn. He lives elsewhere.",
    ),
    "company": Passage(id="company", title="East India Company", text="It was chartered in 1600 by the queen."),
    "queen": Passage(id="queen", title="Queen Victoria", text="In 1858 the East India Company was dissolved."),
    "other": Passage(id="other", title="Brooklyn", text="Brooklyn is a borough."),
}


class Names:
    """A knowledge base that finds the passages whose names a query has, then others; it keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += queries
        return [self._find(query)[:k] for query in queries]

    def _find(self, query: str) -> list[Passage]:
        def rank(passage: Passage) -> bool:
            return passage.title.partition(" (")[0].lower() not in query.lower()

        return sorted(PASSAGES.values(), key=rank)


def example(question: str, answer: str, gold: Sequence[str], **metadata: Any) -> Example:
    titles = [PASSAGES[name].title for name in gold]
    metadata |= {"supporting": list(gold), "supporting_titles": titles}
    return Example(id=question[:8], question=question, answers=(answer,), metadata=metadata)


BRIDGE = example('"Ew!" is a song by a host born where?', "Bay Ridge, Brooklyn", ("ew", "fallon"))


def test_a_title_is_asked_for_once_it_has_been_read() -> None:
    tool = Names()
    [worked] = worked_examples([BRIDGE], {"text": tool}, k=1, max_searches=2, seed=0)
    assert tool.asked == ["Ew!", "Jimmy Fallon"]  # the second is named in what the first found; its aside is not
    first, second = worked.steps
    assert [p.id for p in first.passages] == ["ew"]
    assert first.thought == "I need to read about Ew!."
    assert second.thought == '"Ew!" is a song by Jimmy Fallon. I need to read about Jimmy Fallon.'
    assert worked.thought == "He was born in Bay Ridge, Brooklyn."
    assert worked.answer == "Bay Ridge, Brooklyn"
    assert worked.forced
    [ahead_of_its_budget] = worked_examples([BRIDGE], {"text": Names()}, k=1, max_searches=3, seed=0)
    assert not ahead_of_its_budget.forced


def test_a_path_says_what_is_asked_and_where_it_is() -> None:
    """The form of Atlas and of rows of one's own. The knowledge base is drawn all the same."""
    path = [
        {"kb": "text", "passage_id": "ew", "query": "Whose song is Ew!?", "value": "Jimmy Fallon"},
        {"kb": "text", "passage_id": "fallon", "query": "Where was Jimmy Fallon born?", "value": "Bay Ridge"},
    ]
    question = Example(id="1", question="Where is the host born?", answers=("Bay Ridge",), metadata={"path": path})
    tool = Names()
    [worked] = worked_examples([question], {"text": tool}, k=1, max_searches=2, seed=0)
    assert tool.asked == [hop["query"] for hop in path]
    assert worked.steps[0].thought == "I need to know: Whose song is Ew!?"
    assert worked.thought == "He was born in Bay Ridge, Brooklyn."
    nothing = dataclasses.replace(question, metadata={"path": "a/picture.png"})
    assert not worked_examples([nothing], {"text": Names()}, k=1, max_searches=2, seed=0)


class OneTown:
    """A knowledge base in which every search finds the same passage."""

    def __init__(self, text: str) -> None:
        self.passage = Passage(id=text, title="Towns", text=text)

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        return [[self.passage] for _ in queries]


def test_drawn_searches_teach_reading_and_nothing_of_where_to_look() -> None:
    """Of 400 questions, half of which only `left` answers: every place is drawn as often, whatever it finds; the answer is the
    accepted one that is read."""
    towns = [Example(id=f"l{i}", question="Where?", answers=("Paris, France", "paris")) for i in range(200)]
    rivers = [Example(id=f"r{i}", question="Which?", answers=("the Rhine",)) for i in range(200)]
    tools = {"left": OneTown("Paris is large."), "right": OneTown("Rhine, a river.")}
    drawn = drawn_examples([*towns, *rivers], tools, k=1, max_searches=1, seed=3, normalizer="search_r1")
    assert len(drawn) == 400
    places = {"l": {"left": 0, "right": 0}, "r": {"left": 0, "right": 0}}
    for one in drawn:
        [step] = one.demonstration.steps
        kind = one.demonstration.example.id[0]
        places[kind][step.tool] += 1
        assert one.found == (step.tool == {"l": "left", "r": "right"}[kind])
        assert one.demonstration.forced
        if one.found:
            assert one.demonstration.answer == {"l": "paris", "r": "the Rhine"}[kind]
    # 200 fair draws are outside 72 to 128 once in 10,000 times
    assert all(72 < count < 128 for counts in places.values() for count in counts.values())


def test_what_no_drawn_search_showed_is_read_after_one_that_shows_it() -> None:
    """By the question or the title of a gold passage, in any place; what nothing shows is left out."""
    town = Example(id="t", question="Where?", answers=("Paris, France", "paris"))
    host = dataclasses.replace(BRIDGE, id="b")
    nothing = Example(id="n", question="Why?", answers=("so",))
    tools = {"left": OneTown("Paris is large."), "right": Names()}
    first, second = reading_examples([town, host, nothing], tools, k=1, seed=0, normalizer="search_r1")
    assert (first.example.id, first.answer, [step.tool for step in first.steps]) == ("t", "paris", ["left"])
    assert (second.example.id, [step.query for step in second.steps]) == ("b", ["Jimmy Fallon"])
    assert first.forced
    assert second.forced


def test_drawn_searches_are_one_or_two_and_ask_for_what_was_read() -> None:
    """The bridge is named only once it has been read; it is asked for, or the question, or the query before."""
    questions = [dataclasses.replace(BRIDGE, id=str(i)) for i in range(300)]
    drawn = drawn_examples(questions, {"text": Names()}, k=1, max_searches=2, seed=0, normalizer="search_r1")
    asked = [tuple(step.query for step in one.demonstration.steps) for one in drawn]
    alone = sum(len(queries) == 1 for queries in asked)
    assert 110 < alone < 190
    assert {queries[0] for queries in asked} == {BRIDGE.question, "Ew!"}
    assert ("Ew!", "Jimmy Fallon") in asked
    assert ("Ew!", "Ew!") in asked
    for one, queries in zip(drawn, asked):
        assert one.found == ("Jimmy Fallon" in queries)
        assert one.demonstration.forced == (len(queries) == 2)


def test_what_two_searches_would_find_one_may() -> None:
    question = example("Who is Jimmy Fallon, and is Ew! his?", "yes", ("ew", "fallon"))
    [worked] = worked_examples([question], {"text": Names()}, k=2, max_searches=3, seed=0)
    [step] = worked.steps
    assert step.query == "Jimmy Fallon"  # the first that the question names
    assert worked.thought.startswith("Jimmy Fallon is a television host.")
    assert "a song" in worked.thought


def test_sub_questions_with_their_answers() -> None:
    steps = [
        {
            "question": "What company was dissolved >> Queen Victoria",
            "answer": "East India Company",
            "support": "queen",
        },
        {"question": "When was #1 chartered?", "answer": "1600", "support": "company"},
    ]
    question = example(
        "When was what ended after the rebellion chartered?", "1600", ("company", "queen"), decomposition=steps
    )
    tool = Names()
    [worked] = worked_examples([question], {"text": tool}, k=1, max_searches=2, seed=0)
    assert tool.asked == ["What company was dissolved, Queen Victoria", "When was East India Company chartered?"]
    assert worked.steps[1].thought.startswith("In 1858 the East India Company was dissolved. I need to know: When")


def test_what_cannot_be_worked_out_is_left_out() -> None:
    unnamed = example("Which borough is meant?", "Brooklyn", ("other",))
    nothing = Example(id="n", question="Why?", answers=("so",))
    retrieval_only = example("Who wrote Ew!?", "", ("ew",))
    retrieval_only = Example(
        id="r", question=retrieval_only.question, answers=(), metadata=dict(retrieval_only.metadata)
    )
    tool = Names()
    assert not worked_examples([unnamed, nothing, retrieval_only], {"text": tool}, k=1, max_searches=2, seed=0)
    assert tool.asked == ["Which borough is meant?"]  # no passage that was read names it: the question is asked, once
    assert not worked_examples([BRIDGE], {"text": Names()}, k=1, max_searches=1, seed=0)  # two searches are needed


class Failing(Names):
    """One that has trouble with some queries."""

    def __init__(self, trouble: str) -> None:
        super().__init__()
        self.trouble = trouble

    def _find(self, query: str) -> list[Passage]:
        if self.trouble in query:
            raise ConnectionError("the index is down")
        return super()._find(query)


def test_a_search_that_fails_ends_the_work() -> None:
    """Without it other examples would be learnt from, and again others by a run that resumes."""
    one = example("Which borough is Brooklyn?", "Brooklyn", ("other",))
    with pytest.raises(
        RuntimeError, match=r"1 of 1 searches .* the first one, of text for 'Jimmy Fallon', with: .*is down"
    ):
        worked_examples([BRIDGE, one], {"text": Failing("Fallon")}, k=1, max_searches=2, seed=0)
    with pytest.raises(RuntimeError, match=r"2 of 2 searches for demonstrations failed.*raise config.rollout.tool_tim"):
        worked_examples([BRIDGE, one], {"text": Failing("")}, k=1, max_searches=2, seed=0)


def test_searches_go_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotated, "_BATCH", 3)
    sizes = []

    class Counting(Names):
        def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
            sizes.append(len(queries))
            return super().search(queries, k)

    assert len(worked_examples([BRIDGE] * 4, {"text": Counting()}, k=1, max_searches=2, seed=0)) == 4
    assert sizes == [3, 1, 3, 1]


@pytest.mark.slow
def test_two_processes_share_searches_and_what_they_found(tmp_path: pathlib.Path) -> None:
    """Every second search is the other process's. What fails on one of them is an error on both."""
    outputs = two_processes("tests.training.two_searchers", workdir=tmp_path)
    main, other = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert main["found"] == other["found"] == [[["Ew!", ["ew"]], ["Jimmy Fallon", ["fallon"]]]] * 4
    assert main["asked"] == other["asked"] == ["Ew!"] * 2 + ["Jimmy Fallon"] * 2
    assert main["failed"] == other["failed"]
    assert "2 of 4 searches for demonstrations failed" in main["failed"]
    assert main["broken"] == "TypeError: tool 'text' has cost='much'; give a number, or no `cost`, which is 1"
    assert other["broken"] == f"RuntimeError: another process failed: {main['broken']}"


def test_knowledge_bases_are_drawn() -> None:
    questions = [BRIDGE] * 40
    tools = {"one": Names(), "other": Names()}
    worked = worked_examples(questions, tools, k=1, max_searches=2, seed=1)
    share = np.mean([step.tool == "one" for one in worked for step in one.steps])
    assert 0.3 < share < 0.7
    assert [one.steps for one in worked] == [
        one.steps for one in worked_examples(questions, tools, k=1, max_searches=2, seed=1)
    ]


@pytest.fixture
def config(tmp_path: pathlib.Path) -> TrainConfig:
    """Twenty questions of two hops over a corpus in files, searched by BM25."""
    corpus, questions = [], []
    for number in range(20):
        song, host = f"Song{number}", f"Host{number}"
        corpus += [
            {"id": f"s{number}", "title": song, "text": f"{song} is sung by {host}."},
            {"id": f"h{number}", "title": host, "text": f"{host} was born in Town{number}."},
        ]
        questions.append(
            {
                "id": f"q{number}",
                "question": f"Where was the singer of {song} born?",
                "golden_answers": [f"Town{number}"],
                "supporting": [f"s{number}", f"h{number}"],
                "supporting_titles": [song, host],
            }
        )
    write_rows(tmp_path / "corpus.jsonl", corpus)
    write_rows(tmp_path / "questions.jsonl", questions)
    return make_sft_config(
        agent=AgentConfig(grammar="search_r1", max_searches=2, k=1),
        knowledge={
            "text": KnowledgeConfig(source=str(tmp_path / "corpus.jsonl"), kind="bm25", directory=str(tmp_path / "kb"))
        },
        data=DataConfig(train=str(tmp_path / "questions.jsonl"), train_range=(0, 12)),
        warm_start=WarmStartConfig(demonstrations="annotated", examples=2, vocabulary=400),
        steps=1,
    )


@pytest.mark.slow
def test_a_supervised_run_on_annotated_questions(
    config: TrainConfig, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = build_recipe(config).agent
    training, held_out = open_demonstrations(config, agent)
    assert (len(training), len(held_out)) == (11, 1)
    names = {training[i].example.id for i in range(11)} | {held_out[0].example.id}
    assert names == {f"q{i}" for i in range(12)}  # of the training range alone
    text = "".join(piece for piece, _ in training[0].pieces)
    assert text.count("<search>") == 2
    assert text.endswith("</answer>")
    monkeypatch.setattr(sft, "_VOCABULARY_EXAMPLES", 4)
    metrics = sft.train_sft(config, tmp_path / "run")
    assert np.isfinite(metrics["held_out/nll"])


@pytest.mark.parametrize(("grammar", "fed"), [("r1_searcher", ""), ("r1_searcher_answer", "</think>\n<answer>")])
def test_an_answer_that_a_rollout_would_begin_is_not_learnt(config: TrainConfig, grammar: str, fed: str) -> None:
    """Both searches of the budget are made."""
    config = dataclasses.replace(config, agent=dataclasses.replace(config.agent, grammar=grammar))
    training, _ = open_demonstrations(config, build_recipe(config).agent)
    for i in range(len(training)):
        pieces = training[i].pieces
        learnt = "".join(text for text, own in pieces if own)
        assert learnt.count("<answer>") == (0 if fed else 1)
        assert not fed or pieces[-2] == (fed, False)
        assert learnt.endswith("</answer>")


def test_no_more_is_worked_out_than_is_learnt(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four portions of three questions: two examples and the one that is held out come from the first."""
    monkeypatch.setattr(annotated, "_PORTION", 3)
    agent = build_recipe(config).agent

    def names(run: TrainConfig) -> set[str]:
        training, held_out = open_demonstrations(run, agent)
        return {part[i].example.id for part in (training, held_out) for i in range(len(part))}

    few = names(config)
    assert len(few) == 3
    assert few != {"q0", "q1", "q2"}  # drawn: the first of a file need not stand for all
    assert names(dataclasses.replace(config, steps=3)) > few  # two portions
    assert names(dataclasses.replace(config, steps=100)) == {f"q{i}" for i in range(12)}


@pytest.mark.slow
def test_a_supervised_run_on_drawn_searches(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """Questions come again until there are enough. What found nothing ends with its last search."""
    drawn = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, demonstrations="drawn"))
    training, held_out = open_demonstrations(dataclasses.replace(drawn, steps=20), build_recipe(config).agent)
    every = [part[i].pieces for part in (training, held_out) for i in range(len(part))]
    assert all(pieces[-1][1] for pieces in every)
    texts = ["".join(piece for piece, learnt in pieces if learnt) for pieces in every]
    assert all(text.endswith(("</answer>", "</search>")) for text in texts)
    assert {text.endswith("</answer>") for text in texts} == {True, False}
    searched = [text for text in texts if "<search>" in text]
    assert len(searched) == 48  # of 40 that are trained on and 3 held out, in whole rounds of 12
    unread = [text for text in searched if text.endswith("</search>")]
    assert len(texts) - len(searched) == len(unread)  # each is read after another search, of which nothing is learnt
    assert np.isfinite(sft.train_sft(drawn, tmp_path / "run")["held_out/nll"])


def test_an_answer_that_many_passages_hold_by_chance_is_not_read() -> None:
    question = Example(id="q", question="Is it?", answers=("no",))
    [one] = drawn_examples(
        [question], {"left": OneTown("There is no town.")}, k=1, max_searches=1, seed=0, normalizer="search_r1"
    )
    assert not one.found


@pytest.mark.slow
def test_drawn_searches_weigh_the_same_whatever_they_found(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """Per sequence, those without an answer after them would weigh more: the policy would learn to look where nothing is."""
    drawn = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, demonstrations="drawn"))
    losses = set()
    for aggregation in ("token", "sequence"):
        learner = dataclasses.replace(drawn.learner, aggregation=aggregation)
        directory = tmp_path / aggregation
        losses.add(sft.train_sft(dataclasses.replace(drawn, learner=learner), directory)["held_out/nll"])
    assert len(losses) == 1


def test_a_run_on_drawn_searches_goes_on_with_the_same_normaliser(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    """With another one, other answers would be read, and the demonstrations be others."""
    drawn = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, demonstrations="drawn"))
    (tmp_path / "config.json").write_text(json.dumps(dataclasses.asdict(drawn)))
    check_workdir(drawn, tmp_path, resume=True)
    evaluation = dataclasses.replace(drawn.evaluation, normalizer="r1_searcher")
    with pytest.raises(ValueError, match=r"config\.evaluation\.normalizer='search_r1', and now it is 'r1_searcher'"):
        check_workdir(dataclasses.replace(drawn, evaluation=evaluation), tmp_path, resume=True)


def test_drawn_searches_need_a_search_agent_that_may_search(config: TrainConfig) -> None:
    drawn = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, demonstrations="drawn"))
    never = dataclasses.replace(drawn, agent=dataclasses.replace(drawn.agent, max_searches=0))
    with pytest.raises(ValueError, match=r"'drawn'.*config\.agent\.max_searches=0"):
        open_demonstrations(never, build_recipe(never).agent)
    with pytest.raises(ValueError, match=r"'drawn'.*VRAGAgent.*'atlas'"):
        open_demonstrations(drawn, VRAGAgent(tool="text"))


def test_drawn_searches_need_answers_that_can_be_found(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    drawn = dataclasses.replace(config, warm_start=dataclasses.replace(config.warm_start, demonstrations="drawn"))
    path = tmp_path / "questions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, [{"question": row["question"], "golden_answers": ["Atlantis"]} for row in rows])
    with pytest.raises(ValueError, match=r"no search for the .* shows an answer.*check_data --knowledge"):
        open_demonstrations(drawn, build_recipe(config).agent)


@pytest.mark.parametrize("demonstrations", ["atlas", "annotated", "drawn"])
def test_a_warm_start_knows_the_questions(config: TrainConfig, demonstrations: str) -> None:
    """Whatever it learns from: launch.evaluate judges it by the run's."""
    start = WarmStartConfig(steps=1, demonstrations=demonstrations)
    run = TrainConfig(model=config.model, knowledge=config.knowledge, data=config.data, warm_start=start)
    assert supervised(run).data == config.data


def test_questions_without_gold_passages_are_named(config: TrainConfig, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    write_rows(path, [{key: row[key] for key in ("id", "question", "golden_answers")} for row in rows])
    with pytest.raises(ValueError, match=r"no question of config.data.train='.*questions.jsonl' has gold passages"):
        open_demonstrations(config, build_recipe(config).agent)


@pytest.mark.parametrize(("name", "least"), [("hotpotqa", 0.4), ("musique", 0.3)])
def test_real_questions(name: str, least: float, shared_data, tmp_path: pathlib.Path) -> None:
    """A good share of the real questions can be worked out with BM25 alone; each example finds its gold passages."""
    config = KnowledgeConfig(
        source=str(shared_data(f"{name}/corpus.jsonl.gz")), kind="bm25", directory=str(tmp_path / "kb")
    )
    run = TrainConfig(model=make_sft_config().model, knowledge={"text": config})
    tools = open_knowledge(run)
    source = open_dataset(str(shared_data(f"{name}/questions_dev.jsonl.gz")))
    examples = [source[i] for i in range(len(source))]
    worked = worked_examples(examples, tools, k=3, max_searches=4, seed=0)
    assert len(worked) > least * len(examples)
    for one in worked:
        found = {passage.id for step in one.steps for passage in step.passages}
        assert set(one.example.metadata["supporting"]) <= found
    assert load_kb(str(tmp_path / "kb")).search([worked[0].steps[0].query], 3)[0] == list(worked[0].steps[0].passages)
