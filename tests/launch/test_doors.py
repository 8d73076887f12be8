"""What strangers bring in files of their own: agents, tools, advantages, kinds of credit, named in a configuration."""

import importlib
import json
import os
import pathlib
import re
import sys
import textwrap

import pytest

from routerl_jax.core.types import Passage
from routerl_jax.data.atlas import world
from routerl_jax.data.atlas.questions import real_questions
from routerl_jax.knowledge.load import load_kb
from routerl_jax.training import stages  # noqa: F401 - grain's flags would else go with those of the first refusal
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import open_knowledge_bases
from tests.knowledge.test_mcp import command
from tests.programs import ROOT, fine, launch, refusal
from tests.training.small_run import write_rows

# What is the same in every file: two knowledge bases of a few passages, eight questions, one step of a policy of 0.9 M weights.
RUN = """
import dataclasses
import pathlib

import routerl_jax as rj
from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes.recipe import Recipe
from routerl_jax.recipes.search import stages_of
from routerl_jax.training import config as schema

HERE = pathlib.Path(__file__).parent


def small(**changes):
    fields = dict(
        steps=1,
        model=schema.ModelConfig(path="atlas-warm-start"),
        mesh=schema.MeshConfig(cpu_devices=1),
        engine=schema.EngineConfig(rows=8, max_length=256),
        agent=schema.AgentConfig(max_searches=2, k=1, max_turn_tokens=32, answer_tokens=8),
        knowledge={
            name: schema.KnowledgeConfig(source=str(HERE / f"{name}.jsonl"), kind="bm25", directory=str(HERE / name))
            for name in ("text", "table")
        },
        data=schema.DataConfig(
            train=str(HERE / "questions.jsonl"), validation="", test="",
            train_range=(0, 4), validation_range=(4, 6), test_range=(6, 8),
        ),
        rollout=schema.RolloutConfig(examples=2, samples=2),
        stages={"main": schema.StageConfig(reward={"em": 1.0, "searches": -0.1})},
        learner=schema.LearnerConfig(micro_tokens=512),
        evaluation=schema.EvaluationConfig(every=0, final_examples=2, before=False, baselines=False),
        warm_start=schema.WarmStartConfig(examples=2),
    )
    return schema.TrainConfig(**{**fields, **changes})
"""


@pytest.fixture
def mine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file of a stranger's, beside questions and passages, in a directory that Python finds; returns its path."""
    questions = [question for question in real_questions("train") if question.hops][:8]
    rows = [{"id": q.id, "question": q.text, "golden_answers": [q.answer]} for q in questions]
    write_rows(tmp_path / "questions.jsonl", rows)
    for name in ("text", "table"):
        passages = [p for p in world.passages_of(name) if any(p.title in q.text for q in questions)]
        write_rows(tmp_path / f"{name}.jsonl", [{"id": p.id, "title": p.title, "text": p.text} for p in passages])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> pathlib.Path:
        monkeypatch.delitem(sys.modules, name, raising=False)
        path = tmp_path / f"{name}.py"
        path.write_text(RUN + textwrap.dedent(text))
        return path

    return write


AGENT = '''
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Twice(rj.Agent):
        """Searches with the question itself, then with what the policy makes of it, and answers."""

        k: int = 1
        longest: int = 32

        async def run(self, example, llm, tools):
            chat = llm.conversation(self.opening(example, llm.tokenizer))
            call = await tools["text"].search(example.question, k=self.k)
            for _ in range(2):
                chat.observe(" ".join(passage.text for passage in call.passages) + "\\n")
                turn = await chat.generate(stop=("\\n",), max_tokens=self.longest)
                call = await tools["text"].search(turn.text.strip() or "nothing", k=self.k)
            return chat.episode(answer=turn.text.strip())

        learns_from = "demonstrations"

        def opening(self, example, tokenizer, image_marker="", room=None):
            return tokenizer.encode_prompt(f"Question: {example.question}\\n")

        def pieces(self, demonstration):
            found = [(" ".join(p.text for p in step.passages) + "\\n", False) for step in demonstration.steps[:1]]
            return [*found, (f"{demonstration.answer}\\n", True)]


    def twice(agent, stages, tools, normalizer):
        return Recipe(agent=Twice(k=agent.k), stages=stages_of(stages, normalizer))


    def get_config():
        run = small()
        return to_config_dict(dataclasses.replace(
            run,
            recipe="strange_agent:twice",
            agent=dataclasses.replace(run.agent, settings={"longest": 5}),
            evaluation=dataclasses.replace(run.evaluation, baselines=True, k=2),
            warm_start=dataclasses.replace(run.warm_start, steps=1),
        ))
'''


