"""Secrets: refused in a configuration, read from the environment, and in nothing that is written or shown."""

import io
import json
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

from launch.command import mask_log
from routerl_jax.agents.driver import run
from routerl_jax.core.config import from_config_dict, override
from routerl_jax.core.secrets import masked, resolved, secret, without_secrets
from routerl_jax.core.types import Example, Passage
from routerl_jax.evaluation.records import episode_record
from routerl_jax.extras.model_card import write_card
from routerl_jax.services.config import EndpointConfig
from routerl_jax.training import config as schema
from routerl_jax.training.checks import check_workdir
from routerl_jax.training.knowledge import check_knowledge, make_tool, open_knowledge_bases, try_sources
from routerl_jax.training.load import load_config
from routerl_jax.training.loggers import Logger, MetricWriter
from routerl_jax.training.run import as_json
from tests.agents.scripted import AGENT, ANSWER, SEARCH, ScriptedEngine

PLANTED = "pl4nted.Wert+17/x=="  # of no known form: its name, its place or its variable gives it away
FORMED = "sk-planted0123456789abcdef"
TOOL = f"{__name__}:Leaky"


class Leaky:
    """A tool that tells its token wherever it can."""

    def __init__(self, token: str = "", env: Any = None, headers: Any = None, fails: bool = False) -> None:
        self.token, self.env, self.headers, self.fails = token, env, headers, fails
        if token == "refuse":
            raise ValueError(f"no session for {env}")

    def search(self, queries, k):
        logging.getLogger("absl").warning("asked with %s", self.token)
        if self.fails:
            raise ConnectionError(f"https://me:{self.token}@kb.example/x?api_key={self.token}: 401 ({self.token})")
        return [[Passage(id="1", title=f"for {self.token}", text=f"Accra. {self.headers}")] for _ in queries]


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_TOKEN", PLANTED)


def config(**spec: Any) -> schema.TrainConfig:
    text = schema.KnowledgeConfig(**{"kind": "tool", "source": TOOL, **spec})
    return schema.TrainConfig(model=schema.ModelConfig(path="somewhere"), knowledge={"text": text})


@pytest.mark.parametrize(
    ("door", "value"),
    [
        ("knowledge.text.settings.token", PLANTED),
        ("knowledge.text.settings.apiKey", PLANTED),
        ("knowledge.text.settings.env.SEARCH_KEY", PLANTED),
        ("knowledge.text.settings.headers.X-Api-Key", PLANTED),
        ("knowledge.text.settings.headers.Authorization", f"Bearer {PLANTED}"),
        ("knowledge.text.settings.server", f"npx tool --api-key={PLANTED}"),
        ("knowledge.text.settings.server", ["npx", "tool", FORMED]),
        ("knowledge.text.settings.server", "https://me:pl4nted@mcp.example/mcp"),
        ("knowledge.text.settings.whatever", FORMED),
        ("knowledge.text.source", "https://pl4nted@kb.example/x"),
        ("knowledge.text.source", "https://kb.example/x?access_token=pl4nted"),
        ("data.train", "https://data.example/x.jsonl?X-Amz-Signature=pl4nted"),
        ("model.path", "https://u:pl4nted@hub.example/m"),
        ("agent.settings.password", PLANTED),
        ("judge.api_key_env", FORMED),
        ("judge.base_url", "https://u:pl4nted@judge.example/v1"),
    ],
)
def test_what_looks_like_a_secret_is_refused_in_a_configuration(door: str, value: Any) -> None:
    changes: Any = value
    for name in reversed(door.split(".")):
        changes = {name: changes}
    as_mapping = as_json(config())
    for build in (
        lambda: override(config(), changes, "config"),
        lambda: from_config_dict(schema.TrainConfig, merged(as_mapping, changes)),
    ):
        with pytest.raises(ValueError, match="looks like a secret") as refused:
            build()
        message = str(refused.value)
        assert "config." in message
        assert door.rpartition(".")[2] in message
        assert "NAME" in message
        assert "pl4nted" not in message
        assert FORMED not in message


def merged(base: Any, changes: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return {**base, **{name: merged(base.get(name), change) for name, change in changes.items()}}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token", "$PLANTED_TOKEN"),
        ("headers.Authorization", "Bearer ${PLANTED_TOKEN}"),
        ("server", "https://me:$PLANTED_TOKEN@mcp.example/mcp?mode=graph"),
        ("query_key", "query"),
        ("pad_token", "<pad>"),
        ("token_file", "/run/secrets/token"),
        ("digest", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        ("model", "TheBloke/Llama-2-13B-Chat-GPTQ-8bit-128g-actorder"),
        ("place", "ssh://git@host.example/data"),
    ],
)
def test_names_of_variables_and_what_only_resembles_a_secret_are_fine(key: str, value: str) -> None:
    assert config(settings={key: value}).knowledge["text"].settings == {key: value}
    assert EndpointConfig(api_key_env="PLANTED_TOKEN").api_key_env == "PLANTED_TOKEN"


