"""Meshes over eight devices: sizes, the free axis, and errors that say what does not add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from routerl_jax.parallel.devices import compiled_programs
from routerl_jax.parallel.mesh import (
    AXES,
    batch_sharding,
    batch_shards,
    make_mesh,
    replicated,
    single_device_mesh,
)


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        (None, (8, 1, 1)),
        ({}, (8, 1, 1)),
        ({"data": -1}, (8, 1, 1)),
        ({"fsdp": 8}, (1, 8, 1)),
        ({"fsdp": -1, "tensor": 2}, (1, 4, 2)),
        ({"tensor": -1, "fsdp": 8}, (1, 8, 1)),
        ({"tensor": 4, "data": 2}, (2, 1, 4)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
    ],
)
def test_sizes(sizes: dict[str, int] | None, shape: tuple[int, ...]) -> None:
    mesh = make_mesh(sizes)
    assert mesh.axis_names == AXES
    assert mesh.devices.shape == shape
    assert {device.id for device in mesh.devices.flat} == set(range(8))
    assert batch_shards(mesh) == shape[0] * shape[1]


def test_some_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh({"fsdp": 2, "tensor": -1}, jax.devices()[2:6])
    assert mesh.devices.shape == (1, 2, 2)
    assert {device.id for device in mesh.devices.flat} == {2, 3, 4, 5}
    assert single_device_mesh().devices.item() == jax.devices()[0]
    assert single_device_mesh(jax.devices()[3]).devices.item() == jax.devices()[3]
    local = jax.devices()[4:]  # as the second of two processes sees it
    monkeypatch.setattr(jax, "local_devices", lambda: local)
    assert single_device_mesh().devices.item() == local[0]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"model": 8}, r"^unknown mesh axis 'model'; axes are data, fsdp, tensor$"),
        ({"data": -1, "fsdp": -1}, r"at most one axis may be -1$"),
        ({"data": -1, "fsdp": 3}, r"fsdp.* 3.*: 8 devices are not divisible by 3$"),
        ({"data": 4}, r"'data': 4.* needs 4 devices, but there are 8$"),
        ({"data": 4, "tensor": 4}, r"needs 16 devices, but there are 8$"),
        ({"data": -1, "fsdp": 16}, r"8 devices are not divisible by 16$"),
        ({"data": 0}, r"'data': 0.* must be positive, or -1"),
        ({"data": -1, "fsdp": 0}, r"'fsdp': 0.* must be positive, or -1"),
        ({"data": -2, "fsdp": -4}, r"'data': -2.* must be positive, or -1"),
    ],
)
def test_errors(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_mesh(sizes)


def test_batches_are_split_and_the_rest_is_whole() -> None:
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    values = np.arange(8 * 12 * 3).reshape(8, 12, 3)
    rows = jax.device_put(values, batch_sharding(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 12, 3)}
    columns = jax.device_put(values, batch_sharding(mesh, axis=1))
    assert {shard.data.shape for shard in columns.addressable_shards} == {(8, 3, 3)}
    whole = jax.device_put(values, replicated(mesh))
    assert [shard.data.shape for shard in whole.addressable_shards] == [values.shape] * 8
    for array in (rows, columns, whole):
        np.testing.assert_array_equal(array, values)


def test_compiled_programs() -> None:
    first, second = jax.jit(lambda x: x + 1), jax.jit(lambda x: x * 2)
    assert compiled_programs(first, second) == 0
    for size in (1, 2, 2, 1):
        first(jnp.zeros(size))
    second(jnp.zeros(3))
    assert (compiled_programs(first), compiled_programs(first, second)) == (2, 3)