def test_an_agent_of_one_s_own_has_baselines_a_supervised_start_evaluation_and_settings(mine, tmp_path):
    config = mine("strange_agent", AGENT)
    workdir = tmp_path / "run"
    fine(launch("train", f"--config={config}", f"--workdir={workdir}"))
    agents = json.loads((workdir / "results.json").read_text())["agents"]
    assert list(agents) == ["trained", "only_table", "only_text", "random_kb"]
    assert agents["only_table"]["kb_share"] == {"table": 1.0}
    assert agents["trained"]["kb_share"] == {"text": 1.0}
    for file in [*(workdir / "episodes").iterdir(), workdir / "evaluation" / "trained.jsonl"]:
        for record in map(json.loads, file.read_text().splitlines()):
            assert all(turn["tokens"] <= 5 for turn in record["turns"])
    records = map(json.loads, (workdir / "evaluation" / "trained.jsonl").read_text().splitlines())
    found = [len(call["passages"]) for record in records for turn in record["turns"] for call in turn["calls"]]
    assert max(found) == 2  # config.evaluation.k
    supervised = json.loads((workdir / "warm_start" / "metrics.jsonl").read_text().splitlines()[0])
    assert supervised["actor/loss"] > 0
    output = fine(launch("evaluate", f"--workdir={workdir}", "--agents=trained,random_kb", "--json"))
    assert json.loads(output)["agents"]["trained"] == agents["trained"]


LONG = """
    class Wordy:
        \"\"\"A passage of nine words, or, for questions about numbers, of nine hundred.\"\"\"

        def search(self, queries, k):
            words = [900 if "number" in query else 9 for query in queries]
            return [[rj.Passage(id="1", title="", text="word " * count)] for count in words]


    def get_config():
        run = small(knowledge={"text": schema.KnowledgeConfig(kind="tool", source="strange_long:Wordy")})
        return to_config_dict(dataclasses.replace(run, recipe="strange_long:twice"))
"""


@pytest.mark.slow
def test_an_observation_that_does_not_fit_ends_its_episode_and_not_the_run(mine, tmp_path):
    config = mine("strange_long", AGENT.partition("    def get_config")[0] + LONG)
    workdir = tmp_path / "run"
    ranges = "--config.data.test_range=(0,8)", "--config.evaluation.final_examples=8"
    fine(launch("train", f"--config={config}", f"--workdir={workdir}", *ranges, "--config.data.overlap=ignore"))
    records = [json.loads(line) for line in (workdir / "evaluation" / "trained.jsonl").read_text().splitlines()]
    assert len(records) == 8
    unfit = {record["id"] for record in records if "number" in record["question"]}
    assert 0 < len(unfit) < 8
    for record in records:
        assert (record["truncated"] and record["prediction"] is None) or record["id"] not in unfit
        assert record["turns"] or record["id"] in unfit
    row = json.loads((workdir / "results.json").read_text())["agents"]["trained"]
    assert row["truncated_rate"] >= len(unfit) / 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"longst": 5}, "unknown config key config.agent.settings.longst; did you mean config.agent.settings.longest?"),
        ({"longest": "five"}, "config.agent.settings.longest='five' must be of type int"),
        ({"k": 5}, "config.agent.settings.k: set config.agent.k"),
    ],
)
def test_settings_that_the_agent_does_not_have_are_refused(settings, message, mine, tmp_path):
    config = mine("strange_agent", AGENT.replace('{"longest": 5}', repr(settings)))
    assert message in refusal("train", f"--config={config}", f"--workdir={tmp_path / 'run'}")


