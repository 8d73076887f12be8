"""Where metrics go besides metrics.jsonl: event files as TensorBoard reads them, W&B's own files, without a network."""

import builtins
import json
import math
import pathlib
import re
import struct
import time
import types
from typing import Any

import jax
import pytest

from routerl_jax.models.lora import LoraConfig, apply_lora
from routerl_jax.training import config as schema
from routerl_jax.training.loggers import LOGGERS, Logger, MetricWriter, check_log, read_metrics, require_log
from routerl_jax.training.rl import train_rl
from routerl_jax.training.run import parameter_overview
from tests import tiny
from tests.training.test_rl import make_run

MODEL = schema.ModelConfig(path="atlas-warm-start")
KNOWLEDGE = {"text": schema.KnowledgeConfig()}


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if it were not installed."""
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.split(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {package!r}")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)


class Kept(Logger):
    """A logger from elsewhere, named by its dotted path."""

    def __init__(self, workdir, rows, config):
        self.given = [dict(row) for row in rows]
        seen.append(self)

    def write(self, step, scalars):
        self.given.append({"step": step, **scalars})

    def close(self):
        self.given.append("closed")  # type: ignore[arg-type]


seen: list[Kept] = []


def test_a_logger_of_one_s_own_gets_numbers_and_what_was_there(tmp_path: pathlib.Path) -> None:
    names = (f"{__name__}:Kept",)
    check_log(names)
    require_log(names)
    for start in (0, 1):
        writer = MetricWriter(tmp_path, start, log=names)
        writer.write(start, {"a": 1.0 + start, "b": math.nan, "name": "x"})
        writer.write(start + 1, {"a": 9.0})
        writer.close()
    first, second = (logger.given for logger in seen[-2:])
    assert first == [{"step": 0, "a": 1.0}, {"step": 1, "a": 9.0}, "closed"]
    assert second == [
        {"step": 0, "a": 1.0, "b": None, "name": "x"},
        {"step": 1, "a": 2.0},
        {"step": 2, "a": 9.0},
        "closed",
    ]


def test_names_are_checked_with_the_configuration() -> None:
    with pytest.raises(ValueError, match=r"config\.log: unknown logger 'tensorbord'; did you mean 'tensorboard'"):
        schema.TrainConfig(model=MODEL, knowledge=KNOWLEDGE, log=("tensorbord",))
    with pytest.raises(ValueError, match=r"config\.log=.* names 'wandb' twice"):
        schema.TrainConfig(model=MODEL, knowledge=KNOWLEDGE, log=("wandb", "wandb"))
    assert set(LOGGERS) == {"tensorboard", "wandb"}


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "metrax"), ("wandb", "wandb")])
def test_a_missing_package_is_refused_at_the_start(
    name: str, package: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = schema.TrainConfig(model=schema.ModelConfig(path="/nowhere"), knowledge=KNOWLEDGE, log=(name,))
    without(monkeypatch, package)
    with pytest.raises(ValueError, match=rf"config\.log: '{name}' needs .*{package}.* -e \"/.*\[{name}\]\""):
        train_rl(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def tensorboard(workdir: pathlib.Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows, by its own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(workdir / "tensorboard"))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_shows_what_metrics_jsonl_holds(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("metrax")
    writer = MetricWriter(tmp_path, log=("tensorboard",))
    for step in range(5):
        writer.write(step, {"actor/loss": 0.5 * step, "rollout/em": None, "odd": float("inf")})
    writer.close()
    assert tensorboard(tmp_path) == {"actor/loss": [(step, 0.5 * step) for step in range(5)]}
    (tmp_path / "tensorboard" / "profile.txt").write_text("mine")
    writer = MetricWriter(tmp_path, 3, log=("tensorboard",))  # killed, and back to step 3
    writer.write(3, {"actor/loss": 7.0})
    writer.close()
    assert tensorboard(tmp_path) == {"actor/loss": [(0, 0.0), (1, 0.5), (2, 1.0), (3, 7.0)]}
    assert (tmp_path / "tensorboard" / "profile.txt").exists()


def test_wandb_without_a_network(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sessions are one run, with the run's name, settings and numbers."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    require_log(("wandb",))
    workdir = tmp_path / "my-run"
    workdir.mkdir()
    for start in (0, 2):
        writer = MetricWriter(workdir, start, log=("wandb",), config={"seed": 41, "agent": {"k": 2}})
        for step in range(start, start + 2):
            writer.write(step, {"actor/loss": 10.0 + step, "rollout/em": None})
        writer.close()
        time.sleep(1.1)  # its directories are named by the second
    name = (workdir / "wandb_id").read_text()
    files = sorted((workdir / "wandb").glob(f"offline-run-*-{name}/run-{name}.wandb"))
    assert len(files) == 2
    for start, file in zip((0, 2), files):
        records = wandb_records(file)
        (run,) = [record.run for record in records if record.HasField("run")]
        assert (run.run_id, run.project, run.display_name) == (name, "routerl_jax", "my-run")
        assert {item.key: item.value_json for item in run.config.update}["seed"] == "41"
        rows = [record.history for record in records if record.HasField("history")]
        found = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]
        expected = [{"_step": step, "actor/loss": 10.0 + step} for step in (start, start + 1)]
        assert [{key: row[key] for key in ("_step", "actor/loss")} for row in found] == expected
        assert all("rollout/em" not in row for row in found)


def wandb_records(path: pathlib.Path) -> list[Any]:
    """The records of a file of W&B's: 7 bytes, then blocks of 32 KiB (LevelDB's log format) with parts of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, position, whole, records = path.read_bytes(), 7, b"", []
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        size, kind = struct.unpack("<HB", content[position + 4 : position + 7])
        whole += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(whole))
            whole = b""
    return records


