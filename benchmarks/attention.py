"""Training attention, gradients included: ours in tiles beside jax.nn.dot_product_attention.

    python -m benchmarks.attention [--size 0.9M] [--repeats 5]

The same packed rows on both sides: 4,096 tokens, one segment a row, the heads of the policy of that size, float32.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

TOKENS, LENGTHS, CALLS = 4096, (256, 512, 2048), 10


def main() -> None:
    from benchmarks import peers
    from routerl_jax.models.attention import self_attention
    from routerl_jax.parallel.mesh import batch_sharding, make_mesh

    arguments = peers.arguments(__doc__)
    size = peers.SIZES[arguments.size]
    rows = batch_sharding(make_mesh())
    rng = np.random.default_rng(0)
    print(peers.hardware())
    print("| heads and rows | ours, tokens/s | jax.nn.dot_product_attention | ratio (range) |\n|---|---:|---:|---:|")
    for length in LENGTHS:
        batch = TOKENS // length
        heads = (size["heads"], size["kv_heads"], size["kv_heads"])
        shapes = [(batch, length, count, size["head_dim"]) for count in heads]
        inputs = [jax.device_put(rng.normal(size=shape).astype(np.float32), rows) for shape in shapes]
        inputs.append(jax.device_put(np.ones((batch, length), np.int32), rows))
        ours, theirs = (functools.partial(gradients, function, inputs) for function in (self_attention, _of_jax))
        times = peers.in_turn(ours, theirs, arguments.repeats)
        print(peers.row(f"{arguments.size}, rows of {length}", CALLS * TOKENS, *times))


def _of_jax(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(q, k, v, mask=same, is_causal=True)


def gradients(attention: Callable[..., jax.Array], inputs: Sequence[jax.Array]) -> None:
    """CALLS times the gradient of a sum of squares by q, k and v."""
    for _ in range(CALLS):
        jax.block_until_ready(_gradient(attention, *inputs))


@functools.partial(jax.jit, static_argnums=0)
def _gradient(attention: Callable[..., jax.Array], *inputs: jax.Array) -> tuple[jax.Array, ...]:
    return jax.grad(lambda *inputs: jnp.square(attention(*inputs)).sum(), argnums=(0, 1, 2))(*inputs)


if __name__ == "__main__":
    main()