def test_a_grammar_that_is_half_written_is_named(mine, tmp_path):
    half = """
    from routerl_jax.agents.grammar import Grammar


    class Half(Grammar):
        def parse(self, text):
            return rj.Action(kind="answer", answer=text)


    def get_config():
        return to_config_dict(small(agent=schema.AgentConfig(grammar="strange_tags:Half")))
    """
    said = refusal("train", f"--config={mine('strange_tags', half)}", f"--workdir={tmp_path / 'run'}")
    assert "config.agent.grammar='strange_tags:Half' can't be made (Can't instantiate abstract class Half" in said


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("three", "must take four arguments: config.agent, config.stages, the names of the knowledge bases, and the"),
        ("alone", "gave Twice(k=1, longest=32): it must give a Recipe with an object of a class that derives from"),
        ("unmade", "gave a Recipe whose agent is <class 'strange_agent.Twice'>: it must give a Recipe with an object"),
    ],
)
def test_a_recipe_that_gives_something_else_is_named(recipe, message, mine, tmp_path):
    more = """
    def three(agent, stages, tools):
        return twice(agent, stages, tools, "")


    def alone(agent, stages, tools, normalizer):
        return Twice()


    def unmade(agent, stages, tools, normalizer):
        return Recipe(agent=Twice, stages=stages_of(stages, normalizer))
    """
    config = mine("strange_agent", AGENT + more)
    said = refusal(
        "train", f"--config={config}", f"--workdir={tmp_path / 'run'}", f"--config.recipe=strange_agent:{recipe}"
    )
    assert said.startswith(f"launch.train: config.recipe='strange_agent:{recipe}' {message}")


def test_an_agent_that_can_t_be_shown_how_to_work_is_named(mine, tmp_path):
    config = mine("strange_agent", AGENT.replace('learns_from = "demonstrations"', ""))
    said = refusal("train", f"--config={config}", f"--workdir={tmp_path / 'run'}")
    assert "Twice can't be shown how to work (its learns_from is None)" in said


TOOL = """
    class Words:
        \"\"\"Finds the passages that share most words with a query.\"\"\"

        cost = 0.5

        def __init__(self, file, least=1):
            rows = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()]
            self.passages = [rj.Passage(id=row["id"], title=row["title"], text=row["text"]) for row in rows]
            self.least = least

        def search(self, queries, k):
            return [self.best(set(query.lower().strip("?").split()), k) for query in queries]

        def best(self, words, k):
            scored = [dataclasses.replace(p, score=len(words & set(p.text.lower().split()))) for p in self.passages]
            return sorted((p for p in scored if p.score >= self.least), key=lambda p: -p.score)[:k]


    class OneQuery:
        def search(self, query):
            return []


    def get_config():
        run = small(knowledge={
            "text": schema.KnowledgeConfig(
                kind="tool", source="strange_tool:Words", settings={"file": str(HERE / "text.jsonl"), "least": 1}
            ),
            "table": schema.KnowledgeConfig(
                kind="tool", source="routerl_jax.extras.mcp_tools:McpTool", settings={"server": SERVER, "tool": "plain"}
            ),
        })
        return to_config_dict(dataclasses.replace(
            run, evaluation=dataclasses.replace(run.evaluation, baselines=True)
        ))
"""


