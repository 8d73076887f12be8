"""safetensors files: written tensor by tensor, read by windows, refused when anything of them is missing."""

import json
import pathlib

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from absl import logging

from routerl_jax.models.safetensors_files import DTYPES, Checkpoint, TensorWriter, tensors_of


def values(seed: int = 0) -> dict[str, np.ndarray]:
    """One of each type, of 0 to 3 axes, of sizes that leave the next one unaligned."""
    rng = np.random.default_rng(seed)
    return {
        "scale": np.asarray(rng.normal(), np.float64),
        "half": rng.normal(size=3).astype(np.float16),
        "brain": rng.normal(size=(5, 3)).astype(ml_dtypes.bfloat16),
        "single": rng.normal(size=(4, 1, 3)).astype(np.float32),
        "none": np.zeros((0, 3), np.float32),
        "ü": rng.normal(size=7).astype(np.float32),
    }


def write(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> pathlib.Path:
    with TensorWriter(path, {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}) as writer:
        for tensor in tensors.values():
            writer.write(tensor)
    return path


def test_the_library_reads_what_is_written(tmp_path: pathlib.Path) -> None:
    """Every bit, also in PyTorch, whose loaders want the format in the metadata."""
    expected = values()
    path = write(tmp_path / "x.safetensors", expected)
    found = safetensors.numpy.load_file(path)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tobytes() == tensor.tobytes()
    brain = safetensors.torch.load_file(path)["brain"]
    assert brain.dtype == torch.bfloat16
    np.testing.assert_array_equal(brain.float().numpy(), expected["brain"].astype(np.float32))
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_windows_of_what_the_library_wrote(tmp_path: pathlib.Path) -> None:
    expected = {name: tensor for name, tensor in values().items() if tensor.ndim and tensor.size}
    safetensors.numpy.save_file(expected, tmp_path / "x.safetensors", metadata={"a": "b"})
    found = {stored.name: stored for stored in tensors_of(tmp_path / "x.safetensors")}
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert DTYPES[found[name].dtype] == tensor.dtype
        assert found[name].shape == tensor.shape
        for start in range(len(tensor)):
            window = found[name].rows(start, len(tensor))
            assert window.tobytes() == tensor[start:].tobytes()
            assert not window.flags.writeable


def test_a_tensor_of_another_shape_or_type_is_not_written(tmp_path: pathlib.Path) -> None:
    for tensor in (np.zeros(3, np.float32), np.zeros(2, np.float16)):
        writer = TensorWriter(tmp_path / "x.safetensors", {"x": ((2,), np.dtype(np.float32))})
        with pytest.raises(AssertionError):
            writer.write(tensor)


def test_a_file_cut_short_at_any_byte(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path / "model.safetensors", values())
    content = path.read_bytes()
    Checkpoint(tmp_path)
    for size in range(len(content)):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=rf"^{path} is damaged or not a safetensors file: "):
            Checkpoint(tmp_path)
    path.write_bytes(content + b"x")
    with pytest.raises(ValueError, match=rf"^{path} is damaged"):
        Checkpoint(tmp_path)


def test_a_header_with_any_byte_changed(tmp_path: pathlib.Path) -> None:
    """It is refused, or describes other tensors than before within the file; nothing else comes of it."""
    path = write(tmp_path / "model.safetensors", values())
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for at in range(header):
        for flip in (1, 2, 128):
            path.write_bytes(content[:at] + bytes([content[at] ^ flip]) + content[at + 1 :])
            try:
                for stored in tensors_of(path):
                    if stored.shape and 0 not in stored.shape and stored.dtype in DTYPES:
                        assert stored.rows(0, stored.shape[0]).shape == stored.shape
            except ValueError:
                refused += 1
    assert refused > header  # most of the three changes of each byte


def shards(directory: pathlib.Path, places: dict[str, str], files: dict[str, list[str]]) -> None:
    """An index that says `places`, and files that hold those tensors."""
    for file, names in files.items():
        write(directory / file, {name: np.ones(2, np.float32) for name in names})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_what_the_index_says(tmp_path: pathlib.Path) -> None:
    a, b = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    shards(tmp_path, {"x": a, "y": b}, {a: ["x"], b: ["y", "z"]})
    found = Checkpoint(tmp_path)
    assert {"x", "y", "z"} == {name for name in "wxyz" if name in found}  # z is in a file of the model: it counts
    for places, files, message in [
        ({"x": a, "y": b}, {a: ["x"], b: ["y", "x"]}, rf"^{tmp_path}/{b} holds x, which {a} holds too; delete one"),
        ({"x": a, "y": b, "z": b}, {a: ["x"], b: ["y"]}, rf"^{tmp_path}/{b} lacks z, which model\.safetensors\.index"),
        ({"x": a, "y": "gone.safetensors"}, {a: ["x"]}, rf"^{tmp_path}/gone\.safetensors is missing; expected weights"),
        (
            {"x": a, "y": "../y.safetensors"},
            {a: ["x"]},
            r"weight_map names '\.\./y\.safetensors'; files must lie beside",
        ),
        ({"x": 3}, {}, r"model\.safetensors\.index\.json: weight_map is missing, or not a mapping of tensors to files"),
    ]:
        shards(tmp_path, places, files)
        with pytest.raises(ValueError, match=message):
            Checkpoint(tmp_path)
    for text in ("[]", '{"weight_map": ["x"]}', "{}"):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"index\.json: weight_map is missing"):
            Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": ')
    with pytest.raises(ValueError, match=r"index\.json is not JSON"):
        Checkpoint(tmp_path)


def test_two_sets_of_weights_are_refused_and_others_are_named(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, index = "model-00001-of-00001.safetensors", tmp_path / "model.safetensors.index.json"
    shards(tmp_path, {"x": a}, {a: ["x"]})
    write(tmp_path / "model.safetensors", {"x": np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{a}.*delete"):
        Checkpoint(tmp_path)
    (tmp_path / a).unlink()  # a stale index alone disagrees as well
    with pytest.raises(ValueError, match=rf"model\.safetensors.*{a}.*delete"):
        Checkpoint(tmp_path)
    index.write_text('{"weight_map": {"x": "model.safetensors"}}')  # one set, named twice
    lines: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    assert "x" in Checkpoint(tmp_path)
    assert not lines
    index.unlink()
    for name in ("consolidated.safetensors", "pytorch_model.bin", "model.Q4_0.gguf", "training_args.bin"):
        (tmp_path / name).write_bytes(b"")
    assert "x" in Checkpoint(tmp_path)
    assert lines == [
        f"{tmp_path}: weights are read from model.safetensors; not from consolidated.safetensors, model.Q4_0.gguf, "
        f"pytorch_model.bin"
    ]
    (tmp_path / "model.safetensors").rename(tmp_path / a)
    with pytest.raises(ValueError, match=rf"{index} is missing.*{a}"):
        Checkpoint(tmp_path)
