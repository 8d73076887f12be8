"""Several pages in one packed row of a vision tower: time of full attention, memory of the whole tower.

    python -m benchmarks.tower [--repeats 5]

Attention of one head of 32, float32, beside `jax.nn.dot_product_attention` over all patches with a mask; then the tower of
Qwen2.5-VL-3B (remat="full", float32) by the compiler's memory analysis on a CPU, weights and their gradients not counted.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

PAGES, TOKENS = (1, 2, 4, 8), 512
_PATCHES = 4 * TOKENS  # of a page
_WIDTH = 32


def main() -> None:
    from benchmarks import peers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(peers.hardware())
    speeds = "| pages | ours, tokens/s | all with all (jax.nn.dot_product_attention), tokens/s | ratio (range) |"
    print(f"{speeds}\n|---:|---:|---:|---:|")
    for pages in PAGES:
        print(peers.row(str(pages), TOKENS * pages, *peers.in_turn(*attentions(pages), repeats)), flush=True)
    print("\n| pages | image tokens | inputs, MiB | forward, MiB | with gradients, MiB |\n|---:|---:|---:|---:|---:|")
    for pages in PAGES:
        numbers = (pages, TOKENS * pages, *memory(pages))
        print("| " + " | ".join(f"{number:,}" for number in numbers) + " |", flush=True)


def attentions(pages: int) -> tuple[functools.partial[Any], functools.partial[Any]]:
    """Attention to the same page, ours and JAX's."""
    from routerl_jax.models.vision_language import full_attention

    patches, rng = _PATCHES * pages, np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, patches, 1, _WIDTH)), jnp.float32) for _ in range(3))
    owners = jnp.asarray(np.repeat(np.arange(1, pages + 1), _PATCHES)[None], jnp.int32)

    def of_jax(q: jax.Array, k: jax.Array, v: jax.Array, owners: jax.Array) -> jax.Array:
        same = owners[:, None, :, None] == owners[:, None, None, :]
        return jax.nn.dot_product_attention(q, k, v, mask=same)

    ours, theirs = jax.jit(full_attention), jax.jit(of_jax)
    np.testing.assert_allclose(ours(q, k, v, owners), theirs(q, k, v, owners), atol=1e-4)

    def run(function: Any) -> None:
        jax.block_until_ready(function(q, k, v, owners))

    return functools.partial(run, ours), functools.partial(run, theirs)


def memory(pages: int) -> tuple[int, int, int]:
    """MiB of the inputs, and of the compiled tower's temporaries: forward, and with gradients."""
    from routerl_jax.models.attention import Attention
    from routerl_jax.models.config import VisionConfig
    from routerl_jax.models.patches import VisionInputs
    from routerl_jax.models.vision_language import VisionTower

    config = VisionConfig(
        model_type="qwen2_5_vl",
        depth=32,
        embed=1280,
        heads=16,
        mlp=3420,
        out=2048,
        patch=14,
        window=112,
        full_layers=(7, 15, 23, 31),
    )
    patches = _PATCHES * pages
    graph, weights = nnx.split(nnx.eval_shape(lambda: VisionTower(config, jax.random.key(0))))
    inputs = VisionInputs(
        patches=jax.ShapeDtypeStruct((1, patches, config.patch_dim), jnp.float32),
        positions=jax.ShapeDtypeStruct((1, patches, 2), jnp.int32),
        segments=jax.ShapeDtypeStruct((1, patches), jnp.int32),
        slots=jax.ShapeDtypeStruct((1, patches // 4), jnp.int32),
    )

    def forward(weights: Any, inputs: Any) -> jax.Array:
        return nnx.merge(graph, weights)(inputs, remat="full", attention=Attention())

    def gradients(weights: Any, inputs: Any) -> Any:
        return jax.grad(lambda weights: jnp.square(forward(weights, inputs)).sum())(weights)

    size = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(inputs))
    compiled = (jax.jit(function).lower(weights, inputs).compile() for function in (forward, gradients))
    return round(size / 2**20), *(round(program.memory_analysis().temp_size_in_bytes / 2**20) for program in compiled)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