def test_all_at_once(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """metrics.jsonl, TensorBoard and Weights & Biases have the same numbers at the same steps."""
    pytest.importorskip("metrax")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    expected = [(step, 0.5 * step) for step in range(3)]
    writer = MetricWriter(tmp_path, log=("tensorboard", "wandb"))
    for step, value in expected:
        writer.write(step, {"actor/loss": value})
    writer.close()
    assert [(row["step"], row["actor/loss"]) for row in read_metrics(tmp_path)] == expected
    assert tensorboard(tmp_path) == {"actor/loss": expected}
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    deadline = time.monotonic() + 60  # its own process writes, which a busy machine keeps waiting
    while (
        not (rows := [r.history for r in wandb_records(file) if r.HasField("history")]) and time.monotonic() < deadline
    ):
        time.sleep(0.5)
    found = [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]
    assert [(row["_step"], row["actor/loss"]) for row in found] == expected


def test_wandb_without_a_login_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "login", lambda **_: False)
    monkeypatch.setattr(wandb, "setup", lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode="online")))
    with pytest.raises(ValueError, match=r"'wandb' is not logged in. Run `wandb login`.*WANDB_MODE=offline"):
        require_log(("wandb",))


def test_trouble_with_wandb_ends_no_run(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wandb = pytest.importorskip("wandb")

    class Down:
        def log(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("service went away")

        finish = log

    monkeypatch.setattr(wandb, "init", lambda **_: Down())
    writer = MetricWriter(tmp_path, log=("wandb",))
    writer.write(0, {"a": 1.0})
    writer.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 0, "a": 1.0}
    assert "Weights & Biases: ConnectionError: service went away" in caplog.text


def test_the_overview_of_parameters_counts_them() -> None:
    model = tiny.model()
    text = parameter_overview(model)
    total = sum(math.prod(map(int, re.findall(r"\d+", shape))) for shape in re.findall(r"\| (\([\d, ]+\)) ", text))
    assert f"Total: {total:,} -- {4 * total:,} bytes\nTrained: {total:,} of {total:,}" in text
    assert "embedding" in text


def test_a_run_leaves_the_overview(tmp_path: pathlib.Path) -> None:
    _, _, run_, _ = make_run(tmp_path, "given", schema.LearnerConfig(length_buckets=(128,)))
    assert (tmp_path / "parameters.txt").read_text() == parameter_overview(run_.policy())


@pytest.mark.parametrize("qtype", ["", "int4", "nf4"])
def test_the_overview_says_what_is_trained(qtype: str) -> None:
    """Of an adapter of rank 2 on q and up, two layers: 2 (32 + 32) + 2 (32 + 64) numbers each."""
    model = tiny.model()
    lora = LoraConfig(rank=2, modules="q|up", base_qtype=qtype, tile_size=8 if qtype else 64)
    apply_lora(model, lora.build(), jax.random.key(0))
    assert f"Trained: {2 * (2 * 64 + 2 * 96)} of " in parameter_overview(model)
    text = parameter_overview(tiny.model(), ("embedding",))
    assert f"Trained: {int(re.findall('Total: ([0-9,]+)', text)[0].replace(',', '')) - 320 * 32:,} of " in text
