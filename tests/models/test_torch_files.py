"""Pickled weights against what torch saved: every dtype and layout; what else a pickle may hold is refused, not run."""

from __future__ import annotations

import json
import pathlib
import pickle
import zipfile

import numpy as np
import pytest
import torch
import transformers

from routerl_jax.models.conversion import as_safetensors, read_state
from routerl_jax.models.huggingface import load_pretrained
from tests.models.families import parameters, randomize

CONFIG = transformers.BertConfig(
    vocab_size=31, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
)


@pytest.fixture(autouse=True)
def cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_tensors_of_all_kinds(tmp_path: pathlib.Path) -> None:
    """Shared storages, views with strides and offsets, scalars, empty tensors, parameters, dictionaries in dictionaries."""
    base = torch.arange(60, dtype=torch.float32).reshape(5, 12)
    state = {
        "base": base,
        "part": base[1:4, 2:11:3],
        "turned": base.T,
        "parameter": torch.nn.Parameter(torch.randn(3, 2)),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(7).half(),
        "bfloat": torch.randn(3, 3).bfloat16(),
        "ids": torch.arange(4),
        "flags": torch.tensor([True, False]),
        "model": {"inner": {"x": torch.ones(2)}},
        "epoch": 3,
        "name": "run",
    }
    torch.save(state, tmp_path / "a.pth")
    found = read_state(tmp_path / "a.pth")
    assert found.keys() == (state.keys() - {"epoch", "name", "model"}) | {"model.inner.x"}
    for name, value in found.items():
        expected = state["model"]["inner"]["x"] if name == "model.inner.x" else state[name]
        np.testing.assert_array_equal(value.astype(np.float32), expected.detach().float().numpy(), err_msg=name)
        assert str(value.dtype) == str(expected.dtype).removeprefix("torch.")


@pytest.mark.parametrize("sharded", [False, True])
def test_a_model_that_is_there_as_a_pickle(tmp_path: pathlib.Path, cache: pathlib.Path, sharded: bool) -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(CONFIG).eval()
    randomize(model)
    model.save_pretrained(tmp_path / "safe")
    model.config.save_pretrained(tmp_path / "pickled")
    state = model.state_dict()
    if sharded:
        names = [f"pytorch_model-{i + 1}-of-2.bin" for i in range(2)]
        where = {key: names[i % 2] for i, key in enumerate(state)}
        for name in names:
            torch.save({key: state[key] for key in state if where[key] == name}, tmp_path / "pickled" / name)
        index = {"metadata": {}, "weight_map": where}
        (tmp_path / "pickled" / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    else:
        torch.save(state, tmp_path / "pickled" / "pytorch_model.bin")
    expected = parameters(load_pretrained(str(tmp_path / "safe")))
    for _ in range(2):  # converted, then found
        found = parameters(load_pretrained(str(tmp_path / "pickled")))
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value)
    assert len(list(cache.rglob("*.safetensors"))) == 1
    assert as_safetensors(tmp_path / "safe") == tmp_path / "safe"


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("1 / 0",)


class Options(dict):
    """As configurations are pickled beside weights: a class of some library."""


def test_what_is_no_tensor_is_neither_run_nor_made(tmp_path: pathlib.Path) -> None:
    beside = {"evil": Evil(), "options": Options(x=[1, Evil()]), "path": tmp_path, "set": {1}, "range": range(3)}
    torch.save({"a": torch.ones(3)} | beside, tmp_path / "a.pth")
    assert read_state(tmp_path / "a.pth").keys() == {"a"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: torch.save(Evil(), path), "holds no tensors by name"),
        (lambda path: torch.save({"epoch": 3}, path), "holds no tensors by name"),
        (lambda path: torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=False), "not a zip file"),
        (lambda path: path.write_bytes(pickle.dumps({"a": 1})), "not a zip file"),
        (lambda path: _cut(path), "not a zip file"),
        (lambda path: _shortened(path), "reaches beyond storage 0"),
    ],
)
def test_files_that_are_refused(tmp_path: pathlib.Path, make: object, message: str) -> None:
    path = tmp_path / "pytorch_model.bin"
    make(path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=rf"^{path}.*{message}"):
        read_state(path)


def test_an_index_without_its_files(tmp_path: pathlib.Path) -> None:
    """As an interrupted download leaves it."""
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "pytorch_model-1-of-2.bin"}}))
    with pytest.raises(
        ValueError, match=r"pytorch_model-1-of-2\.bin missing, which pytorch_model\.bin\.index\.json names"
    ):
        as_safetensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(ValueError, match="weight_map is missing"):
        as_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin, .*pytorch_model\.bin\.index\.json; delete"):
        as_safetensors(tmp_path)


def _cut(path: pathlib.Path) -> None:
    torch.save({"a": torch.ones(300)}, path)
    path.write_bytes(path.read_bytes()[:900])


def _shortened(path: pathlib.Path) -> None:
    """A whole archive whose storage holds less than its tensor needs."""
    torch.save({"a": torch.ones(300)}, path.with_suffix(".old"))
    with zipfile.ZipFile(path.with_suffix(".old")) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            content = old.read(info)
            new.writestr(info.filename, content[:40] if info.filename.endswith("data/0") else content)