@pytest.mark.slow
def test_tools_of_one_s_own_and_of_an_mcp_server_are_named_in_a_configuration(mine, tmp_path):
    config = mine("strange_tool", f"import json\nSERVER = {command('foreign')!r}\n{textwrap.dedent(TOOL)}")
    workdir = tmp_path / "run"
    fine(launch("train", f"--config={config}", f"--workdir={workdir}"))
    found = {}
    for name in ("text", "table"):
        lines = (workdir / "evaluation" / f"only_{name}.jsonl").read_text().splitlines()
        found[name] = [call for line in lines for turn in json.loads(line)["turns"] for call in turn["calls"]]
        assert found[name]
        assert all(call["error"] is None for call in found[name])
    known = {json.loads(line)["id"] for line in (tmp_path / "text.jsonl").read_text().splitlines()}
    assert {passage["id"] for call in found["text"] for passage in call["passages"]} <= known
    assert {call["cost"] for call in found["text"]} == {0.5}
    assert all(call["passages"][0]["text"] == f"all about {call['query']}" for call in found["table"])
    again = json.loads(fine(launch("evaluate", f"--workdir={workdir}", "--agents=only_table", "--json")))
    trained = json.loads((workdir / "results.json").read_text())
    assert again["agents"]["only_table"]["kb_share"] == trained["agents"]["only_table"]["kb_share"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source": "strange_tool"},
            ".source='strange_tool': with kind='tool' it names the function or class that makes the",
        ),
        (
            {"source": "strange_tol:Words"},
            "cannot load tool 'strange_tol:Words': No module named 'strange_tol'; run the command",
        ),
        (
            {"source": "strange_tool:Word"},
            "cannot load tool 'strange_tool:Word': module 'strange_tool' has no attribute 'Word'; did you mean 'Words'?",
        ),
        (
            {"source": "strange_tool:HERE"},
            ".source='strange_tool:HERE' is a PosixPath; name a function or class that makes one",
        ),
        (
            {"settings": {"fil": "x"}},
            "unknown config key config.knowledge.text.settings.fil; did you mean config.knowledge.",
        ),
        ({"settings": {}}, "config.knowledge.text.settings.file is missing: strange_tool:Words takes it"),
        ({"encoder": "x"}, "config.knowledge.text.encoder: kind='tool' has none"),
        (
            {"settings": {"file": "/nowhere"}},
            "config.knowledge.text: strange_tool:Words made no tool: [Errno 2] No such file",
        ),
        (
            {"source": "strange_tool:OneQuery", "settings": {}},
            "strange_tool:OneQuery can't be called as search(queries, k), with a list of queries and the number of",
        ),
        (
            {"source": "builtins:dict"},
            "config.knowledge.text: builtins:dict made a dict, which has no search(queries, k)",
        ),
    ],
)
def test_a_tool_that_can_t_be_made_is_named(changes, message, mine, tmp_path):
    mine("strange_tool", f"import json\n{textwrap.dedent(TOOL)}")
    spec = {"kind": "tool", "source": "strange_tool:Words", "settings": {"file": "x"}} | changes
    with pytest.raises(ValueError, match=re.escape(message)):
        open_knowledge_bases({"text": KnowledgeConfig(**spec)}, progress=False)


def test_a_tool_that_can_t_be_made_is_refused_before_anything_takes_long(mine, tmp_path):
    config = mine(
        "strange_tool", f"import json\nSERVER = ['true']\n{textwrap.dedent(TOOL).replace('least', 'last', 1)}"
    )
    said = refusal("train", f"--config={config}", f"--workdir={tmp_path / 'run'}", "--config.warm_start.steps=1")
    assert "unknown config key config.knowledge.text.settings.least" in said
    assert not (tmp_path / "run" / "warm_start").exists()


def test_a_tool_is_no_member_of_a_hybrid(mine):
    mine("strange_tool", f"import json\n{textwrap.dedent(TOOL)}")
    spec = KnowledgeConfig(kind="tool", source="strange_tool:Words", settings={"file": os.devnull})
    with pytest.raises(ValueError, match=r"both\.members: 'text' is a Words; only a KnowledgeBase can be joined"):
        open_knowledge_bases({"text": spec, "both": KnowledgeConfig(kind="hybrid", members=("text",))})


LEARNING = """
    import numpy as np

    from routerl_jax.learning.advantages import advantage
    from routerl_jax.training.credit import TokenCredit


    @advantage(grouped=False, whitened=True)
    def above_half(rewards, groups):
        return rewards - 0.5


    @advantage(scaled=True)
    def ranked(rewards, groups, std_floor=0.0):
        return (rewards - rewards.mean()) / max(rewards.std(), std_floor, 1e-6)


    def last_turn(episodes, rewards, groups, advantage, settings):
        \"\"\"The last turn alone answers for an attempt.\"\"\"
        result = []
        for episode, value in zip(episodes, advantage(rewards, groups)):
            numbers = [np.zeros(len(sequence)) for sequence in episode.sequences]
            if episode.turns:
                turn = episode.turns[-1]
                numbers[turn.sequence][turn.start : turn.start + turn.tokens] = value
            result += numbers
        return TokenCredit(of_tokens=result, metrics={"credit/turns": float(np.mean([len(e.turns) for e in episodes]))})


    def short(episodes, rewards, groups, advantage, settings):
        return [np.zeros(1) for episode in episodes for _ in episode.sequences]


    def get_config():
        return to_config_dict(small(
            rollout=schema.RolloutConfig(examples=4, samples=1),
            learner=schema.LearnerConfig(
                micro_tokens=512, advantage="strange_learning:above_half", credit="strange_learning:last_turn"
            ),
        ))
"""


