"""Mixture of experts: in place of one feed-forward, a router sends each token to a few of many (Qwen3-MoE, arXiv 2505.09388).

    p = softmax(router x), in float32;   S = the `chosen` largest p;   w_e = p_e, or p_e / sum_S p if `normalized`
    y = sum over e in S of w_e * down_e(silu(gate_e x) * up_e x)

No token is dropped and no expert has a capacity. Tokens are sorted by expert, and each matrix of all experts is one grouped
product (`jax.lax.ragged_dot`). On TPUs its cost follows the tokens; XLA for CPUs computes every expert for every token.

Dimensions: B rows, T time, D residual stream, L sparse layers, E experts, C chosen experts of a token, F channels of an expert,
A = B * T * C assignments of tokens to experts.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from routerl_jax.core.types import FREE
from routerl_jax.models.config import ExpertsConfig
from routerl_jax.models.layers import Initializer
from routerl_jax.parallel.mesh import BATCH_AXES, batch_shards

# Tokens of a device up to which all experts are computed for all of them. A chip of v5p multiplies 166 tokens with a matrix in
# the time in which it reads the matrix, one of v5e 240.
_FEW_TOKENS = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """Statistics of the routers of one layer, or of L sparse layers on a first axis (of `chosen`: on the third).

    Attributes:
      chosen: the experts of each token.
      load: counted tokens of each expert.
      mass: router probabilities of each expert, summed over counted tokens; differentiable.
      entropy: of the router's distribution in nats, summed over counted tokens.
      tokens: how many tokens are counted.
    """

    chosen: Int[Array, "B T *L C"]
    load: Float[Array, "*L E"]
    mass: Float[Array, "*L E"]
    entropy: Float[Array, "*L"]
    tokens: Float[Array, "*L"]


class Experts(nnx.Module):
    """The experts of all sparse layers. `__call__` runs the layer whose parameters it currently holds."""

    def __init__(self, config: ExpertsConfig, layers: int, embed: int, init: Initializer) -> None:
        self.config = config
        wide, axes = (layers, config.count, embed, config.mlp), ("layers", "experts", "embed", "mlp")
        self.router = init.normal((layers, embed, config.count), ("layers", "embed", None))
        self.gate = init.normal(wide, axes)
        self.up = init.normal(wide, axes)
        self.down = init.normal((layers, config.count, config.mlp, embed), ("layers", "experts", "mlp", "embed"))

    def __call__(
        self,
        x_BTD: Float[Array, "B T D"],
        dtype: jnp.dtype,
        *,
        replayed: Int[Array, "B T C"] | None = None,
        counted: Bool[Array, "B T"] | None = None,
        mesh: Mesh | None = None,
    ) -> tuple[Float[Array, "B T D"], Routing]:
        """The feed-forward's output, and the statistics of its router.

        Args:
          replayed: experts to take; their weights are this router's, so its gradient flows (rollout routing replay, arXiv
            2510.11370). Where they are `core.types.FREE`, the router chooses.
          counted: tokens that count in the sums of `Routing`; default: all.
          mesh: the program's devices; None: one, or the partitioner's choice.
        """
        config = self.config
        logits = jnp.einsum("BTD,DE->BTE", x_BTD, self.router[...].astype(dtype), preferred_element_type=jnp.float32)
        probabilities = jax.nn.softmax(logits, axis=-1)
        chosen = jax.lax.top_k(probabilities, config.chosen)[1]
        if replayed is not None:
            chosen = jnp.where(replayed == FREE, chosen, replayed.astype(chosen.dtype))
        weights = jnp.take_along_axis(probabilities, chosen, axis=-1)
        if config.normalized:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        matrices = tuple(matrix[...].astype(dtype) for matrix in (self.gate, self.up, self.down))
        y = _on_mesh(x_BTD, chosen, weights, matrices, mesh)
        counts = (jnp.ones(x_BTD.shape[:2]) if counted is None else counted).astype(jnp.float32)
        routing = Routing(
            chosen=chosen,
            load=jnp.zeros(config.count).at[chosen].add(counts[..., None]),
            mass=jnp.einsum("BTE,BT->E", probabilities, counts),
            entropy=-(probabilities * jax.nn.log_softmax(logits, axis=-1)).sum(axis=-1).ravel() @ counts.ravel(),
            tokens=counts.sum(),
        )
        return y, routing


def balance_loss(routing: Routing) -> Float[Array, ""]:
    """The load-balancing loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6) as transformers computes it.

    E * sum_e f_e P_e, over the tokens of all sparse layers together: f_e is the share of tokens that have expert e among
    their C (so the sum of f is C), and P_e the mean probability of e. Uniform routing gives C.
    """
    tokens = jnp.maximum(routing.tokens.sum(), 1.0)
    load, mass = (x.reshape(-1, x.shape[-1]).sum(0) / tokens for x in (routing.load, routing.mass))
    return load.shape[0] * (jax.lax.stop_gradient(load) * mass).sum()


def own_share(config: ExpertsConfig | None, mesh: Mesh) -> float:
    """The share of the choices of its tokens that a device computes, if every expert is as likely as any."""
    devices = mesh.shape["tensor"]
    return 1 / devices if config is not None and config.count % devices == 0 else 1.0


def _on_mesh(x: Array, chosen: Array, weights: Array, matrices: tuple[Array, ...], mesh: Mesh | None) -> Array:
    """`_compute` with rows split over the batch axes, and experts (their channels, if they can't be divided) over `tensor`.

    Every device computes its own experts for its own rows, and the results are summed over `tensor`. As in a dense layer, the
    devices along `tensor` have the same tokens, so no token is sent to its expert.
    """
    if mesh is None or mesh.size == 1:
        return _compute(x, chosen, weights, *matrices, first=0)
    devices, (count, _, channels) = mesh.shape["tensor"], matrices[0].shape
    rows = PartitionSpec(BATCH_AXES if x.shape[0] % batch_shards(mesh) == 0 else None)
    by_expert = count % devices == 0
    split = "tensor" if devices > 1 and (by_expert or channels % devices == 0) else None
    up_spec = PartitionSpec(split) if by_expert else PartitionSpec(None, None, split)
    down_spec = PartitionSpec(split) if by_expert else PartitionSpec(None, split, None)

    def on_shard(x: Array, chosen: Array, weights: Array, *matrices: Array) -> Array:
        first = jax.lax.axis_index("tensor") * matrices[0].shape[0] if split and by_expert else 0
        y = _compute(x, chosen, weights, *matrices, first=first)
        return jax.lax.psum(y, "tensor") if split else y

    run = jax.shard_map(
        on_shard,
        mesh=mesh,
        in_specs=(rows, rows, rows, up_spec, up_spec, down_spec),
        out_specs=rows,
        check_vma=False,
    )
    return run(x, chosen, weights, *matrices)


def _compute(
    x_BTD: Array, chosen: Array, weights: Array, gate: Array, up: Array, down: Array, *, first: Array | int
) -> Array:
    """The sum over the experts that these matrices hold, from number `first` on."""
    local_experts, per_token = gate.shape[0], chosen.shape[-1]
    own = chosen.reshape(-1) - first
    own = jnp.where((own >= 0) & (own < local_experts), own, local_experts)  # experts elsewhere come last, in no group
    if len(own) <= _FEW_TOKENS * per_token:
        return _all_held(x_BTD, own.reshape(-1, per_token), weights, gate, up, down)
    order = jnp.argsort(own, stable=True)
    sizes = jnp.zeros(local_experts, jnp.int32).at[own].add(1, mode="drop")
    product = functools.partial(jax.lax.ragged_dot, group_sizes=sizes)
    # What a kernel leaves in rows of no group is undefined, of its output and of its gradients. The first selection lets only
    # the gradient of others through; its two operands are the same, so that the forward pass has none.
    rows = x_BTD.reshape(-1, x_BTD.shape[-1])[order // per_token]
    rows = jnp.where((own[order] < local_experts)[:, None], rows, jax.lax.stop_gradient(rows))
    out = product(jax.nn.silu(product(rows, gate)) * product(rows, up), down)
    inverse_order = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype), unique_indices=True)
    out_MCD = jnp.where((own < local_experts)[:, None], out[inverse_order], 0).reshape(-1, per_token, out.shape[-1])
    mixed = jnp.einsum(
        "MCD,MC->MD",
        out_MCD,
        weights.reshape(-1, per_token).astype(out.dtype),
        preferred_element_type=jnp.float32,
    )
    return mixed.reshape(x_BTD.shape).astype(x_BTD.dtype)


def _all_held(x_BTD: Array, own_MC: Array, weights: Array, gate: Array, up: Array, down: Array) -> Array:
    """Every expert for every token, with weight 0 where the token did not choose it.

    So few tokens take no more time than the matrices need to be read. They are read where they lie in the stack of all layers;
    a grouped product would have them copied out first.
    """
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    token = jnp.arange(len(own_MC))[:, None]
    share_ME = jnp.zeros((len(own_MC), gate.shape[0])).at[token, own_MC].add(weights.reshape(own_MC.shape), mode="drop")
    hidden = jax.nn.silu(jnp.einsum("MD,EDF->MEF", x_MD, gate)) * jnp.einsum("MD,EDF->MEF", x_MD, up)
    weighted = (hidden * share_ME[..., None]).astype(x_MD.dtype)
    mixed = jnp.einsum("MEF,EFD->MD", weighted, down, preferred_element_type=jnp.float32)
    return mixed.reshape(x_BTD.shape).astype(x_BTD.dtype)
