"""A run that is resumed reads what it began with; files that changed behind their names are refused."""

import base64
import dataclasses
import io
import json
import logging
import pathlib
import shutil
from collections.abc import Callable

import PIL.Image
import pytest

from routerl_jax.models.pretrained import PACKAGED_MODELS
from routerl_jax.training import config as schema
from routerl_jax.training.checks import check_inputs, keep_inputs
from tests.data.trajectories import CAPITAL, write
from tests.training.small_run import make_config, make_sft_config


def begun(config: schema.TrainConfig, workdir: pathlib.Path) -> None:
    workdir.mkdir()
    (workdir / "config.json").write_text("{}")
    keep_inputs(config, workdir)
    check_inputs(config, workdir, resume=True)


def edit(old: str, new: str) -> Callable[[pathlib.Path], None]:
    def change(path: pathlib.Path) -> None:
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))

    return change


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    home = tmp_path_factory.mktemp("inputs") / "home"
    make_config(home)
    return home


@pytest.fixture
def home(made: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(made, tmp_path / "home"))


def run_config(home: pathlib.Path) -> schema.TrainConfig:
    """Knowledge bases in the cache, a model in a directory, and files of their own for validation and test."""
    model = home / "model"
    if not model.is_dir():
        shutil.copytree(PACKAGED_MODELS["atlas-warm-start"], model)
        for part in ("validation", "test"):
            shutil.copy(home / "questions.jsonl", home / f"{part}.jsonl")
    config = make_config(home, model=schema.ModelConfig(path=str(model)))
    knowledge = {name: dataclasses.replace(spec, directory="") for name, spec in config.knowledge.items()}
    files = {part: str(home / f"{part}.jsonl") for part in ("validation", "test")}
    data = dataclasses.replace(config.data, **files, train_range=(), validation_range=(), test_range=())
    return dataclasses.replace(config, knowledge=knowledge, data=data)


def swap_rows(path: pathlib.Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))


def drop_row(path: pathlib.Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def flip_weight(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096] ^= 1
    path.write_bytes(content)


CHANGES: dict[str, tuple[str, Callable[[pathlib.Path], object], str]] = {
    "a question more": ("questions.jsonl", lambda p: p.write_text(p.read_text() * 2), "config.data.train"),
    "a question fewer": ("questions.jsonl", drop_row, "config.data.train"),
    "questions in another order": ("questions.jsonl", swap_rows, "config.data.train"),
    "another answer": ("test.jsonl", edit('answers": ["', 'answers": ["not '), "config.data.test"),
    "another question": ("validation.jsonl", edit('question": "W', 'question": "w'), "config.data.validation"),
    "a corpus": ("text.jsonl", swap_rows, "config.knowledge.text"),
    "a tokenizer": ("model/tokenizer.json", lambda p: p.write_text(p.read_text() + "\n"), "config.model.path"),
    "weights": ("model/model.safetensors", flip_weight, "config.model.path"),
    "a file of the model less": ("model/generation_config.json", lambda p: p.unlink(), "config.model.path"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changed_behind_its_name_is_refused(
    home: pathlib.Path, tmp_path: pathlib.Path, change: str
) -> None:
    config, workdir = run_config(home), tmp_path / "run"
    name, alter, key = CHANGES[change]
    if not (home / name).exists():
        (home / name).write_text("{}")
    begun(config, workdir)
    alter(home / name)
    if change == "a question more":  # repeated ids are no questions
        lines = [json.loads(line) for line in (home / name).read_text().splitlines()]
        half = len(lines) // 2
        rows = lines[:half] + [row | {"id": f"again {row['id']}"} for row in lines[half:]]
        (home / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=f"{key}.*content is not what the run .* began with.*delete .*inputs.json"):
        check_inputs(config, workdir, resume=True)
    (workdir / "inputs.json").unlink()  # the way to accept it
    keep_inputs(config, workdir)
    check_inputs(config, workdir, resume=True)


def test_a_moved_time_or_another_setting_is_no_other_content(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config, workdir = run_config(home), tmp_path / "run"
    begun(config, workdir)
    for path in home.rglob("*"):
        path.touch()
    check_inputs(config, workdir, resume=True)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, test=str(home / "questions.jsonl")))
    check_inputs(other, workdir, resume=True)  # what may change is said elsewhere


def test_what_a_model_does_not_have_is_not_compared(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config, workdir = run_config(home), tmp_path / "run"
    begun(config, workdir)
    for name in (".DS_Store", ".gitattributes", "README.md", "curve.png"):
        (home / "model" / name).write_text("seen")
    check_inputs(config, workdir, resume=True)


def trained_on(questions: str) -> schema.TrainConfig:
    return schema.TrainConfig(
        kind="rl",
        model=schema.ModelConfig(path="atlas-warm-start"),
        knowledge={"text": schema.KnowledgeConfig()},
        data=schema.DataConfig(train=questions, validation="", test=""),
        stages={"one": schema.StageConfig(reward={"em": 1.0})},
    )


def test_pictures_are_compared_wherever_they_lie(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project that was moved has the same pictures; another one within the file of questions is another one."""

    def questions(project: pathlib.Path, colour: str) -> None:
        (project / "images").mkdir(parents=True, exist_ok=True)
        picture = io.BytesIO()
        PIL.Image.new("RGB", (64, 64), colour).save(picture, "BMP")
        (project / "images" / "a.bmp").write_bytes(picture.getvalue())
        uri = f"data:image/bmp;base64,{base64.b64encode(picture.getvalue()).decode()}"
        rows = [
            {"question": f"What is {i}?", "golden_answers": ["it"], "images": [x]} for i, x in ((1, "a.bmp"), (2, uri))
        ]
        (project / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    config = trained_on("questions.jsonl")
    for place, colour in (("here", "red"), ("there", "red"), ("elsewhere", "blue")):
        questions(tmp_path / place, colour)
    monkeypatch.chdir(tmp_path / "here")
    begun(config, tmp_path / "run")
    monkeypatch.chdir(tmp_path / "there")
    check_inputs(config, tmp_path / "run", resume=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"config\.data\.train.*questions\.jsonl: its content is not"):
        check_inputs(config, tmp_path / "run", resume=True)


def test_golden_steps_are_compared(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "steps.jsonl", CAPITAL)
    config = trained_on(f"trajectories:{path}")
    begun(config, tmp_path / "run")
    edit("capital of ghana? ", "capital of Ghana today? ")(path)
    with pytest.raises(ValueError, match=r"config\.data\.train.*steps\.jsonl: its content is not"):
        check_inputs(config, tmp_path / "run", resume=True)


def test_demonstrations_that_changed_are_refused(tmp_path: pathlib.Path) -> None:
    file, workdir = tmp_path / "episodes.jsonl", tmp_path / "run"
    file.write_text('{"id": "a"}\n')
    config = make_sft_config(warm_start=schema.WarmStartConfig(demonstrations=str(file), vocabulary=400))
    begun(config, workdir)
    file.write_text('{"id": "b"}\n')
    with pytest.raises(ValueError, match=r"config\.warm_start\.demonstrations=.*episodes\.jsonl: its content is not"):
        check_inputs(config, workdir, resume=True)


def test_a_run_of_an_earlier_version_goes_on_with_a_line(
    home: pathlib.Path, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with caplog.at_level(logging.WARNING):
        check_inputs(run_config(home), tmp_path, resume=True)
    assert "inputs.json is not there" in caplog.text
