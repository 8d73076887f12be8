"""What programs say of their configurations: --help, --show, docs/configuration.md."""

import importlib
import pathlib
import re

import pytest

from launch import configuration
from routerl_jax.core.config import sections
from routerl_jax.training.config import TrainConfig
from tests.programs import ROOT, fine, launch, launch_here, refusal

PROGRAMS = (
    "train",
    "evaluate",
    "build_kb",
    "serve_kb",
    "construct_data",
    "ask",
    "chat",
    "select_data",
    "compile_check",
)


def test_the_page_is_what_the_source_says() -> None:
    assert configuration.PAGE.read_text() == configuration.page(), "run `python -m launch.configuration`"


def test_every_program_with_a_configuration_is_here() -> None:
    files = (ROOT / "launch").glob("*.py")
    assert {file.stem for file in files if "DEFINE_config_file(" in file.read_text()} == set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_lists_every_field_with_its_comment(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_here(program, "--help") == 0
    printed = capsys.readouterr().out
    lines, shown = printed.splitlines(), " ".join(printed.split())
    for schema in importlib.import_module(f"launch.{program}").schemas().values():
        for section in sections(schema):
            for field in section.fields:
                assert field.description, f"{section.schema.__name__}.{field.name} has no comment in the source"
                assert any(line.startswith(f"  {section.path}.{field.name} = ") for line in lines)
                assert " ".join(field.description.split()) in shown


def test_help_in_a_python_of_its_own() -> None:
    """As users see it: no width of a terminal, no colours."""
    printed = fine(launch("train", "-h"))
    assert printed.startswith("Trains a policy, by reinforcement learning or on demonstrations")
    assert "  config.learner.loss.clip_low = 0.2  float >= 0\n      the ratio counts down to 1 - this\n" in printed
    assert "config.warm_start.optimizer: as config.learner.optimizer, but\n" in printed
    assert "  --config: Configuration file" in printed
    assert "\x1b" not in printed


def test_show_marks_what_differs_and_starts_nothing(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("routerl_jax.training.rl.train_rl", lambda *_, **__: pytest.fail("it has begun to train"))
    given = ["--config=configs/quickstart.py", f"--workdir={tmp_path / 'run'}", "--config.learner.loss.clip_high=0.31"]
    assert launch_here("train", *given, "--show") is None
    assert not list(tmp_path.iterdir())
    lines = capsys.readouterr().out.splitlines()
    assert "* config.learner.loss.clip_high = 0.31  (default: 0.2)" in lines
    assert "* config.knowledge.text  (default: not there)" in lines
    assert "  config.learner.loss.clip_low = 0.2" in lines
    marked = [line for line in lines[:-1] if line.startswith("* ")]
    assert lines[-1] == f"* {len(marked)} of {len(lines) - 1} settings differ from the defaults"
    assert all("(default: " in line for line in marked)
    assert not any("(default: " in line for line in lines if not line.startswith("* "))
    keys = set(re.findall(r"^[* ] (\S+)", "\n".join(lines[:-1]), re.MULTILINE))
    assert {f"config.model.{field.name}" for field in sections(TrainConfig)[1].fields} <= keys


def test_sources_are_named_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """And none of them is the example's."""
    given = ("train", "--config=configs/sources.py:own", "--show")
    assert launch_here(*given, "--config.knowledge.notes.source=a.jsonl", "--config.data.train=q.jsonl") is None
    shown = capsys.readouterr().out
    assert "* config.knowledge.notes.source = 'a.jsonl'" in shown
    assert "config.knowledge.table" not in shown
    assert "config.knowledge is empty: name at least one" in refusal(*given)


def test_show_needs_no_workdir_and_training_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_here("train", "--config=configs/quickstart.py", "--show") is None
    assert "config.seed = 0" in capsys.readouterr().out
    assert "give --workdir, the directory of the run; or --show" in refusal("train", "--config=configs/quickstart.py")
    message = refusal("train", "--config=configs/quickstart.py", "--show", "--config.steps=-1")
    assert message == "launch.train: config.steps=-1 must not be negative"
