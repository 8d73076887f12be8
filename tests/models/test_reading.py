"""Checkpoints into sharded blocks: in whatever pieces, to the last bit, and without a second copy on the host."""

import pathlib
import tracemalloc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from routerl_jax.models import safetensors_files
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.families.llama import decoder_rules
from routerl_jax.models.family import FROM_HEADS, MATRIX, TO_HEADS, TRANSPOSED, Rule
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.models.safetensors_files import Checkpoint, TensorWriter, fill
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny
from tests.models.families import parameters

FUSED = ((0, 2, 3), (1,))  # ours [part, embed, heads, width], theirs [part * heads * width, embed]


def write(directory: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    with TensorWriter(directory / "model.safetensors", {n: (t.shape, t.dtype) for n, t in tensors.items()}) as writer:
        for tensor in tensors.values():
            writer.write(tensor)


@pytest.mark.parametrize(
    ("axes", "shape", "blocks"),
    [
        (MATRIX, (6, 4), [((0, 6), (0, 2)), ((0, 6), (2, 4))]),
        (TRANSPOSED, (6, 4), [((0, 3), (0, 4)), ((3, 6), (0, 4))]),
        (TRANSPOSED, (6, 4), [((0, 3), (2, 4))]),
        (TO_HEADS, (6, 4, 2), [((0, 6), (1, 2), (0, 2)), ((0, 6), (3, 4), (0, 2))]),
        (TO_HEADS, (6, 4, 2), [((0, 6), (0, 4), (1, 2))]),  # the width of heads is split
        (FROM_HEADS, (4, 2, 6), [((2, 4), (0, 2), (3, 6))]),
        (FROM_HEADS, (4, 2, 6), [((0, 4), (0, 1), (0, 6)), ((0, 4), (1, 2), (0, 6))]),
        (FUSED, (3, 6, 4, 2), [((0, 3), (0, 6), (2, 4), (0, 2)), ((0, 3), (3, 6), (0, 2), (0, 2))]),
        ((), (), [()]),
    ],
)
def test_a_block_of_a_tensor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, axes: Any, shape: Any, blocks: Any
) -> None:
    """Beside numpy's transposition of the whole, for windows and tiles of any size; no more is read than the blocks hold."""
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    rule = Rule("x", axes)
    write(tmp_path, {"x": rule.to_theirs(whole)})
    for window, tile in [(1, 1), (24, 2), (48, 3), (2**20, 256)]:
        monkeypatch.setattr(safetensors_files, "_WINDOW_BYTES", window)
        monkeypatch.setattr(safetensors_files, "_TILE_ROWS", tile)
        checkpoint = Checkpoint(tmp_path)
        found = [(bounds, np.full([b - a for a, b in bounds], np.nan, np.float32)) for bounds in blocks]
        checkpoint.read("x", rule, shape, found)
        for bounds, block in found:
            np.testing.assert_array_equal(block, whole[tuple(slice(*pair) for pair in bounds)])
        assert checkpoint.bytes_read == sum(block.nbytes for _, block in found)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A policy of 16 MB, of which the embedding is 4 MB."""
    directory = tmp_path_factory.mktemp("exported")
    changes = {
        "embed": 256,
        "mlp": 1024,
        "layers": 3,
        "heads": 8,
        "head_dim": 32,
        "qkv_bias": True,
        "output_bias": True,
    }
    model = nnx.eval_shape(lambda: Decoder(tiny.config(**changes, vocab_size=4096), jax.random.key(0)))
    rng = np.random.default_rng(0)
    shapes = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes))
    save_pretrained(model, directory)
    return directory


@pytest.mark.parametrize(("sizes", "layout"), [({"fsdp": 8}, "fsdp"), ({"fsdp": 2, "tensor": 4}, "fsdp+tensor")])
def test_the_pieces_do_not_matter(
    exported: pathlib.Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], layout: str
) -> None:
    """Few blocks on the host at a time, small windows of files: the same weights."""
    expected = load_pretrained(str(exported))
    for name, size in [("_HOST_BYTES", 200_000), ("_WINDOW_BYTES", 5000), ("_TILE_ROWS", 7)]:
        monkeypatch.setattr(safetensors_files, name, size)
    model = load_pretrained(str(exported), make_mesh(sizes), layout=layout)
    for path, value in parameters(model).items():  # type: ignore[arg-type]
        np.testing.assert_array_equal(value, parameters(expected)[path])  # type: ignore[arg-type]


def test_weights_are_on_the_host_once(exported: pathlib.Path) -> None:
    """As numpy counts its memory: the target arrays, which JAX takes over, and 1 MB of Python's own at most."""
    mesh = make_mesh({"fsdp": 8})
    load_pretrained(str(exported), mesh, layout="fsdp")  # what is kept from a first time is not the import's
    tracemalloc.start()
    try:
        model = load_pretrained(str(exported), mesh, layout="fsdp")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    blocks = [
        (shard.data.nbytes, shard.data.unsafe_buffer_pointer())
        for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))
        for shard in leaf.addressable_shards
    ]
    target = sum({pointer: size for size, pointer in blocks}.values())
    assert 15e6 < target < 16e6
    assert target <= peak < target + 1e6
    assert not any(pointer % 64 for _, pointer in blocks)


def test_an_export_holds_a_tensor_at_a_time(exported: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """At most two of 4 MB, in our layout and in theirs, of the model's 16 MB; and none afterwards."""
    model = load_pretrained(str(exported), make_mesh({"fsdp": 8}), layout="fsdp")
    save_pretrained(model, tmp_path / "first")  # type: ignore[arg-type]
    largest = max(value.nbytes for value in jax.tree.leaves(nnx.state(model, nnx.Param)) if value.ndim == 2)
    tracemalloc.start()
    try:
        save_pretrained(model, tmp_path / "second")  # type: ignore[arg-type]
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert largest < peak < 2 * largest + 1e6
    assert after < 1e6
    assert (tmp_path / "second" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_a_second_import_leaves_the_first_alone(exported: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Arrays lie in the memory that was read into: it must be nobody else's, also when weights are donated."""
    first = load_pretrained(str(exported), make_mesh({"data": 8}))
    before = {path: value.copy() for path, value in parameters(first).items()}  # type: ignore[arg-type]
    other = load_pretrained(str(exported), make_mesh({"data": 8}))
    params = nnx.state(other, nnx.Param)
    spoilt = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)(params)
    assert all((np.asarray(leaf) == -1).all() for leaf in jax.tree.leaves(spoilt))
    for path, value in parameters(first).items():  # type: ignore[arg-type]
        np.testing.assert_array_equal(value, before[path])
    on_disk = load_pretrained(str(exported))
    for path, value in parameters(on_disk).items():  # type: ignore[arg-type]
        np.testing.assert_array_equal(value, before[path])


def test_faults_are_found_before_anything_is_read(exported: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_reading(*_: Any) -> None:
        raise AssertionError("read")

    monkeypatch.setattr(Checkpoint, "read", no_reading)
    model = nnx.eval_shape(lambda: Decoder(tiny.config(layers=1), jax.random.key(0)))
    with pytest.raises(ValueError, match="does not fit the architecture"):
        fill(model, decoder_rules(model.config), Checkpoint(exported), make_mesh({"data": 8}), "replicated")
