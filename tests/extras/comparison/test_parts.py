"""Agents by name, benchmarks' files, tests between agents, a run's policy, a judge."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import numpy as np
import pytest
from scipy import stats

from routerl_jax.core.types import Episode, Example, Verdict
from routerl_jax.data.atlas import flags
from routerl_jax.engine.sampling import GREEDY
from routerl_jax.evaluation.paired import compare_scores, holm
from routerl_jax.extras.baselines.known import BASELINES
from routerl_jax.extras.comparison import agents, report
from routerl_jax.extras.comparison.attempts import attempt_all, finished_attempts, paired_tests
from routerl_jax.extras.comparison.benchmarks import BENCHMARKS, Benchmark, located
from routerl_jax.extras.comparison.compare import captioned, compare, prepared
from routerl_jax.extras.comparison.config import CaptionConfig, ComparisonConfig
from routerl_jax.models.pretrained import PACKAGED_MODELS
from routerl_jax.training.config import AgentConfig, EngineConfig, KnowledgeConfig, ModelConfig, TrainConfig
from tests.agents.scripted import AGENT, ANSWER, ScriptedEngine, knowledge
from tests.extras.comparison.world import config, write_world
from tests.web_servers import Chats, serving

LOCAL = ComparisonConfig(model=ModelConfig(path="atlas-warm-start"), k=4, searches=2)


def entered(name: str, tools: tuple[str, ...], given: ComparisonConfig = LOCAL) -> list[agents.AgentRow]:
    return agents.agent_rows(name, tools, given, "b")


def test_rows_of_a_name() -> None:
    def rows(name: str, *tools: str) -> list[str]:
        return [row.name for row in entered(name, tools)]

    assert rows("ircot", "text", "table") == ["ircot_text", "ircot_table", "ircot_all"]
    assert rows("ircot", "text") == ["ircot"]
    assert rows("ircot_all", "text", "table") == ["ircot_all"]
    assert rows("ircot_text", "text") == ["ircot_text"]
    assert rows("search:random_kb", "text", "table") == ["search:random_kb"]
    assert rows("routerl_jax.extras.baselines.vanilla_rag:Direct", "text") == [
        "routerl_jax.extras.baselines.vanilla_rag:Direct"
    ]


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_all_have_the_same_k_and_budget(name: str) -> None:
    """Two rounds over one knowledge base, or the one or none that an agent is made for; and four documents."""
    for row in entered(name, ("text", "table")):
        bases = len(getattr(row.agent, "tools", ())) or 1
        budget = row.agent.search_budget
        assert budget is None or budget <= 2 * bases
        assert row.about["fields"]["k"] == 4
        assert json.loads(json.dumps(row.about)) == row.about


def test_recipes_with_turns_or_limits_keep_the_common_budget() -> None:
    given = dataclasses.replace(LOCAL, searches=1)
    (looks,) = entered("vrag_rl", ("pages",), given)
    assert (looks.agent.search_budget, looks.agent.max_turns) == (1, 3)  # type: ignore[attr-defined]
    (both,) = entered("mmsearch_r1", ("image", "text"), given)
    assert both.agent.search_budget == 1
    (workflow,) = entered("mmsearch_r1:rag_workflow", ("image", "text"), given)  # made for two searches
    assert workflow.agent.search_budget == 2
    own = dataclasses.replace(given, settings={"vrag_rl": {"max_searches": 2}})
    (turns,) = entered("vrag_rl", ("pages",), own)
    assert (turns.agent.search_budget, turns.agent.max_turns) == (2, 2)  # type: ignore[attr-defined]


def test_an_agents_own_settings_stay() -> None:
    given = dataclasses.replace(LOCAL, settings={"ircot": {"k": 7, "max_steps": 5}, "search": {"grammar": "search_r1"}})
    (row,) = entered("ircot", ("text",), given)
    assert (row.agent.k, row.agent.max_steps, row.agent.instruct) == (7, 5, True)  # type: ignore[attr-defined]
    (search,) = entered("search", ("text",), given)
    assert type(search.agent.grammar).__name__ == "SearchR1Grammar"  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"baseline 'ircot'.*max_stepz"):
        entered("ircot", ("text",), dataclasses.replace(LOCAL, settings={"ircot": {"max_stepz": 5}}))


def test_a_run_needs_its_knowledge_bases(tmp_path: pathlib.Path) -> None:
    run = made_run(tmp_path)
    with pytest.raises(ValueError, match=r"with the knowledge bases text, table.*has text: it lacks table"):
        entered(str(run), ("text",))
    (row,) = entered(f"{run}:only_table", ("text", "table", "other"))
    assert row.run == str(run)
    assert row.about["tools"] == ["text", "table"]


def made_run(directory: pathlib.Path, bases: tuple[str, ...] = ("text", "table")) -> pathlib.Path:
    """What launch.train leaves, with the packaged policy."""
    run = TrainConfig(
        model=ModelConfig(path="atlas-warm-start"),
        engine=EngineConfig(rows=8, max_length=256),
        agent=AgentConfig(grammar="r1_router", max_searches=1, k=1, max_turn_tokens=32, answer_tokens=16),
        knowledge={name: KnowledgeConfig(source="corpus.jsonl", kind="bm25") for name in bases},
    )
    place = directory / "run"
    place.mkdir(parents=True)
    (place / "config.json").write_text(json.dumps(dataclasses.asdict(run)))
    shutil.copytree(PACKAGED_MODELS["atlas-warm-start"], place / "policy")
    return place


def test_a_run_beside_the_configurations_policy(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the engine: tokens are counted, each policy is opened once, and again nothing is asked."""
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    write_world(tmp_path / "data")
    bases = ("text", "table", "elements")  # which the packaged policy was shown
    run = made_run(tmp_path, bases)
    spec = KnowledgeConfig(source="corpus.*", kind="bm25")
    given = config(
        tmp_path / "data",
        own={"things": Benchmark(questions=("questions.*",), knowledge=dict.fromkeys(bases, spec))},
        agents=("direct", str(run)),
        model=ModelConfig(path="atlas-warm-start"),
        engine=EngineConfig(rows=8, max_length=256),
        chat_model=type(LOCAL.chat_model)(),
        turn_tokens=24,
        instruct=False,
        questions=3,
    )
    results = compare(given, tmp_path / "out", progress=False)
    rows = results["benchmarks"]["things"]["rows"]
    assert list(rows) == ["direct", str(run)]
    assert sum(rows[str(run)]["cost"]["searches"].values()) > 0
    assert all(row["cost"][key] > 0 for row in rows.values() for key in ("read", "written", "seconds"))
    digests = [policy["weights digest"] for policy in results["card"]["policies"].values()]
    assert len(digests) == 2
    assert digests[0] == digests[1]  # the same weights
    assert results["card"]["benchmarks"]["things"]["n"] == 3