@pytest.mark.slow
def test_an_advantage_and_a_kind_of_credit_of_one_s_own_say_what_they_are(mine, tmp_path):
    """One attempt per question and rewards that are all equal: it learns all the same, as it compares nothing."""
    config = mine("strange_learning", LEARNING)
    workdir = tmp_path / "run"
    fine(launch("train", f"--config={config}", f"--workdir={workdir}", "--config.stages.main.reward.em=0.0"))
    [row] = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert row["actor/trained_sequences"] == 4
    assert row["credit/turns"] >= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["learner.advantage=strange_learning:ranked"], "compares attempts: set config.rollout.samples above 1"),
        (
            ["learner.std_floor=0.1"],
            "advantage='strange_learning:above_half' divides by no standard deviation; batch_std",
        ),
        (["learner.credit=counterfactual", "rollout.forks=1"], ":above_half' does not go with credit='counterfactual'"),
        (["learner.credit=trun"], "unknown kind of credit 'trun'; did you mean 'turn'?"),
        (
            ["learner.credit=strange_learning:short"],
            "gave arrays of shapes [(1,), (1,), (1,), (1,)] for sequences of lengths",
        ),
    ],
)
def test_what_does_not_go_with_an_advantage_or_a_credit_is_refused(flags, message, mine, tmp_path):
    config = mine("strange_learning", LEARNING)
    said = refusal(
        "train", f"--config={config}", f"--workdir={tmp_path / 'run'}", *(f"--config.{flag}" for flag in flags)
    )
    assert message in said


def in_docs(page: str) -> str:
    """The one whole file of a page."""
    [text] = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.slow
def test_the_whole_file_of_the_docs_runs(mine, tmp_path):
    """As it stands, but for the numbers of steps and questions."""
    config = tmp_path / "my_router.py"
    config.write_text(in_docs("extending.md"))
    workdir = tmp_path / "run"
    sizes = {
        "steps": 1,
        "warm_start.steps": 1,
        "warm_start.examples": 2,
        "evaluation.final_examples": 2,
        "evaluation.every": 0,
    }
    sizes |= {"rollout.examples": 2, "rollout.samples": 2, "mesh.cpu_devices": 1}
    flags = [f"--config.{key}={value}" for key, value in sizes.items()]
    fine(
        launch("train", f"--config={config}", f"--workdir={workdir}", *flags, "--config.agent.settings.query_tokens=8")
    )
    agents = json.loads((workdir / "results.json").read_text())["agents"]
    assert list(agents) == ["warm_start", "trained", "only_elements", "only_table", "only_text", "random_kb"]
    assert agents["trained"]["kb_share"] == {"elements": 0.5, "text": 0.5}  # it never asks the third
    [row] = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    assert row["reward/my_router:short"] >= 0
    [file] = (workdir / "episodes").iterdir()
    for record in map(json.loads, file.read_text().splitlines()):
        first, second = record["turns"]
        assert first["tokens"] <= 8
        assert second["observation"] == ""
        assert first["observation"].endswith("Answer: ")
    question = "What is the atomic number of Tin?"
    [asked] = fine(launch("ask", "--json", f"--workdir={workdir}", question)).splitlines()
    assert [call["tool"] for turn in json.loads(asked)["turns"] for call in turn["calls"]] == ["text", "elements"]
    shown = fine(launch("view", f"--workdir={workdir}", "--terminal", "--count=1"))
    assert "writes" in shown
    assert "invalid" not in shown


def test_the_kind_of_knowledge_base_of_the_docs_is_opened(mine, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_kind", raising=False)
    (tmp_path / "my_kind.py").write_text(in_docs("knowledge_bases.md"))
    importlib.import_module("my_kind").make(tmp_path / "kb" / "mine", greeting="Hello")
    assert load_kb(tmp_path / "kb" / "mine").search(["world", " "], k=1) == [
        [Passage(id="1", title="Hello", text="Hello, world")],
        [],
    ]
    spec = KnowledgeConfig(directory=str(tmp_path / "kb" / "mine"))
    assert open_knowledge_bases({"mine": spec})["mine"].search(["you"], k=1)[0][0].text == "Hello, you"
