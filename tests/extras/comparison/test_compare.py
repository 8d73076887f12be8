"""launch.evaluate on agents and benchmarks: numbers by hand, a kill, and what is refused."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from routerl_jax.data.atlas import flags
from routerl_jax.extras.comparison.config import CaptionConfig
from routerl_jax.parallel.workdir import directory_lock
from routerl_jax.services.config import JudgeConfig
from tests.data import original_rows
from tests.extras.comparison.world import QUESTIONS, config, reply, write_world
from tests.programs import finish, launch_here, refusal, start, write_config
from tests.web_servers import Chats, http_error, refused_by_openai, serving


@pytest.fixture
def chats(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    handler: Any = Chats(reply)
    handler.refuse = refused_by_openai
    write_world(tmp_path / "data")
    with serving(handler) as server:
        handler.url = f"{server.url}/v1"
        yield handler


def given(chats: Any, tmp_path: pathlib.Path, **changes: Any) -> str:
    return f"--config={write_config(config(tmp_path / 'data', chats.url, **changes), tmp_path / 'config.py')}"


def compared(*arguments: str) -> dict[str, Any]:
    assert not launch_here("evaluate", *arguments)
    output = next(argument for argument in arguments if argument.startswith("--output="))
    return json.loads((pathlib.Path(output.removeprefix("--output=")) / "results.json").read_text())


def without_seconds(results: dict[str, Any]) -> dict[str, Any]:
    for found in results["benchmarks"].values():
        for row in found["rows"].values():
            row["cost"].pop("seconds")
            row.pop("policy_seconds_per_question")
    return results


def test_numbers_by_hand(chats: Any, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    results = compared("--limit=6", given(chats, tmp_path), f"--output={output}")
    found = results["benchmarks"]["things"]
    rows = found["rows"]
    assert {name: row["em"] for name, row in rows.items()} == {"direct": 2 / 6, "vanilla_rag": 5 / 6, "cot": 1 / 6}
    # 7 tokens are read of each request; "So the answer is: colour5" are five words, "colour5" is one
    assert rows["direct"]["cost"] | {"seconds": 0} == {
        "searches": {"text": 0.0},
        "read": 7.0,
        "written": 1.0,
        "seconds": 0,
        "money": pytest.approx(8e-3),
    }
    assert rows["vanilla_rag"]["cost"]["searches"] == {"text": 1.0}
    assert rows["cot"]["cost"]["money"] == pytest.approx(12e-3)
    # only one of two is right at 0 + 3, 2 + 1 and 5 + 1 questions: twice the tail of a fair coin
    chances = {(t["first"], t["second"]): (t["p"], t["holm"]) for t in found["tests"] if t["metric"] == "em"}
    assert chances == {
        ("direct", "vanilla_rag"): (pytest.approx(2 / 8), pytest.approx(3 * 14 / 64)),
        ("direct", "cot"): (pytest.approx(1.0), pytest.approx(1.0)),
        ("vanilla_rag", "cot"): (pytest.approx(14 / 64), pytest.approx(3 * 14 / 64)),
    }
    report, page = (output / "report.md").read_text(), (output / "report.html").read_text()
    assert "| **vanilla_rag** | " not in report
    assert "| vanilla_rag | 83.3 (50.0-100.0) |" in report  # the best is not bold: no test tells it apart
    assert '<td class="text">vanilla_rag</td><td>83.3 (50.0-100.0)</td>' in page
    assert "| 2 vanilla_rag | 0.656 |  | +66.7 |" in report  # 3 * 14 / 64, itself, and the difference from the third
    assert "Told apart (corrected p below 0.05): none of 3 pairs of agents." in report
    assert "| vanilla_rag | 1.00 | 1.00 | 1 | 1.00 | 7 | 1 | " in report
    assert "| things | vanilla_rag | 83.3 | 0.0 | 16.7 | 0.0 |" in report
    assert "| things | direct | 0.0 | 33.3 | 0.0 | 66.7 |" in report
    assert "Every question was answered, and no search failed." in report
    assert 'src="data:image/png;base64,iVBOR' in page
    assert 'src="figures' not in page
    assert "![Metrics of every agent, with 95 % intervals](figures/metrics.png)" in report
    assert "![Quality against searches and tokens of a question](figures/quality_cost.png)" in report
    card = results["card"]
    knowledge = card["benchmarks"]["things"]["knowledge"]["text"]
    assert (knowledge["kind"], knowledge["passages"], len(knowledge["corpus sha256"])) == ("bm25", 6, 64)
    assert card["policies"]["policy"]["chat model"]["model"] == "m"
    assert card["versions"]["jax"]
    assert card["definitions"]["em"].startswith("EM: 1 if the normalised prediction equals")
    printed = capsys.readouterr().out
    assert "83.3 (50.0-100.0)" in printed
    assert "report.html" in printed


def test_killed_it_goes_on_and_asks_nothing_twice(
    chats: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at its ninth request: direct's six episodes and two of vanilla_rag's are there."""
    wanted, output = given(chats, tmp_path), tmp_path / "out"
    process = start("launch.evaluate", wanted, f"--output={output}", JAX_NUM_CPU_DEVICES="1")

    def deadly(messages: list[dict[str, Any]]) -> str:
        if len(chats.bodies) == QUESTIONS + 3:
            os.kill(process.pid, signal.SIGKILL)
        return reply(messages)

    chats.reply = deadly
    finish(process, -signal.SIGKILL)
    places = {name: output / "episodes" / "things" / f"{name}.jsonl" for name in ("direct", "vanilla_rag", "cot")}
    assert [len(places[name].read_text().splitlines()) for name in ("direct", "vanilla_rag")] == [QUESTIONS, 2]
    with places["vanilla_rag"].open("a") as file:
        file.write('{"id": "q2", "sam')  # half a record, as a full disk leaves it
    chats.reply = reply
    before, chats.bodies = len(chats.bodies), []
    assert before == QUESTIONS + 3
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "other cache"))  # what is known is known from the episodes
    resumed = compared(wanted, f"--output={output}")
    assert len(chats.bodies) == (QUESTIONS - 2) + QUESTIONS
    assert [json.loads(line)["id"] for line in places["vanilla_rag"].read_text().splitlines()] == [
        f"q{i}" for i in range(QUESTIONS)
    ]
    chats.bodies.clear()
    assert without_seconds(compared(wanted, f"--output={output}")) == without_seconds(resumed)
    assert not chats.bodies
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "third cache"))
    whole = without_seconds(compared(wanted, f"--output={tmp_path / 'whole'}"))
    assert whole["benchmarks"] == resumed["benchmarks"]