def test_tests_are_scipys() -> None:
    rng = np.random.default_rng(3)
    ours, theirs = rng.random(9), rng.random(9)
    exact = stats.permutation_test(
        (ours - theirs,), np.mean, permutation_type="samples", n_resamples=1024, vectorized=False
    )
    found = compare_scores(ours, theirs)
    assert found["p"] == pytest.approx(exact.pvalue)  # all 512 signs
    assert found["difference"] == pytest.approx(np.mean(ours - theirs))
    right, wrong = rng.random(200) < 0.6, rng.random(200) < 0.4
    better, worse = int((right & ~wrong).sum()), int((wrong & ~right).sum())
    sign = stats.binomtest(better, better + worse).pvalue
    assert compare_scores(right.astype(float), wrong.astype(float))["p"] == pytest.approx(sign)
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    with pytest.raises(ValueError, match="3 and 2 scores"):
        compare_scores(np.zeros(3), np.zeros(2))


def test_a_reference_takes_part_in_all_tests() -> None:
    scores = {
        name: {"em": np.asarray(values, float)} for name, values in {"a": [1, 0], "b": [1, 1], "c": [0, np.nan]}.items()
    }
    found = paired_tests(scores, ("em",), "b")
    assert [(test["first"], test["second"], test["n"]) for test in found] == [("a", "b", 2), ("c", "b", 1)]
    assert len(paired_tests(scores, ("em",))) == 3
    assert paired_tests(scores, ("em",), "d") == []


def test_bold_is_what_every_test_tells_apart() -> None:
    """a is better than b and c at 20 questions; d failed too often to be tested, and then nothing is bold."""
    scores = {"a": [1.0] * 20, "b": [0.0] * 20, "c": [1.0, 1.0] + [0.0] * 18}
    rows = {name: {"em": np.mean(values), "em_interval": [0, 1], "n": 20} for name, values in scores.items()}
    tests = paired_tests({name: {"em": np.asarray(values)} for name, values in scores.items()}, ("em",))
    table = report.metric_table({"x": {"n": 20, "rows": rows, "tests": tests}}, "em")
    assert table.bold == {(0, 1)}
    failed = {"d": {"em": 0.0, "em_interval": [0, 1], "n": 20, "n_answered": 3}}
    table = report.metric_table({"x": {"n": 20, "rows": rows | failed, "tests": tests}}, "em")
    assert not table.bold
    assert table.rows[3] == ["d", "0.0 (0.0-100.0), 3 of 20"]
    assert not report.metric_table({"x": {"n": 20, "rows": {"a": rows["a"]}, "tests": []}}, "em").bold
    matrix = report.tests_matrix(tests)
    assert [row[0] for row in matrix.rows] == ["1 a", "2 b", "3 c"]
    assert (matrix.rows[1][3], matrix.rows[2][2]) == ("-10.0", "0.500")  # two of two questions: 2 / 4
    assert matrix.bold == {(0, 2), (1, 1), (0, 3), (2, 1)}


