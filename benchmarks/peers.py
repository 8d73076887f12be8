"""Common parts of the benchmarks: a policy of one size with equal weights on both sides, medians, the printed table."""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.data.vocabulary import train_tokenizer
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.parallel.mesh import make_mesh, replicated
from routerl_jax.parallel.platform import split_cpu

SIZES = {
    "0.9M": {"embed": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp": 384},
    "8M": {"embed": 320, "layers": 6, "heads": 10, "kv_heads": 5, "head_dim": 32, "mlp": 1024},
    # SmolLM2-135M's layers under this vocabulary
    "107M": {"embed": 576, "layers": 30, "heads": 9, "kv_heads": 3, "head_dim": 64, "mlp": 1536},
}
VOCABULARY = 1024


def arguments(description: str | None) -> argparse.Namespace:
    """`--size` and `--repeats`; splits a CPU into two devices (or JAX_NUM_CPU_DEVICES), as the quickstart does."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.9M", choices=sorted(SIZES))
    parser.add_argument("--repeats", type=int, default=5)
    split_cpu(2)
    return parser.parse_args()


def policy(size: str) -> Decoder:
    """A random Llama policy on all devices."""
    config = DecoderConfig(
        model_type="llama", vocab_size=VOCABULARY, max_length=1024, tied_embeddings=True, **SIZES[size]
    )
    model = Decoder(config, jax.random.key(0))
    nnx.update(model, jax.device_put(nnx.state(model, nnx.Param), replicated(make_mesh())))
    model.tokenizer = tokenizer()
    return model


def torch_twin(model: Decoder) -> Any:
    """The same weights in transformers, float32, attention by torch's fused kernel."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        save_pretrained(model, directory)
        return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")


def sample(model: Any, batch: Any, tokens: int, mask: Any = None) -> Any:
    """transformers' generate: exactly so many tokens after each row of a batch [B, T], at temperature 1; [B, T + tokens].

    Args:
      mask: 0 on padding, which is at the rows' beginnings; default: there is none.
    """
    import torch

    return model.generate(
        batch,
        attention_mask=torch.ones_like(batch) if mask is None else mask,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=0,
    )


def in_turn(ours: Callable[[], Any], theirs: Callable[[], Any], repeats: int) -> tuple[list[float], list[float]]:
    """Seconds of each, A B A B ..., after one warm-up run of each: what slows the machine down slows both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        for function, times in zip((ours, theirs), seconds):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
    return seconds[0][1:], seconds[1][1:]


def row(name: str, tokens: int, ours: list[float], theirs: list[float]) -> str:
    """A table row: median tokens/s of both, median and range of the ratio pair by pair."""
    ratios = sorted(b / a for a, b in zip(ours, theirs))
    speeds = [tokens / statistics.median(times) for times in (ours, theirs)]
    return (
        f"| {name} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {statistics.median(ratios):.1f}x "
        f"({ratios[0]:.1f}-{ratios[-1]:.1f}) |"
    )


def hardware() -> str:
    """One line about the machine."""
    import torch
    import transformers

    return (
        f"{platform.machine()} CPU, {torch.get_num_threads()} cores, {len(jax.devices())} JAX devices; jax {jax.__version__}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}, float32"
    )


def tokenizer() -> Tokenizer:
    """A small one of no meaning."""
    return train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 3, 300, (), context=1024)
