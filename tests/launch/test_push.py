"""Model cards of exports, and --push to a server that speaks the part of the hub's protocol that uploads take."""

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

from routerl_jax.core.config import to_config_dict
from routerl_jax.core.packages import code_version
from routerl_jax.extras.model_card import licence_of, write_card
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.training.config import (
    AgentConfig,
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    KnowledgeConfig,
    LearnerConfig,
    ModelConfig,
    TrainConfig,
)
from tests import tiny
from tests.hub import TOKEN, Hub
from tests.programs import launch_here, refusal
from tests.web_servers import Server, serving

CONFIG = TrainConfig(
    recipe="search_r1",
    model=ModelConfig(path="SmolLM2-135M-Instruct"),
    engine=EngineConfig(max_length=64),
    agent=AgentConfig(k=3, max_searches=2),
    knowledge={"wiki": KnowledgeConfig(source="/home/me/secret/corpus.jsonl", encoder="all-MiniLM-L6-v2")},
    data=DataConfig(train="/home/me/secret/questions.jsonl", train_range=(0, 400)),
    learner=LearnerConfig(advantage="dr_grpo"),
    steps=40,
)
RESULTS = {
    "agents": {
        "trained": {"em": 0.5, "f1": 0.625, "searches_per_question": 1.25, "n": 64},
        "only_|x": {"em": 0.25, "f1": 0.3, "searches_per_question": 1.0, "n": 64},
    }
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Hub, Server]]:
    hub = Hub()
    with serving(hub) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub, server


@pytest.fixture
def workdir(tmp_path: pathlib.Path) -> pathlib.Path:
    """What a finished run leaves, as far as exports read it."""
    workdir = tmp_path / "run"
    save_pretrained(tiny.model(), workdir / "policy", tiny.tokenizer())
    (workdir / "config.json").write_text(json.dumps(to_config_dict(CONFIG).to_dict()))
    (workdir / "results.json").write_text(json.dumps(RESULTS))
    (workdir / "code.json").write_text(json.dumps({"routerl_jax": "0.0.9", "commit": "fedcba"}))
    (workdir / "figures").mkdir()
    (workdir / "figures" / "learning_curves.png").write_bytes(b"a picture")
    return workdir


def parts(card: str) -> tuple[dict[str, Any], str]:
    _, head, body = card.split("---\n", 2)
    return yaml.safe_load(head), body


