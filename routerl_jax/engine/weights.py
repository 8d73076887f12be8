"""The engine's weights: the learner's own arrays, or a copy in a layout and dtype that suit decoding."""

from __future__ import annotations

from typing import Any, cast

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from routerl_jax.models.decoder import Decoder, for_programs
from routerl_jax.models.lora import quantized
from routerl_jax.parallel.mesh import single_device_mesh
from routerl_jax.parallel.sharding import shardings


class WeightCopier:
    """Makes the engine's weights from the learner's with one jitted program, or passes them on if they fit already.

    Decoding reads every weight for each token. With a layout that shards weights over `fsdp`, every step would gather all of
    them. With float32 weights for computations in bfloat16, it would read twice the bytes of bfloat16, and with int8 half.

    Args:
      model: the learner's, or its shapes; only its structure is kept.
      mesh: the engine's devices: the same as the learner's, or none of them.
      layout: one of parallel.sharding.LAYOUTS; empty: the learner's weights are used unchanged.
      dtype: dtype of the copy's parameters.
      qtype: quantises the blocks' matrices of the copy (models.lora.quantized); empty: nothing is quantised.

    Attributes:
      graph: the structure of the engine's model.

    Raises:
      ValueError: a type without a layout.
    """

    def __init__(self, model: Decoder, mesh: Mesh, layout: str, dtype: Any, qtype: str = "") -> None:
        if qtype and not layout:
            raise ValueError(
                f"weight_qtype={qtype!r} is of a copy of the weights, and without a layout there is none: give layout"
            )
        self._mesh, self._layout, self._dtype, self._qtype = mesh, layout, jax.numpy.dtype(dtype), qtype
        self._learnt, params = nnx.split(for_programs(model))
        self.graph = self._learnt
        if qtype:
            self.graph = nnx.graphdef(nnx.eval_shape(lambda p: quantized(nnx.merge(self._learnt, p), qtype), params))
        self._copy: Any = None

    def __call__(self, params: nnx.State) -> nnx.State:
        """The engine's weights; the same arrays if their layout and dtype fit."""
        if self._fits(params):
            return params
        if self._copy is None:
            target = self.abstract(params)
            if _same_devices(params, target):
                self._copy = self._jit_copy(target)
            else:  # one program converts them where they are; then they are sent
                convert = self._jit_copy(_at_current_shardings(params, target))
                placements = jax.tree.map(lambda want: want.sharding, target)
                self._copy = lambda weights: jax.device_put(convert(weights), placements)
        return self._copy(params)

    def lower(self, params: nnx.State) -> jax.stages.Lowered | None:
        """The program, lowered for arrays or shapes with shardings; None where the learner's weights are taken as they are.

        It runs on the learner's devices, also if its results are then sent to others.
        """
        if self._fits(params):
            return None
        target = self.abstract(params)
        program_target = target if _same_devices(params, target) else _at_current_shardings(params, target)
        return self._jit_copy(program_target).lower(params)

    def abstract(self, params: nnx.State) -> nnx.State:
        """Shapes, dtypes and shardings of the copy of `params` (values or abstract ones)."""

        def copy_shape(variable: nnx.Variable, sharding: nnx.Variable) -> nnx.Variable:
            value = variable.get_value()
            learnt = isinstance(variable, nnx.Param) and jax.numpy.issubdtype(value.dtype, jax.numpy.floating)
            dtype = self._dtype if learnt else value.dtype
            return variable.replace(jax.ShapeDtypeStruct(value.shape, dtype, sharding=sharding.get_value()))

        shapes = jax.eval_shape(self._quantized, params) if self._qtype else params
        placed = shardings(shapes, self._mesh, self._layout)
        return jax.tree.map(copy_shape, shapes, placed, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))

    def _quantized(self, params: nnx.State) -> nnx.State:
        return nnx.state(quantized(nnx.merge(self._learnt, params), self._qtype)) if self._qtype else params

    def _fits(self, params: nnx.State) -> bool:
        """Whether the engine can use the learner's weights as they are."""
        if self._qtype or not self._layout:
            return not self._layout
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(self.abstract(params)), strict=True)
        return all(
            leaf.dtype == want.dtype and leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
            for leaf, want in pairs
        )

    def _jit_copy(self, target: nnx.State) -> Any:
        dtypes = [want.dtype for want in jax.tree.leaves(target)]

        def copy(params: nnx.State) -> nnx.State:
            leaves, tree = jax.tree.flatten(self._quantized(params))
            return tree.unflatten([leaf.astype(dtype) for leaf, dtype in zip(leaves, dtypes)])

        return jax.jit(copy, out_shardings=jax.tree.map(lambda want: want.sharding, target))


def _same_devices(params: nnx.State, target: nnx.State) -> bool:
    """Whether arrays lie on the devices of their targets, so that a program can re-lay them."""
    devices = jax.tree.leaves(target)[0].sharding.device_set
    return all(leaf.sharding.device_set == devices for leaf in jax.tree.leaves(params))


def _at_current_shardings(params: nnx.State, target: nnx.State) -> nnx.State:
    """The dtypes of `target` with the shardings of `params`; scales that `params` lacks are on all of its devices."""
    current = {path: leaf.get_value().sharding for path, leaf in nnx.to_flat_state(params)}
    sharding = next(iter(current.values()))
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    placed = []
    for path, variable in nnx.to_flat_state(target):
        want = variable.get_value()
        shape = jax.ShapeDtypeStruct(want.shape, want.dtype, sharding=current.get(path, replicated))
        placed.append((path, variable.replace(shape)))
    return nnx.from_flat_state(placed)


def mesh_of(model: Decoder) -> Mesh:
    """The mesh on which the weights were placed; one device if there is none."""
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        if isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
            return cast(Mesh, leaf.sharding.mesh)
    return single_device_mesh()
