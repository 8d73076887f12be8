"""train, evaluate, ask, view and export_hf as a user runs them, on a policy that trains in seconds."""

import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from routerl_jax.core.config import to_config_dict
from tests.training.small_run import make_config

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = """
import json
import ml_collections
from routerl_jax.core.config import from_config_dict, to_config_dict
from routerl_jax.training.config import TrainConfig

def get_config():
    return to_config_dict(from_config_dict(TrainConfig, json.loads({text!r})))
"""


def launch(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"launch.{program}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=400, check=False)


def fine(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    home = tmp_path_factory.mktemp("home")
    made = make_config(home)
    path = home / "config.py"
    path.write_text(CONFIG.format(text=json.dumps(to_config_dict(made).to_dict())))
    return path


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
    assert results["seconds"]["training"] > 0
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1]
    # the same weights score what they sampled: sampler and learner agree
    assert all(row["sampler_gap/max"] < 1e-4 for row in rows)


def test_train_refuses_and_says_why(config: pathlib.Path, workdir: pathlib.Path) -> None:
    cases = {
        ("--config.learner.lrr=3",): "unknown config key config.learner.lrr; known keys",
        ("--config.step=3",): "unknown config key config.step; did you mean config.steps?",
        (f"--workdir={workdir}",): "holds a run already; pass --resume",
        ("--config.steps=2", "spare"): "unexpected argument 'spare'",
    }
    for extra, message in cases.items():
        done = launch("train", f"--config={config}", f"--workdir={workdir}-other", *extra)
        assert done.returncode != 0
        assert message in done.stderr, done.stderr[-2000:]
        assert "Traceback" not in done.stderr
    done = launch("train", "--config=configs/nothing.py", f"--workdir={workdir}-other")
    assert "there is no such file" in done.stderr


def test_evaluate(workdir: pathlib.Path) -> None:
    output = fine(launch("evaluate", f"--workdir={workdir}", "--agents=trained,no_search", "--json"))
    results = json.loads(output)
    assert results["agents"].keys() == {"trained", "no_search"}
    trained = json.loads((workdir / "results.json").read_text())["agents"]["trained"]
    assert results["agents"]["trained"] == trained  # greedy: the same answers again
    directory = workdir / "evaluation"
    assert json.loads((directory / "results.json").read_text()) == results
    assert len((directory / "trained.jsonl").read_text().splitlines()) == 6
    assert "| after RL |" in (directory / "report.md").read_text()
    assert (directory / "figures" / "comparison.png").stat().st_size > 5000
    done = launch("evaluate", f"--workdir={workdir}", "--agents=best")
    assert done.returncode == 1
    assert "unknown agent 'best'; known: trained" in done.stderr
    assert "give either --workdir or --model" in launch("evaluate").stderr


def test_ask(workdir: pathlib.Path) -> None:
    record = json.loads(fine(launch("ask", f"--workdir={workdir}", "--json", "What is 7?")))
    assert record["question"] == "What is 7?"
    assert record["prompt"].startswith("Question: What is 7?")
    shown = fine(launch("ask", f"--workdir={workdir}", "--temperature=1", "--samples=2", "What is 7?"))
    assert shown.count("Question  What is 7?") == 2
    assert "attempt 2" in shown
    assert "answers" in shown
    assert "give exactly one question" in launch("ask", f"--workdir={workdir}").stderr
    done = launch("ask", f"--workdir={workdir}/nothing", "What?")
    assert "holds no run (config.json is missing)" in done.stderr


def test_view(workdir: pathlib.Path) -> None:
    shown = fine(launch("view", f"--workdir={workdir}", "--step=0", "--count=2"))
    assert shown.count("Question") >= 2
    assert re.search(r"2 episodes of .*step-000000", shown.replace("\n", ""))
    assert "step 9 was not logged" in launch("view", f"--workdir={workdir}", "--step=9").stderr


def test_exported_policy_answers_the_same_in_transformers(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Greedy output of transformers equals ours, token for token."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from routerl_jax.generation.engine import Engine
    from routerl_jax.models.huggingface import load_pretrained

    output = tmp_path / "exported"
    fine(launch("export_hf", f"--workdir={workdir}", f"--output={output}"))
    twin = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(output)
    engine = Engine(load_pretrained(str(output)), rows=8, max_length=192)
    questions = [f"Question: What is {i}?\n" for i in range(8)]
    streams = [engine.open(engine.tokenizer.encode(question), question) for question in questions]
    for stream in streams:
        engine.request(stream, max_tokens=64)
    while engine.busy:
        engine.step()
    for question, stream in zip(questions, streams):
        prompt = tokenizer(question, return_tensors="pt", add_special_tokens=False)
        theirs = twin.generate(**prompt, do_sample=False, max_new_tokens=64)[0].tolist()
        np.testing.assert_array_equal(stream.ledger.sequence().tokens[: len(theirs)], theirs)
        assert len(theirs) == len(stream.ledger)
    done = launch("export_hf", f"--workdir={workdir}", f"--output={output}")
    assert "is not empty" in done.stderr
    done = launch("export_hf", f"--workdir={workdir}", f"--output={tmp_path / 'x'}", "--step=7")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