def test_what_is_finished_is_reported_while_it_runs(chats: Any, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "out"
    wanted = (given(chats, tmp_path, reference="vanilla_rag"), f"--output={output}")
    whole = without_seconds(compared(*wanted))
    path = output / "episodes" / "things" / "vanilla_rag.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]) + lines[2][:20])  # the third is being written
    before = {file: file.read_bytes() for file in output.glob("episodes/*/*")}
    chats.bodies.clear()
    with directory_lock(output):
        found = without_seconds(compared(*wanted, "--finished"))
    assert not chats.bodies
    assert {file: file.read_bytes() for file in output.glob("episodes/*/*")} == before
    things = found["benchmarks"]["things"]
    assert things["rows"] == {name: whole["benchmarks"]["things"]["rows"][name] for name in ("direct", "cot")}
    assert things["tests"] == []
    assert found["card"]["unfinished"] == {"things": {"vanilla_rag": 2}}
    assert found["card"]["policies"] == whole["card"]["policies"]
    report = (output / "report.md").read_text()
    assert "Not all is finished" in report
    assert "things: no tests, because vanilla_rag has no results there." in report
    assert "| agent | things |\n| --- | ---: |\n| vanilla_rag | 2 |" in report
    assert "| vanilla_rag | - |" in report
    said = refusal("evaluate", *wanted[:1], f"--output={tmp_path / 'none'}", "--finished")
    assert f"no agent has an episode of every question in {tmp_path / 'none'}" in said
    assert without_seconds(compared(*wanted)) == whole


def test_what_failed_is_told_and_tried_again(chats: Any, tmp_path: pathlib.Path) -> None:
    chats.storm = [http_error(500)]
    wanted = (given(chats, tmp_path, agents=("direct",), metrics=("em",)), f"--output={tmp_path / 'out'}")
    assert "direct on things (replies for 5 of 6)" in refusal("evaluate", *wanted)
    row = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["things"]["rows"]["direct"]
    assert (row["n"], row["n_answered"], row["em"], row["em_answered"]) == (6, 5, 1 / 6, 1 / 5)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| direct | 16.7 (0.0-50.0), 5 of 6 |" in report
    assert "| direct | 20.0 (0.0-60.0), 5 of 6 |" in report  # without the unanswered one
    assert "| things | direct, 5 of 6 | 0.0 | 16.7 | 0.0 | 83.3 |" in report  # right and wrong, of all six
    assert "| things | direct | the policy gave no reply (server) | 1 |" in report
    assert "| things | direct | no answer, these included | 1 |" in report
    chats.bodies.clear()
    again = compared(*wanted)
    assert len(chats.bodies) == 1
    assert again["benchmarks"]["things"]["rows"]["direct"]["em"] == 2 / 6
    assert "Every question was answered, and no search failed." in (tmp_path / "out" / "report.md").read_text()


def test_an_agent_without_replies_is_no_number_among_others(chats: Any, tmp_path: pathlib.Path) -> None:
    """All requests of `direct` fail: it has no number, no test and no part in what is bold, and the exit status is 1."""
    chats.storm = [http_error(500) for _ in range(QUESTIONS)]
    wanted = (given(chats, tmp_path, metrics=("em",)), f"--output={tmp_path / 'out'}")
    said = refusal("evaluate", *wanted)
    assert "direct on things (replies for 0 of 6)" in said
    assert "--allow_failures" in said
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    tests = results["benchmarks"]["things"]["tests"]
    assert [(test["first"], test["second"]) for test in tests] == [("vanilla_rag", "cot")]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| direct | -, 0 of 6 |" in report
    assert "direct on things (0 of 6)" in report.split("##")[0]
    assert "Not tested, because more than 5 % of the replies are missing: direct (0 of 6)." in report
    assert "**" not in report
    chats.storm = [http_error(500) for _ in range(QUESTIONS)]  # the same command asks those again
    assert not launch_here("evaluate", *wanted, "--allow_failures")
    assert "**" not in (tmp_path / "out" / "report.md").read_text()
    assert compared(*wanted)["benchmarks"]["things"]["rows"]["direct"]["em"] == 2 / 6


@pytest.mark.parametrize(
    ("failed", "score", "cell"), [("zero", 3 / 6, "50.0 (16.7-83.3)"), ("leave_out", 1.0, "100.0 (43.9-100.0)")]
)
def test_missing_verdicts_are_in_the_cell(
    chats: Any, tmp_path: pathlib.Path, failed: str, score: float, cell: str
) -> None:
    """The judge finds three answers right, and says nothing of the other three."""

    def judging(messages: list[dict[str, Any]]) -> str:
        asked = messages[-1]["content"]
        if "Answer to grade" not in asked:
            return reply(messages)
        return "right" if re.search(r"thing[024]", asked) else "Perhaps"

    chats.reply = judging
    judge = JudgeConfig(model="j", base_url=chats.url, asks=1, failed=failed)
    wanted = (
        given(chats, tmp_path, agents=("direct",), metrics=("judge",), judge=judge),
        f"--output={tmp_path / 'out'}",
    )
    assert "direct on things (verdicts for 3 of 6)" in refusal("evaluate", *wanted)
    row = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["things"]["rows"]["direct"]
    assert (row["judge"], row["judge_answered"], row["n_judged"], row["n_answered"]) == (score, 1.0, 3, 6)
    report = (tmp_path / "out" / "report.md").read_text()
    assert f"| direct | {cell}, 3 of 6 |" in report
    assert f"config.judge.failed='{failed}'" in report
    assert "| things | direct | the judge's verdict can't be read | 3 |" in report
    assert "Every question was answered" not in report
    refused = refusal("evaluate", *wanted, "--config.judge.failed=refuse")
    assert "judge j: 3 of 6 answers have no verdict (Perhaps), and failed='refuse'" in refused


def test_several_seeds(chats: Any, tmp_path: pathlib.Path) -> None:
    """With the first seed every answer is right, with the second none is: the interval is as wide as the seeds are apart."""
    right: set[int] = set()

    def by_seed(messages: list[dict[str, Any]]) -> str:
        number = re.findall(r"What colour has thing(\d)", str(messages))[-1]
        seed = chats.bodies[-1]["seed"]
        right.update({seed} if len(right) < QUESTIONS else ())
        return f"colour{number}" if seed in right else "mauve"

    chats.reply = by_seed
    output = tmp_path / "out"
    changes = {"agents": ("direct",), "metrics": ("em",), "temperature": 0.7, "seeds": 2, "seed": 3}
    results = compared(given(chats, tmp_path, **changes), f"--output={output}")
    row = results["benchmarks"]["things"]["rows"]["direct"]
    assert (row["em"], row["em_interval"], row["n"]) == (0.5, [0.0, 1.0], 2 * QUESTIONS)
    assert len({body["seed"] for body in chats.bodies}) == 2 * QUESTIONS
    assert "seed 3 and the 1 after it (each question is asked 2 times)" in (output / "report.md").read_text()
    second = output / "episodes" / "things" / "direct.seed4.jsonl"
    second.write_text("".join(second.read_text().splitlines(keepends=True)[:2]))
    chats.bodies.clear()
    compared(given(chats, tmp_path, **changes), f"--output={output}")
    assert not chats.bodies  # the other replies are in the cache
    assert len(second.read_text().splitlines()) == QUESTIONS
    told = refusal("evaluate", given(chats, tmp_path), f"--output={output}", "--config.seeds=2")
    assert "config.seeds=2 with config.temperature=0" in told


def test_rows_without_an_answer_are_counted(chats: Any, tmp_path: pathlib.Path) -> None:
    row = {**original_rows.MUSIQUE, "question": "What colour has thing1?", "answer": "colour1", "answer_aliases": []}
    rows = [row, {**row, "id": "no answer", "answerable": False}, {**row, "id": "another"}]
    (tmp_path / "data" / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    changes = {"agents": ("direct",), "metrics": ("em",), "questions": 1}
    results = compared(given(chats, tmp_path, **changes), f"--output={tmp_path / 'out'}")
    assert results["card"]["benchmarks"]["things"]["in the file"] == {"questions": 2, "answer": 1}
    assert results["benchmarks"]["things"]["rows"]["direct"]["em"] == 1.0
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Every question was answered, and no search failed." in report
    assert "| things |  | rows without answer, left out | 1 |" in report
    assert results["benchmarks"]["things"]["without_gold"] == 1  # no paragraph of the row is in the corpus
    assert "| things |  | questions with a gold passage that no knowledge base holds | 1 |" in report


def test_a_judge_and_its_bias(chats: Any, tmp_path: pathlib.Path) -> None:
    """The judge takes the accepted answer for right, unless it is told at length. `direct` knows two of six answers."""

    def judging(messages: list[dict[str, Any]]) -> str:
        asked = messages[-1]["content"]
        if "Answer to grade" not in asked:
            return reply(messages)
        accepted, answer = re.findall(r"(?:Accepted answers|Answer to grade): (.*)", asked)
        return "right" if json.loads(accepted) == [json.loads(answer)] else "wrong"

    chats.reply = judging
    judge = JudgeConfig(model="j", base_url=chats.url)
    changes = {"agents": ("direct",), "metrics": ("judge", "em"), "judge": judge, "judge_checks": 5}
    results = compared(given(chats, tmp_path, **changes), f"--output={tmp_path / 'out'}")
    row = results["benchmarks"]["things"]["rows"]["direct"]
    assert (row["judge"], row["judge/em_agreement"], row["judge/cover_em_agreement"]) == (2 / 6, 1.0, 1.0)
    assert row["judge_checks"] == {  # of the first five, two are right
        "longer": {"n": 5, "kept": 0.6, "wrong_to_right": 0.0, "right_to_wrong": 0.4},
        "swapped": {"n": 5, "kept": 1.0, "wrong_to_right": 0.0, "right_to_wrong": 0.0},
    }
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| things | direct | 33.3 | 100.0 | 33.3 | 0.0 | 0.0 | 0.0 | 100.0 | 100.0 |" in report
    assert "| things | direct | the answer in a longer sentence | 5 | 60.0 | 0.0 | 40.0 |" in report
    chats.bodies.clear()
    found = compared(given(chats, tmp_path, **changes), f"--output={tmp_path / 'out'}", "--finished")
    assert found["benchmarks"]["things"]["rows"]["direct"]["judge"] == 2 / 6
    assert not chats.bodies


def test_captions(chats: Any, tmp_path: pathlib.Path) -> None:
    """A question's picture is described by one model; the policy reads that, and is sent no picture."""
    questions = tmp_path / "data" / "questions.jsonl"
    (tmp_path / "data" / "flag.png").write_bytes(flags.flag("Mali"))
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    rows[0]["image"] = "flag.png"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats.reply = lambda messages: "Three bars." if isinstance(messages[0]["content"], list) else reply(messages)
    given_captions = CaptionConfig(model="sees", base_url=chats.url, retries=0)
    wanted = given(chats, tmp_path, agents=("direct",), captions=given_captions)
    results = compared(wanted, f"--output={tmp_path / 'out'}")
    asked = [
        (body["model"], "Picture: Three bars." in str(body["messages"]), "image_url" in str(body))
        for body in chats.bodies
    ]
    assert asked[:2] == [("sees", False, True), ("m", True, False)]
    assert asked[2:] == [("m", False, False)] * (QUESTIONS - 1)
    assert results["card"]["captions"]["model"] == "sees"
    without = refusal("evaluate", given(chats, tmp_path, agents=("direct",)), f"--output={tmp_path / 'out'}")
    assert "direct.json was made with other settings (questions digest differs" in without


def test_other_settings_are_refused(chats: Any, tmp_path: pathlib.Path) -> None:
    output = f"--output={tmp_path / 'out'}"
    compared(given(chats, tmp_path, agents=("vanilla_rag",)), output)
    changes: dict[str, dict[str, Any]] = {
        "(agent.fields.k differs: 2, now 3)": {"k": 3},
        "(temperature differs: 0.0, now 0.5)": {"temperature": 0.5},
        "(questions differs: 6, now 4)": {"questions": 4},
    }
    for said, change in changes.items():
        told = refusal("evaluate", given(chats, tmp_path, agents=("vanilla_rag",), **change), output)
        assert said in told
        assert "vanilla_rag.json was made with other settings" in told
    other = refusal("evaluate", given(chats, tmp_path), output, "--config.chat_model.model=n")
    assert "policy.json was made with other settings (chat model.model differs: 'm', now 'n')" in other
    passages = tmp_path / "data" / "corpus.jsonl"
    passages.write_text(passages.read_text().replace("colour3", "colour4"))
    told = refusal("evaluate", given(chats, tmp_path, agents=("vanilla_rag",)), output)
    assert "knowledge.text.built differs" in told


def test_what_is_refused_before_anything_is_asked(chats: Any, tmp_path: pathlib.Path) -> None:
    output = f"--output={tmp_path / 'out'}"
    wanted = given(chats, tmp_path)
    cases = {
        ("--agents=vanila_rag",): "unknown agent 'vanila_rag'; did you mean vanilla_rag",
        ("--agents=vanilla_rag_table",): "asks 'table', and benchmark 'things' has text",
        ("--agents=replug",): "'replug' asks for log-probabilities, which no endpoint tells",
        ("--agents=runs/none",): "holds no run of launch.train",
        ("--agents=search:only_table",): "agent 'search:only_table': there is no 'only_table'",
        ("--agents=direct,direct",): "config.agents names 'direct' twice",
        ("--agents=vanilla_rag,vanilla_rag_text,vanilla_rag_text",): "names 'vanilla_rag_text' twice",
        ("--benchmarks=hotpot",): "unknown benchmark 'hotpot'; did you mean 'hotpotqa'?",
        (
            "--benchmarks=hotpotqa",
        ): f"questions are not there; looked for {tmp_path}/data/hotpotqa/hotpot_dev_distractor_v1",
        (
            "--config.reference=cott",
        ): "config.reference='cott' is no agent of this comparison: cot, direct, vanilla_rag",
        ("--config.metrics=('emm',)",): "config.metrics: 'emm' is none of em",
        ("--config.settings={}", "--workdir=runs/x"): "--workdir is not for a comparison",
        ("--config.settings={'ircott': {}}",): "config.settings.ircott: no agent is called so; did you mean ircot",
        ("--benchmark=questions.jsonl",): "--benchmark is not for a comparison",
        ("--config.chat_model.model=",): "the agents need a policy: give config.model.path",
    }
    for arguments, said in cases.items():
        assert said in refusal("evaluate", wanted, output, *arguments)
    assert "needs --output" in refusal("evaluate", wanted)
    nowhere = refusal("evaluate", wanted, output, "--benchmarks=hotpotqa", "--config.data=")
    assert "config.data is empty: name the directory" in nowhere
    assert "curtis.ml.cmu.edu" in nowhere
    assert not chats.bodies


def test_a_papers_table(chats: Any, tmp_path: pathlib.Path) -> None:
    """R1-Searcher's Table 2, of which one benchmark is there: ours above, blank where nothing was run, and what differs."""
    write_world(tmp_path / "data" / "hotpotqa")
    (tmp_path / "data" / "hotpotqa" / "questions.jsonl").rename(tmp_path / "data" / "hotpotqa" / "questions_dev.jsonl")
    named = (
        "--report=r1_searcher.table2",
        "--config.retriever=bm25",
        "--benchmarks=hotpotqa",
        "--agents=direct,vanilla_rag",
    )
    results = compared(given(chats, tmp_path), f"--output={tmp_path / 'out'}", *named)
    assert results["card"]["metrics"] == ["cover_em"]  # there is no judge
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| model | method | HotpotQA ACC_R | HotpotQA ACC_L | 2Wiki ACC_R |" in report
    assert "| here: m | Naive Generation | 0.333 |  |  |  |  |  |  |  |" in report
    assert "| here: m | Standard RAG | 0.833 |  |" in report
    assert "| here: m | IRCoT |  |  |" in report
    assert "| GPT | IRCoT | 0.434 | 0.308 | 0.492 | 0.114 | 0.272 | 0.184 | 0.192 | 0.214 |" in report
    assert "| Qwen | R1-Searcher | 0.654 | 0.750 | 0.636 | 0.650 | 0.528 | 0.544 | 0.282 | 0.314 |" in report
    assert (report.count("| GPT | "), report.count("| Llama | "), report.count("| Qwen | ")) == (13, 16, 1)
    assert "| retriever | BGE-large-en-v1.5 | bm25 | differs |" in report
    assert "not run: 2wikimultihopqa, bamboogle, musique" in report
    told = refusal("evaluate", given(chats, tmp_path), f"--output={tmp_path / 'o'}", "--report=r1_searcher.table9")
    assert "--report: unknown table of a paper 'r1_searcher.table9'; did you mean 'r1_searcher.table" in told


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert not launch_here("evaluate", "--agents=help", "--benchmarks=help", "--report=help")
    printed = capsys.readouterr().out
    for said in (
        "ircot",
        "2212.10509",
        "CC BY-SA 4.0",
        "a knowledge base, an engine",
        "r1_searcher",
        "hotpotqa",
        "curtis.ml.cmu.edu",
        "atlas",
    ):
        assert said in printed