def test_the_report_says_by_which_rule_answers_were_read() -> None:
    rows = {
        "direct": {"n": 8, "answered_rate": 1.0, "answer_rule/line": 0.25, "answer_rule/label": 0.625},
        "search": {"n": 8, "answered_rate": 1.0},
    }
    table = report.behaviour_table(rows)
    assert (table.headings[-1], [row[-1] for row in table.rows]) == ("answers by rule", ["label 5, line 2", "-"])
    assert report.behaviour_table({"search": rows["search"]}).headings == ["agent", "answered"]


def test_verdicts_are_asked_once(tmp_path: pathlib.Path) -> None:
    asked: list[str] = []

    def judge(episodes: Any) -> list[Verdict]:
        asked.extend(episode.example.id for episode in episodes)
        return [Verdict(kind="right" if e.example.id == "a" else "failed", counts=1.0) for e in episodes]

    examples = [Example(id=name, question="Capital?", answers=("Accra",), metadata={"path": []}) for name in ("a", "b")]
    path = tmp_path / "row.jsonl"
    attempt_all(
        AGENT, examples, ScriptedEngine(lambda *_: ANSWER), knowledge(), path, sampling=GREEDY, seed=0, tool_timeout=5.0
    )
    for judged_by, expected in (("x", "ab"), ("x", "b"), ("y", "ab")):
        episodes, records = finished_attempts(path, examples, judge, judged_by)
        assert "".join(asked) == expected
        assert [e.verdict.kind for e in episodes if e.verdict] == ["right", "failed"]
        assert records[0]["judge"] == judged_by
        asked.clear()
    unjudged, _ = finished_attempts(path, examples)
    assert [episode.verdict for episode in unjudged] == [None, None]
    assert [whole(episode) for episode in unjudged] == [("Accra", {"path": []})] * 2
    with pytest.raises(ValueError, match="has no episode of question 'c'"):
        finished_attempts(path, [Example(id="c", question="?", answers=("x",))])


def whole(episode: Episode) -> tuple[str | None, Any]:
    return episode.answer, episode.example.metadata


def test_pictures_become_words(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that sees describes them once; the policy reads the captions, and no picture is sent to it."""
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    flag = tmp_path / "flag.png"
    flag.write_bytes(flags.flag("Mali"))
    examples = [
        Example(id="a", question="Whose?", answers=("Mali",), images=(str(flag),)),
        Example(id="b", question="Why?", answers=("x",)),
    ]

    def seen(messages: list[dict[str, Any]]) -> str:
        assert [part["type"] for part in messages[0]["content"]] == ["image_url", "text"]
        return "Three bars,\n green, yellow and red."

    with serving(handler := Chats(seen)) as server:
        given = CaptionConfig(model="sees", base_url=f"{server.url}/v1", retries=0)
        for _ in range(2):
            found = captioned(examples, given)
            assert found[0].question == "Picture: Three bars, green, yellow and red.\nWhose?"
            assert (found[0].id, found[0].images, found[1]) == ("a", (), examples[1])
        assert len(handler.bodies) == 1
        handler.reply = lambda _: " "
        with pytest.raises(
            ValueError, match="1 of 1 pictures have no caption; that of question 'a': the reply is empty"
        ):
            captioned(examples, dataclasses.replace(given, model="blind"))


def test_files_of_a_benchmark(tmp_path: pathlib.Path) -> None:
    write_world(tmp_path / "b")
    bases = {"text": KnowledgeConfig(source="b/corpus.*"), "web": KnowledgeConfig(source="http://127.0.0.1:1/kb")}
    made = Benchmark(questions=("b/dev.*", "flashrag:b/questions.*"), knowledge=bases, get="Ask me.")
    found = located("b", made, str(tmp_path))
    assert found.questions == (f"flashrag:{tmp_path}/b/questions.jsonl",)
    assert found.knowledge["text"].source == f"{tmp_path}/b/corpus.jsonl"
    assert found.knowledge["web"].source == "http://127.0.0.1:1/kb"
    (tmp_path / "b" / "corpus.jsonl").unlink()
    with pytest.raises(
        ValueError, match=r"its knowledge base 'text' is not there; looked for .*/b/corpus\.\*\. Ask me\."
    ):
        located("b", made, str(tmp_path))


@pytest.mark.parametrize(
    "name", ["hotpotqa", "2wikimultihopqa", "musique", "popqa", "wikitablequestions", "atlas", "atlas_flags"]
)
def test_real_data_are_read(name: str, shared_data: Any) -> None:
    """As they lie in the directory of real data; whatever form their files have there."""
    data = "" if name.startswith("atlas") else str(shared_data(name).parent)
    given = dataclasses.replace(LOCAL, benchmarks=(name,), agents=("direct", "vanilla_rag"), data=data, questions=5)
    (field,) = prepared(given)
    assert len(field.examples) == 5
    assert all(example.answers for example in field.examples)
    rows = [row.name for row in field.rows]
    assert rows[:2] == ["direct", "vanilla_rag" if len(field.knowledge) == 1 else "vanilla_rag_text"]


def test_every_benchmark_says_where_it_is_had() -> None:
    for name in BENCHMARKS:
        one = BENCHMARKS.get(name)
        assert one.about
        assert one.get
        assert one.licence
