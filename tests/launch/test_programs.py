"""train, evaluate, ask, view and export_hf as a user runs them, on a policy that trains in seconds."""

import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from routerl_jax.core.files import write_json_lines
from routerl_jax.core.types import Episode, Example
from routerl_jax.engine.engine import Engine
from routerl_jax.evaluation.benchmark import Unfinished
from routerl_jax.evaluation.records import episode_record
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.pretrained import PACKAGED_MODELS
from routerl_jax.training import config as schema
from tests.programs import fine, launch, launch_here, refusal, write_config
from tests.training.small_run import make_config

QUESTION = "What is the atomic number of Seaborgium?"


@pytest.fixture(scope="module")
def config(small_run: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    made = make_config(small_run, mesh=schema.MeshConfig(cpu_devices=2))
    return write_config(made, tmp_path_factory.mktemp("programs") / "config.py")


@pytest.fixture(scope="module")
def workdir(config: pathlib.Path) -> pathlib.Path:
    workdir = config.parent / "run"
    output = fine(
        launch(
            "train",
            f"--config={config}",
            f"--workdir={workdir}",
            "--config.steps=2",
            "--config.evaluation.baselines=True",
            "--config.evaluation.before=True",
        )
    )
    assert "before RL" in output
    assert "after RL" in output
    assert "no search" in output
    return workdir


def test_the_workdir_holds_what_it_should(workdir: pathlib.Path) -> None:
    for name in ("config.json", "metrics.jsonl", "results.json", "checkpoints/2", "policy/model.safetensors"):
        assert (workdir / name).exists(), name
    assert sorted(path.name for path in (workdir / "figures").iterdir()) == ["kb_usage.png", "learning_curves.png"]
    assert len(list((workdir / "episodes").glob("*.jsonl"))) == 2
    assert json.loads((workdir / "config.json").read_text())["steps"] == 2  # the override
    results = json.loads((workdir / "results.json").read_text())
    assert {"warm_start", "trained", "no_search"} <= results["agents"].keys()
    assert results["agents"]["no_search"]["searches_per_question"] == 0
    assert results["agents"]["trained"]["searches_per_question"] > 0
    assert results["seconds"]["training"] > 0
    assert results["devices"] == 2  # config.mesh.cpu_devices
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    # the same weights score what they sampled: sampler and learner agree
    assert all(row["sampler_gap/max"] < 1e-4 for row in rows)


def test_train_refuses_and_says_why(config: pathlib.Path, workdir: pathlib.Path) -> None:
    cases = {
        ("--config.learner.lrr=3",): "unknown config key config.learner.lrr; known keys",
        ("--config.step=3",): "unknown config key config.step; did you mean config.steps?",
        (f"--workdir={workdir}",): "holds a run already; pass --resume",
        ("--resume",): "-other holds no run; check --workdir, or leave out --resume",
        ("--config.steps=2", "spare"): "unexpected argument 'spare'",
        ("--config=configs/nothing.py",): "there is no such file",
    }
    for extra, message in cases.items():
        assert message in refusal("train", f"--config={config}", f"--workdir={workdir}-other", *extra)


def test_a_refusal_is_one_line_on_standard_error(workdir: pathlib.Path) -> None:
    done = launch("view", f"--workdir={workdir}", "--terminal", "--step=9")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "launch.view: step 9 was not logged; the last one is step-000001\n"


def test_evaluate(workdir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = fine(launch("evaluate", f"--workdir={workdir}", "--agents=trained,no_search", "--json"))
    results = json.loads(output)
    assert results["agents"].keys() == {"trained", "no_search"}
    trained = json.loads((workdir / "results.json").read_text())["agents"]["trained"]
    assert results["agents"]["trained"] == trained  # greedy: the same answers again
    [directory] = (workdir / "benchmarks").iterdir()  # the run's own evaluation stays as it was
    assert json.loads((directory / "results.json").read_text()) == results
    assert len((directory / "trained.jsonl").read_text().splitlines()) == 4
    assert "| after RL |" in (directory / "report.md").read_text()
    assert (directory / "figures" / "comparison.png").stat().st_size > 5000
    assert "unknown agent 'best'; known: trained" in refusal("evaluate", f"--workdir={workdir}", "--agents=best")
    assert "give either --workdir or --model" in refusal("evaluate")
    capsys.readouterr()
    assert not launch_here("evaluate", f"--workdir={workdir}", "--agents=only_text", "--json")
    more = json.loads(capsys.readouterr().out)
    assert list(more["agents"]) == ["trained", "no_search", "only_text"]  # what was there stays
    other = refusal("evaluate", f"--workdir={workdir}", "--agents=trained", "--limit=2")
    assert "has results of questions 4, and now it is 2: give another --output" in other
    clash = refusal("evaluate", f"--workdir={workdir}", "--agents=trained", f"--output={workdir}")
    assert "results.json has results of benchmark None" in clash  # training's own table
    assert "leave it out" in refusal("evaluate", f"--workdir={workdir}", "--config=configs/quickstart.py")
    told = "questions of .* are not of several datasets"
    assert re.search(f"--by=dataset: the 4 {told}", refusal("evaluate", f"--workdir={workdir}", "--by=dataset"))

    def beside_another(*_: Any, **__: Any) -> tuple[dict[str, Any], list[Any]]:
        """Scores while another process, begun at the same time, writes what it has found."""
        theirs = {**more, "agents": {**more["agents"], "random_kb": trained}}
        (directory / "results.json").write_text(json.dumps(theirs))
        return trained, []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("routerl_jax.evaluation.benchmark.score", beside_another)
        assert not launch_here("evaluate", f"--workdir={workdir}", "--agents=only_table")
    found = json.loads((directory / "results.json").read_text())["agents"]
    assert list(found) == ["trained", "no_search", "only_text", "random_kb", "only_table"]


def test_an_interrupted_evaluation_goes_on(
    workdir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Interrupted in the second agent's second episode. Nothing that was kept is run again, and the numbers are those of one
    call. What other settings kept is refused."""
    arguments = (f"--workdir={workdir}", "--agents=trained,only_text", "--json")
    assert not launch_here("evaluate", *arguments, f"--output={tmp_path / 'whole'}")
    whole = json.loads(capsys.readouterr().out)
    kept: list[str] = []
    add = Unfinished.add

    def counted_add(self: Unfinished, episode: Episode) -> None:
        add(self, episode)
        kept.append(episode.example.id)
        if len(kept) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Unfinished, "add", counted_add)
    output = f"--output={tmp_path / 'out'}"
    assert launch_here("evaluate", *arguments, output) == 130
    refused = refusal("evaluate", *arguments, output, "--temperature=1")
    assert all(text in refused for text in ("trained.unfinished, line 1", "remove the file", "temperature 0.0"))
    capsys.readouterr()
    assert not launch_here("evaluate", *arguments, output)
    assert json.loads(capsys.readouterr().out) == whole
    assert len(kept) == 2 * 4
    assert sorted(path.name for path in (tmp_path / "out").iterdir() if path.suffix != ".jsonl") == [
        "figures",
        "report.md",
        "results.json",
    ]
    for name in ("trained", "only_text"):
        texts = [
            [
                turn["text"]
                for row in map(json.loads, (tmp_path / place / f"{name}.jsonl").open())
                for turn in row["turns"]
            ]
            for place in ("whole", "out")
        ]
        assert texts[0] == texts[1]


def test_evaluate_on_golden_steps(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Another policy's table is not added to; one that was not trained by reinforcement is not called so."""
    route = {
        "step_type": "ret",
        "system": "s",
        "problem": "p",
        "answer": {"query": "q", "retriever": ["text retriever"]},
    }
    final = {"step_type": "ans", "system": "s", "problem": "p", "answer": ["Accra"]}
    none = {**route, "answer": {"query": "none", "retriever": ["none"]}}
    steps = [route, {**final, "answer": "Accra"}, none, final]
    row = {"id": "t", "question": "What is the capital?", "images": [], "steps": steps}
    (tmp_path / "golden.jsonl").write_text(json.dumps(row) + "\n")
    golden = (f"--benchmark=trajectories:{tmp_path / 'golden.jsonl'}", f"--output={tmp_path / 'out'}")
    refused = refusal("evaluate", f"--workdir={workdir}", "--agents=trained,no_search", *golden)
    assert "holds golden steps, at which nothing is searched" in refused
    config = (f"--model={workdir / 'policy'}", f"--config={workdir.parent / 'config.py'}")
    assert not launch_here("evaluate", *config, "--config.recipe=r1_router", *golden)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {name: row["n"] for name, row in results["agents"].items()} == {"policy": 4}
    assert "| policy |" in (tmp_path / "out" / "report.md").read_text()
    other = refusal("evaluate", *config, "--config.recipe=r1_router", "--config.agent.max_turn_tokens=9", *golden)
    assert "has results of settings digest" in other


def test_ask(workdir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two attempts as JSON and two as text: the same ones."""
    arguments = (f"--workdir={workdir}", "--temperature=1", "--samples=2", QUESTION)
    records = [json.loads(line) for line in fine(launch("ask", "--json", *arguments)).splitlines()]
    assert [(record["question"], record["sample"]) for record in records] == [(QUESTION, 0), (QUESTION, 1)]
    assert all(record["prompt"].startswith(f"Question: {QUESTION}") for record in records)
    assert not launch_here("ask", *arguments)
    shown = capsys.readouterr().out
    assert "attempt 2" in shown
    assert "answers" in shown
    for passage in (p for record in records for turn in record["turns"] for c in turn["calls"] for p in c["passages"]):
        assert passage["title"] in shown
    assert "give exactly one question" in refusal("ask", f"--workdir={workdir}")
    assert "holds no run (config.json is missing)" in refusal("ask", f"--workdir={workdir}/nothing", "What?")


def test_view(workdir: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert not launch_here("view", f"--workdir={workdir}", "--terminal", "--step=0", "--count=2")
    shown = capsys.readouterr().out
    assert shown.count("Question") >= 2
    assert re.search(r"2 episodes of .*step-000000", shown.replace("\n", ""))
    assert "--step is of the terminal: add --terminal" in refusal("view", f"--workdir={workdir}", "--step=0")
    assert "--port is of the page" in refusal("view", f"--workdir={workdir}", "--terminal", "--port=0")
    assert "give one of --workdir, --runs and --file" in refusal("view", f"--workdir={workdir}", f"--runs={workdir}")
    assert "is no directory" in refusal("view", f"--runs={workdir},{workdir}/nothing")


def test_view_what_was_wrong(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the run judged it, whose evaluation or directory the file is of: VQA's words for numbers, say. Steps without golden
    answers are neither right nor wrong."""
    examples = [Example(id=name, question="?", answers=golds) for name, golds in (("q", ("3",)), ("step", ()))]
    episodes = [Episode(example=e, sample=0, answer="three", turns=[], sequences=[]) for e in examples]
    file = tmp_path / "a" / "trained.jsonl"
    write_json_lines(file, map(episode_record, episodes))
    vqa = json.dumps({"normalizer": "vqa"})

    def wrong(*arguments: str) -> bool:
        assert not launch_here("view", f"--file={file}", "--wrong", *arguments)
        return "q, sample 0" in capsys.readouterr().out

    assert wrong()
    assert not wrong("--normalizer=vqa")
    (tmp_path / "config.json").write_text(f'{{"evaluation": {vqa}}}')
    assert not wrong()
    (tmp_path / "config.json").unlink()
    (tmp_path / "a" / "results.json").write_text(vqa)
    assert not wrong()


def test_exported_policy_answers_the_same_in_transformers(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Greedy output of transformers equals ours, token for token."""
    output = tmp_path / "exported"
    fine(launch("export_hf", f"--workdir={workdir}", f"--output={output}"))
    twin: Any = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    model = load_pretrained(str(output))
    assert isinstance(model, Decoder)
    engine = Engine(model, rows=8, max_length=192)
    questions = [f"Question: What is the capital of {name}?\n" for name in ("Ghana", "Togo", "Peru", "Chad")]
    streams = [engine.open(engine.tokenizer.encode(question), question) for question in questions]
    for stream in streams:
        engine.request(stream, max_tokens=48)
    while engine.busy:
        engine.step()
    for question, stream in zip(questions, streams):
        prompt = tokenizer(question, return_tensors="pt", add_special_tokens=False)
        theirs = twin.generate(**prompt, do_sample=False, max_new_tokens=48)[0].tolist()
        np.testing.assert_array_equal(stream.ledger.sequence().tokens[: len(theirs)], theirs)
        assert len(theirs) == len(stream.ledger)
    assert "is not empty" in refusal("export_hf", f"--workdir={workdir}", f"--output={output}")


def test_a_step_is_exported(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Of two steps, the second is the finished policy; the first lies between it and the initial weights."""

    def exported(step: int) -> dict[str, np.ndarray]:
        assert not launch_here(
            "export_hf", f"--workdir={workdir}", f"--output={tmp_path / str(step)}", f"--step={step}"
        )
        return load_file(tmp_path / str(step) / "model.safetensors")

    initial, final = (
        load_file(p / "model.safetensors") for p in (PACKAGED_MODELS["atlas-warm-start"], workdir / "policy")
    )
    first, second = exported(1), exported(2)
    for name in final:
        np.testing.assert_array_equal(second[name], final[name], err_msg=name)
        assert 0 < np.linalg.norm(first[name] - initial[name]) < 2 * np.linalg.norm(final[name] - initial[name]), name
        assert (first[name] != final[name]).any(), name
    message = refusal("export_hf", f"--workdir={workdir}", f"--output={tmp_path / 'x'}", "--step=7")
    assert "checkpoints has no checkpoint of step 7; it has [1, 2]" in message
    assert not (tmp_path / "x").exists()