def test_an_export_has_a_card(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    output = tmp_path / "my-router"
    assert not launch_here("export_hf", f"--workdir={workdir}", f"--output={output}")
    head, body = parts((output / "README.md").read_text())
    assert head == {
        "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "base_model_relation": "finetune",
        "license": "apache-2.0",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["routerl_jax", "retrieval", "reinforcement-learning", "search_r1"],
    }
    assert body.startswith("\n# my-router\n")
    for line in (
        "model = AutoModelForCausalLM.from_pretrained('my-router')",
        "tokenizer = AutoTokenizer.from_pretrained('my-router')",
        "| base | HuggingFaceTB/SmolLM2-135M-Instruct, licence apache-2.0 |",
        "| questions | questions.jsonl, items 0 to 400 |",
        "| knowledge base `wiki` | dense_text of corpus.jsonl, encoder all-MiniLM-L6-v2 |",
        "| steps | 40 |",
        "| trained with | routerl_jax 0.0.9, commit fedcba |",
        "| trained | 0.500 | 0.625 | 1.250 | 64 |",
        "| only_\\|x | 0.250 | 0.300 | 1.000 | 64 |",
        "![Learning curves](curve.png)",
        'config.learner.advantage = "dr_grpo"',
        "config.agent.k = 3",
        'config.knowledge.wiki.source = "corpus.jsonl"',
    ):
        assert line in body.splitlines(), line
    assert "What is the capital of Ghana?" in body
    assert code_version().get("commit", "no checkout") in body or "commit" not in code_version()
    assert "secret" not in body
    assert (output / "curve.png").read_bytes() == b"a picture"


def test_licences_are_the_bases_own(tmp_path: pathlib.Path) -> None:
    assert licence_of("") == licence_of("org/name") == licence_of(str(tmp_path)) == ""
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-nc-4.0\ntags: [x]\n---\n# Base\n")
    assert licence_of(str(tmp_path)) == "cc-by-nc-4.0"
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n# Broken\n")
    assert licence_of(str(tmp_path)) == ""
    (tmp_path / "README.md").write_text("# Nothing said\n")
    assert licence_of(str(tmp_path)) == ""
    assert licence_of("atlas-warm-start") == "apache-2.0"


def test_cards_of_other_exports(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A checkpoint has no results of its own; a base that says no licence has none in the head; an adapter is peft's."""
    output = tmp_path / "out"
    output.mkdir()
    named = dataclasses.replace(CONFIG, evaluation=EvaluationConfig(names={"trained": "router"}))
    write_card(output, workdir, named, name="me/x", sees=False)
    assert "`router` is this policy" in (output / "README.md").read_text()
    config = dataclasses.replace(CONFIG, model=ModelConfig(path="org/base"))
    write_card(output, workdir, config, name="me/x", sees=False, step=20, adapter=True)
    head, body = parts((output / "README.md").read_text())
    assert (head["base_model"], head["base_model_relation"], head["library_name"]) == ("org/base", "adapter", "peft")
    assert "license" not in head
    assert "| base | org/base, licence not stated |" in body
    assert "| steps | 20 of 40 |" in body
    assert "## Results" not in body
    (workdir / "results.json").write_text(json.dumps({"sft": {"held_out/nll": 1.25, "actor/loss": 1.0}, "seed": 0}))
    config = dataclasses.replace(config, kind="sft", model=ModelConfig(architecture={"embed": 16}))
    write_card(output, workdir, config, name="x", sees=True, licence="mit")
    head, body = parts((output / "README.md").read_text())
    assert (head["license"], head["pipeline_tag"]) == ("mit", "image-text-to-text")
    assert "base_model" not in head
    assert "reinforcement-learning" not in head["tags"]
    assert "- `held_out/nll` 1.2500" in body
    assert "demonstrations" in body


def test_push(hub: tuple[Hub, Server], workdir: pathlib.Path, tmp_path: pathlib.Path, capsys: Any) -> None:
    kept, output = hub[0], tmp_path / "exported"
    given = [f"--workdir={workdir}", f"--output={output}"]
    assert not launch_here("export_hf", *given, "--push=org/my-router", "--private", "--json")
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["pushed"].endswith("/commit/abc")
    files = {path.name: path.read_bytes() for path in output.iterdir()}
    assert kept.files == {"org/my-router": files}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "curve.png"} <= files.keys()
    assert kept.private == {"org/my-router": True}
    assert kept.messages == ["routerl_jax: search_r1, 40 steps"]
    assert "from_pretrained('org/my-router')" in files["README.md"].decode()
    assert {hashlib.sha256(files[name]).hexdigest() for name in ("model.safetensors", "curve.png")} == set(kept.blobs)
    shutil.rmtree(output)
    assert not launch_here("export_hf", *given, "--push=org/my-router")  # once more into the same repository
    assert "pushed it: " in capsys.readouterr().out


def test_pushes_that_are_refused(
    hub: tuple[Hub, Server], workdir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is exported, in one line."""
    output = tmp_path / "exported"
    given = [f"--workdir={workdir}", f"--output={output}"]
    message = refusal("export_hf", *given, "--push=a/b/c")
    assert message.startswith("launch.export_hf: --push=a/b/c is no name of a repository: write ORGANISATION/NAME")
    message = refusal("export_hf", *given, "--push=others/theirs")
    assert message.startswith("launch.export_hf: --push=others/theirs: the hub answers 403 (")
    assert "set HF_TOKEN to a token that may write there" in message
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the hub answers 401 (" in refusal("export_hf", *given, "--push=org/mine")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "--push=org/mine: ConnectError: " in refusal("export_hf", *given, "--push=org/mine")
    assert "--private is for --push" in refusal("export_hf", *given, "--private")
    assert not output.exists()
