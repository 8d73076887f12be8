"""Extensions as a user writes them, without a change of the package; some trained for two steps on Atlas's questions."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import pathlib
import sqlite3
from typing import Any

import numpy as np
import pytest

from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import run
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.types import Action, Example, Passage
from routerl_jax.data.readers import open_dataset
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar
from routerl_jax.recipes.recipe import Recipe
from routerl_jax.recipes.search import stages_of
from routerl_jax.rewards.terms import RewardFunction, TurnTerm
from routerl_jax.training import config as schema
from routerl_jax.training import rl
from routerl_jax.training.checks import check_gold_paths
from routerl_jax.training.credit import assign
from routerl_jax.training.knowledge import open_knowledge_bases
from routerl_jax.training.loggers import read_metrics
from routerl_jax.training.setup import build_recipe
from routerl_jax.training.stages import Stages
from tests import tiny
from tests.agents.scripted import ANSWER, ScriptedEngine
from tests.training.small_run import make_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Believing(SearchAgent):
    """Measures, before and after every search, how likely the policy finds the first gold answer."""

    async def show(self, call, chat):
        turn = chat._rollout.turns[-1]
        turn.info["before"] = await self.belief(chat)
        shown = await super().show(call, chat)
        turn.info["after"] = await self.belief(chat)
        return shown

    async def belief(self, chat):
        async with chat.aside() as probe:
            probe.force(self.grammar.answer_opening)
            (logprob,) = await probe.score([chat._rollout.example.answers[0]])
        return logprob


def recipe(agent, stages, tools, normalizer):
    made = Believing(
        grammar=R1RouterGrammar(tools=tuple(tools)),
        max_searches=agent.max_searches,
        k=agent.k,
        max_turn_tokens=agent.max_turn_tokens,
        answer_tokens=agent.answer_tokens,
    )
    return Recipe(agent=made, stages=stages_of(stages, normalizer))


def _gain(episodes):
    return [
        [turn.info["after"] - turn.info["before"] if "after" in turn.info else None for turn in e.turns]
        for e in episodes
    ]


gain = TurnTerm(_gain)


def _new(episodes):
    """Per search the share of passages that no search before it found; None for other turns."""
    result = []
    for episode in episodes:
        seen: set[str] = set()
        values: list[float | None] = []
        for turn in episode.turns:
            found = [passage.id for call in turn.calls for passage in call.passages]
            values.append(float(np.mean([name not in seen for name in found])) if found else None)
            seen |= {*found}
        result.append(values)
    return result


new = TurnTerm(_new)


def records(workdir: pathlib.Path, step: int) -> list[dict[str, Any]]:
    lines = (workdir / "episodes" / f"step-{step:06d}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def short(whole: schema.TrainConfig, **changes: Any) -> schema.TrainConfig:
    """Two steps, without an evaluation between them, with all episodes and tokens in the log."""
    return dataclasses.replace(
        whole,
        steps=2,
        stages={"main": schema.StageConfig(reward={"em": 1.0, **changes.pop("reward")})},
        learner=dataclasses.replace(whole.learner, credit="turn"),
        evaluation=schema.EvaluationConfig(every=0, final_examples=2, before=False, baselines=False),
        log_episodes=16,
        log_tokens=True,
        **changes,
    )


@pytest.mark.slow
def test_a_reward_from_the_policy_s_own_belief_in_the_answer_trains_on_no_answer_that_it_was_shown(tmp_path) -> None:
    config = short(make_config(tmp_path / "home"), recipe=f"{__name__}:recipe", reward={f"{__name__}:gain": 0.5})
    rl.train_rl(config, tmp_path / "run")
    rows = read_metrics(tmp_path / "run")
    assert all(row["actor/trained_sequences"] <= 16 for row in rows)
    judged = 0
    for record in records(tmp_path / "run", 0):
        assert len(record["tokens"]) == 1
        for turn in record["turns"]:
            if not turn["info"]:
                assert not turn["rewards"]
                continue
            judged += 1
            measured = turn["info"]["after"] - turn["info"]["before"]
            assert turn["rewards"][f"{__name__}:gain"] == pytest.approx(0.5 * measured)
        assert sum(record["tokens"][0]["sampled"]) == sum(turn["tokens"] for turn in record["turns"])
    assert judged


@pytest.mark.slow
def test_a_reward_of_steps_judges_searches_alone(tmp_path) -> None:
    rl.train_rl(short(make_config(tmp_path / "home"), reward={f"{__name__}:new": 0.3}), tmp_path / "run")
    assert all(np.isfinite(row["actor/loss"]) for row in read_metrics(tmp_path / "run") if "actor/loss" in row)
    for record in records(tmp_path / "run", 0):
        for turn in record["turns"]:
            assert bool(turn["rewards"]) == any(call["passages"] for call in turn["calls"])


class Broken:
    """A source whose every search fails; `after` so many have worked."""

    def __init__(self, after: int = 0) -> None:
        self.left = after

    def search(self, queries, k):
        self.left -= len(queries)
        if self.left < 0:
            raise ConnectionError("no route to the facts")
        return [[Passage(id="f", title="F", text="a fact")] for _ in queries]


def with_broken(whole: schema.TrainConfig, **settings: Any) -> schema.TrainConfig:
    broken = schema.KnowledgeConfig(kind="tool", source=f"{__name__}:Broken", settings=settings)
    return short(dataclasses.replace(whole, knowledge={**whole.knowledge, "elements": broken}), reward={"f1": 0.1})


def test_a_source_that_always_fails_is_named_before_the_first_step(tmp_path) -> None:
    config = with_broken(make_config(tmp_path / "home"))
    with pytest.raises(ValueError, match=r"config\.knowledge\.elements.*no route to the facts"):
        rl.train_rl(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("gold", "hint"),
    [
        (["text", "wiki"], "'wiki', which the run lacks; there are: text, table, elements"),
        (["txt"], "did you mean 'text'"),
    ],
)
def test_a_gold_path_that_names_a_source_which_the_run_lacks_is_refused(tmp_path, gold, hint) -> None:
    whole = make_config(tmp_path / "home")
    path = pathlib.Path(whole.data.train)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row, kb in zip(rows, gold):
        row["metadata"] = {"path": [{"kb": kb, "passage_id": "p"}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=rf"question '{rows[len(gold) - 1]['id']}'.*{hint}"):
        rl.train_rl(short(whole, reward={"f1": 0.1}), tmp_path / "run")


def test_a_gold_path_of_another_division_of_the_facts_is_not(tmp_path) -> None:
    whole = make_config(tmp_path / "home")
    path = pathlib.Path(whole.data.train)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["metadata"] = {"path": [{"kb": "graph", "passage_id": "p"}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check_gold_paths(whole)


@pytest.mark.parametrize("supporting", [[], ["p"]])
def test_gold_passages_that_are_rewarded_must_be_named_by_some_question(tmp_path, supporting) -> None:
    """Else every attempt would earn 0, and nothing would say why."""
    whole = make_config(tmp_path / "home")
    path = pathlib.Path(whole.data.train)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row | {"metadata": {}} for row in rows]
    rows[1]["metadata"] = {"supporting": supporting}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = short(whole, reward={"f1": 0.1, "found": 0.5})
    refused = pytest.raises(ValueError, match=r"config\.stages\..*found.*names any.*answer_found")
    with contextlib.nullcontext() if supporting else refused:
        Stages(config, build_recipe(config))


@pytest.mark.parametrize("field", ["examples", "final_examples"])
def test_zero_questions_are_not_all_questions(field) -> None:
    with pytest.raises(ValueError, match=rf"{field}=0 .*-1 for all"):
        schema.EvaluationConfig(**{field: 0})
    assert getattr(schema.EvaluationConfig(**{field: -1}), field) == -1


def test_a_setting_that_a_recipe_never_reads_is_refused_and_not_ignored(tmp_path) -> None:
    whole = make_config(tmp_path / "home", recipe=f"{__name__}:recipe")
    assert build_recipe(whole).agent.max_searches == whole.agent.max_searches
    prompted = dataclasses.replace(whole, agent=dataclasses.replace(whole.agent, prompt="Q: {question}"))
    with pytest.raises(
        ValueError, match=r"config\.agent\.prompt='Q: {question}'.*test_extensions:recipe.*agent\.prompt"
    ):
        build_recipe(prompted)


# --- an agent with JSON actions, and a context for each of them ---


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notebook(Agent):
    """Writes {"note": .., "ask": ..} or {"answer": ..}. A context has the question, all notes, and what was found last."""

    turns: int = 3

    async def run(self, example, llm, tools):
        notes, found = "", ""
        for _ in range(self.turns):
            chat = llm.conversation(llm.tokenizer.plain(f"Question: {example.question}\n{notes}"))
            if found:
                chat.observe(found)
            turn = await chat.generate(stop=("}",), max_tokens=100)
            chat.close()
            try:
                said = json.loads(turn.text)
            except ValueError as error:
                turn.action = Action(kind="invalid", error=str(error))
                found = "That was no JSON.\n"
                continue
            if "answer" in said:
                turn.action, turn.well_formed = Action(kind="answer", answer=said["answer"]), True
                return chat.episode(answer=said["answer"])
            turn.action, turn.well_formed = Action(kind="search", tool="text", query=said["ask"]), True
            notes += f"Note: {said['note']}\n"
            call = await tools["text"].search(said["ask"], k=1)
            found = "".join(f"{passage.text}\n" for passage in call.passages)
        return chat.episode(answer=None)


def test_an_agent_with_json_actions_trains_on_every_context_of_an_attempt() -> None:
    """One search, one turn that is no JSON, and an answer, which only the first attempt gets right."""
    asks, broken = '{"note": "which city?", "ask": "capital"}', '{"note": "so}'
    said = [[asks, broken, f'{{"answer": "{name}"}}'] for name in ("Accra", "Lome")]
    engine = ScriptedEngine(lambda name, sample, _: said[sample][int(name.partition("#")[2] or 0)])
    example = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))
    episodes = run(Notebook(), [example], engine, {"text": tiny.ScriptedKB()}, samples=2)
    for episode, written in zip(episodes, said):
        assert [turn.action.kind for turn in episode.turns if turn.action] == ["search", "invalid", "answer"]
        assert [turn.sequence for turn in episode.turns] == [0, 1, 2]
        own = [engine.tokenizer.decode(one.tokens[one.loss_mask]) for one in episode.sequences]
        shown = [engine.tokenizer.decode(one.tokens[~one.loss_mask]) for one in episode.sequences]
        assert own == written
        assert ["which city?" in text for text in shown] == [False, True, True]
        assert ["fact 0" in text for text in shown] == [False, True, False]
    for episode, row in zip(episodes, RewardFunction({"em": 1.0})(episodes)):
        episode.rewards = row
    credit = assign(schema.LearnerConfig(), episodes, np.zeros(2, int))
    masks = [sequence.loss_mask for episode in episodes for sequence in episode.sequences]
    signs = [set(np.sign(values[mask])) for values, mask in zip(credit.advantages, masks, strict=True)]
    assert signs == [{1.0}] * 3 + [{-1.0}] * 3


# --- a knowledge base in SQLite, and questions from a CSV ---


class Facts:
    """The facts of a database whose names occur in a query. Searches run in threads of their own."""

    def __init__(self, database: str, any_thread: bool = True) -> None:
        self.connection = sqlite3.connect(database, check_same_thread=not any_thread)

    def search(self, queries, k):
        return [self.facts(query, k) for query in queries]

    def facts(self, query, k):
        rows = self.connection.execute("select name, fact from facts where instr(?, name) > 0 limit ?", (query, k))
        return [Passage(id=name, title=name, text=fact) for name, fact in rows]


def rivers():
    with open("rivers.csv", newline="", encoding="utf-8") as file:
        return [
            Example(
                id=row["id"],
                question=row["question"],
                answers=tuple(row["answers"].split("|")),
                metadata={"path": [{"kb": "facts", "passage_id": row["fact"]}]},
            )
            for row in csv.DictReader(file)
        ]


@pytest.mark.parametrize("any_thread", [True, False])
def test_a_knowledge_base_in_sqlite_answers_questions_from_a_csv(tmp_path, monkeypatch, any_thread) -> None:
    """A connection that belongs to its thread fails in searches; the episode says so, and goes on."""
    monkeypatch.chdir(tmp_path)
    rows = (
        "id,question,answers,fact",
        '1,"Where, roughly, does the Volta rise?",Burkina Faso|Burkina,Volta',
        "2,And the Oti?,Togo,Oti",
    )
    pathlib.Path("rivers.csv").write_text("\n".join(rows))
    with contextlib.closing(sqlite3.connect("facts.sqlite")) as database, database:
        database.execute("create table facts (name text, fact text)")
        database.execute("insert into facts values ('Volta', 'The Volta rises in Burkina Faso.')")
    spec = schema.KnowledgeConfig(
        kind="tool", source=f"{__name__}:Facts", settings={"database": "facts.sqlite", "any_thread": any_thread}
    )
    tools = open_knowledge_bases({"facts": spec})
    source = open_dataset(f"{__name__}:rivers[:1]")
    (example,) = [source[i] for i in range(len(source))]
    said = (
        f"<think>so</think><sub-question>{example.question}</sub-question><ret>facts retriever</ret>",
        ANSWER.replace("Accra", "Burkina"),
    )
    agent = SearchAgent(grammar=R1RouterGrammar(tools=("facts",)), max_turn_tokens=200, answer_tokens=20)
    (episode,) = run(agent, [example], ScriptedEngine(lambda *asked: said[asked[-1]]), tools)
    (call,) = episode.calls
    (row,) = RewardFunction({"em": 1.0, "found": 0.5})([episode])
    assert row["total"] == 1.0 + 0.5 * any_thread
    if any_thread:
        assert (call.error, [passage.id for passage in call.passages]) == (None, ["Volta"])
    else:
        assert call.error is not None
        assert "thread" in call.error