class Shown(Logger):
    """A logger that keeps the configuration that it was given."""

    def __init__(self, workdir, rows, config):
        (workdir / "logger.json").write_text(json.dumps(config))

    def write(self, step, scalars):
        pass

    def close(self):
        pass


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What a program of launch/ writes to its log."""
    lines = io.StringIO()
    handler = logging.StreamHandler(lines)
    mask_log(handler)
    logging.getLogger("absl").addHandler(handler)
    yield lines
    logging.getLogger("absl").removeHandler(handler)


@pytest.mark.parametrize("fails", [False, True], ids=["found", "failed"])
def test_a_secret_of_the_environment_reaches_the_tool_and_nothing_that_is_written(
    fails: bool, tmp_path: pathlib.Path, log: io.StringIO
) -> None:
    settings = {"token": "$PLANTED_TOKEN", "headers": {"Authorization": "Bearer ${PLANTED_TOKEN}"}, "fails": fails}
    given = config(settings=settings)
    check_knowledge(given.knowledge)
    tool = make_tool("text", given.knowledge["text"])
    assert (tool.token, tool.headers) == (PLANTED, {"Authorization": f"Bearer {PLANTED}"})  # type: ignore[attr-defined]
    tools = open_knowledge_bases(given.knowledge)
    said = [SEARCH.format("text"), ANSWER]
    (episode,) = run(
        AGENT, [Example(id="q", question="?", answers=("Accra",))], ScriptedEngine(lambda *at: said[at[2]]), tools
    )
    (tmp_path / "episodes.jsonl").write_text(json.dumps(episode_record(episode)))
    (tmp_path / "config.json").write_text(json.dumps(as_json(given)))
    MetricWriter(tmp_path, log=(f"{__name__}:Shown",), config=without_secrets(as_json(given))).close()
    (tmp_path / "card").mkdir()
    write_card(tmp_path / "card", tmp_path, given, name="x", sees=False)
    (tmp_path / "log").write_text(log.getvalue())
    written = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) >= 6
    assert not [path for path, text in written.items() if PLANTED in text or json.dumps(PLANTED)[1:-1] in text]
    assert "asked with ***" in written[tmp_path / "log"]
    call = episode.calls[0]
    assert "***" in (call.error or call.passages[0].title)
    assert "***" in episode.turns[0].observation
    assert load_config(tmp_path) == given


def test_errors_on_the_way_to_a_tool_name_the_setting_and_no_secret(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = config(settings={"token": "$NOT_THERE"}).knowledge["text"]
    with pytest.raises(ValueError, match=r"config\.knowledge\.text.*settings\.token: .*NOT_THERE is not set"):
        make_tool("text", spec)
    monkeypatch.setenv("REFUSE", "refuse")
    with pytest.raises(ValueError, match=r"no session for \*\*\*") as refused:
        make_tool("text", config(settings={"token": "$REFUSE", "env": "$PLANTED_TOKEN"}).knowledge["text"])
    assert PLANTED not in str(refused.value)
    (tmp_path / "token").write_text(f"{PLANTED}-from-a-file\n")
    monkeypatch.setenv("NOT_THERE_FILE", str(tmp_path / "token"))
    assert resolved(spec.settings, "settings") == {"token": f"{PLANTED}-from-a-file"}
    with pytest.raises(ValueError, match="looks like a key itself") as named:
        secret(FORMED)
    assert FORMED not in str(named.value)
    failing = config(settings={"token": "$PLANTED_TOKEN", "fails": True})
    with pytest.raises(ValueError, match="every search failed") as tried:
        try_sources(failing, open_knowledge_bases(failing.knowledge))
    assert PLANTED not in str(tried.value)


def test_a_run_that_was_begun_with_a_secret_is_named_and_its_secret_is_not_shown(tmp_path: pathlib.Path) -> None:
    old = merged(as_json(config()), {"knowledge": {"text": {"settings": {"token": PLANTED}}}})
    (tmp_path / "config.json").write_text(json.dumps(old))
    messages = []
    for use in (
        lambda: load_config(tmp_path),
        lambda: check_workdir(config(settings={"token": "$PLANTED_TOKEN"}), tmp_path, True),
    ):
        with pytest.raises(ValueError, match=r"config\.json") as refused:
            use()
        messages.append(str(refused.value))
    assert all("settings" in message and PLANTED not in message for message in messages)
    assert without_secrets(old)["knowledge"]["text"]["settings"] == {"token": "***"}


def test_texts_without_secrets_are_shown_as_they_are() -> None:
    text = "The search failed: 3 tokens; key=5; a token 'x' of the model; https://kb.example/x?k=3&mode=graph, u@host.example"
    assert masked(text) == text
    hidden = masked(
        f"Authorization: Bearer abcdefgh12; https://u:p@h/x?key=abc&k=5; {{'api_key': 'abc'}} --token abc {FORMED}"
    )
    assert hidden == "Authorization: Bearer ***; https://***@h/x?key=***&k=5; {'api_key': '***'} --token *** ***"
