r"""Reads a checkpoint of Qwen2.5-7B's shape onto 8 virtual CPU devices, and prints the memory and the time that it took.

    python -m benchmarks.import_7b [--depth 28] [--layout fsdp] [--directory DIR] [--keep]

A synthetic checkpoint in bfloat16 (15 GB, in shards of 5 GB with an index) is written to DIR tensor by tensor and deleted in
the end. A process of its own imports it; its resident memory is sampled every 20 ms, files mapped into it apart from memory
of its own. What the import adds to the target arrays should be no more than one tensor: the embedding, 1.09 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import ml_dtypes
import numpy as np

DEVICES, SHARD_BYTES = 8, 5 * 10**9
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def config(depth: int) -> dict[str, object]:
    """config.json of Qwen2.5-7B with that many layers."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": depth,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def shapes(depth: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the checkpoint, in the order of the published one."""
    embed, mlp, kv, vocab = 3584, 18944, 512, 152064
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, embed)}
    for i in range(depth):
        layer = f"model.layers.{i}."
        result |= {
            layer + "self_attn.q_proj.weight": (embed, embed),
            layer + "self_attn.q_proj.bias": (embed,),
            layer + "self_attn.k_proj.weight": (kv, embed),
            layer + "self_attn.k_proj.bias": (kv,),
            layer + "self_attn.v_proj.weight": (kv, embed),
            layer + "self_attn.v_proj.bias": (kv,),
            layer + "self_attn.o_proj.weight": (embed, embed),
            layer + "mlp.gate_proj.weight": (mlp, embed),
            layer + "mlp.up_proj.weight": (mlp, embed),
            layer + "mlp.down_proj.weight": (embed, mlp),
            layer + "input_layernorm.weight": (embed,),
            layer + "post_attention_layernorm.weight": (embed,),
        }
    return result | {"model.norm.weight": (embed,), "lm_head.weight": (vocab, embed)}


def probe(number: int, size: int) -> np.ndarray:
    """The first values of a tensor, different for each; all others are zero."""
    return (np.arange(min(size, 64)) + number % 100).astype(BFLOAT16)


def write(directory: pathlib.Path, depth: int) -> None:
    """Writes the checkpoint. Its files are not sparse, so that reading them reads the disk."""
    from routerl_jax.models.safetensors_files import TensorWriter

    (directory / "config.json").write_text(json.dumps(config(depth)))
    shards: list[dict[str, tuple[tuple[int, ...], np.dtype]]] = [{}]
    held = 0
    for name, shape in shapes(depth).items():
        size = int(np.prod(shape)) * BFLOAT16.itemsize
        if held + size > SHARD_BYTES:
            shards.append({})
            held = 0
        shards[-1][name] = (shape, BFLOAT16)
        held += size
    weight_map, number = {}, 0
    for i, tensors in enumerate(shards):
        file = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        with TensorWriter(directory / file, tensors) as writer:
            for name, (shape, _) in tensors.items():
                tensor = np.zeros(shape, BFLOAT16)
                start = probe(number, tensor.size)
                tensor.reshape(-1)[: start.size] = start
                writer.write(tensor)
                weight_map[name] = file
                number += 1
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


class Sampler(threading.Thread):
    """Peaks of this process's resident memory in bytes: of its own (`RssAnon`) and of mapped files (`RssFile`)."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks = {"RssAnon": 0, "RssFile": 0}
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.02):
            for line in pathlib.Path("/proc/self/status").read_text().splitlines():
                key, _, value = line.partition(":")
                if key in self.peaks:
                    self.peaks[key] = max(self.peaks[key], int(value.split()[0]) * 1024)


def import_here(directory: pathlib.Path, layout: str, depth: int) -> None:
    """Imports the checkpoint in this process and prints what it took, as JSON."""
    import jax
    from flax import nnx

    from routerl_jax.models.huggingface import load_pretrained
    from routerl_jax.parallel.mesh import make_mesh

    mesh = make_mesh({"tensor": DEVICES} if layout == "tensor" else {"fsdp": DEVICES})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sampler = Sampler()
    sampler.start()
    start = time.perf_counter()
    model = load_pretrained(str(directory), mesh, "bfloat16", layout=layout)
    leaves = jax.block_until_ready(jax.tree.leaves(nnx.state(model, nnx.Param)))
    seconds = time.perf_counter() - start
    sampler.stopped.set()
    blocks = {(id(leaf), str(shard.index)): shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards}
    print(
        json.dumps(
            {
                "before": before,
                "target": sum(blocks.values()),
                "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                **sampler.peaks,
                "seconds": seconds,
            }
        )
    )
    numbers = {name: i for i, name in enumerate(shapes(depth))}
    last = f"model.layers.{depth - 1}.mlp.down_proj.weight"  # theirs [embed, mlp], ours [layers, mlp, embed]
    for name, values in {
        "model.embed_tokens.weight": first_block(model.embedding)[0, :64],
        "lm_head.weight": first_block(model.head)[:64, 0],
        last: first_block(model.blocks.down)[-1, :64, 0],
    }.items():
        np.testing.assert_array_equal(values, probe(numbers[name], 64), err_msg=name)


def first_block(parameter: Any) -> np.ndarray:
    """The first device's block. (Indexing the whole array would gather it on every device.)"""
    return np.asarray(parameter[...].addressable_shards[0].data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=28, help="layers; the published model has 28")
    parser.add_argument("--layout", default="fsdp", help="of parallel.sharding.LAYOUTS")
    parser.add_argument(
        "--directory", type=pathlib.Path, help="where there is room for 15 GB; default: a temporary one"
    )
    parser.add_argument("--keep", action="store_true", help="don't delete the checkpoint; a kept one is used again")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        import_here(arguments.directory, arguments.layout, arguments.depth)
        return
    directory = arguments.directory or pathlib.Path(tempfile.mkdtemp())
    directory.mkdir(parents=True, exist_ok=True)
    try:
        if not (directory / "model.safetensors.index.json").is_file():
            write(directory, arguments.depth)
        options = ["--here", f"--directory={directory}", f"--layout={arguments.layout}", f"--depth={arguments.depth}"]
        completed = subprocess.run(
            [sys.executable, "-m", "benchmarks.import_7b", *options],
            env=child_environment(),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    finally:
        if not arguments.keep:
            shutil.rmtree(directory)
    report(json.loads(completed.stdout), arguments.depth, arguments.layout)


def child_environment() -> dict[str, str]:
    """A CPU split into devices, whatever this process has."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}


def report(measured: dict[str, float], depth: int, layout: str) -> None:
    """One row."""
    gb = {key: value / 1e9 for key, value in measured.items() if key != "seconds"}
    largest = max(int(np.prod(shape)) for shape in shapes(depth).values()) * BFLOAT16.itemsize / 1e9
    print("| layers, layout | target | peak RSS | beyond target and start | largest tensor | RssAnon, RssFile | time |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    print(
        f"| {depth}, {layout} | {gb['target']:.2f} GB | {gb['peak']:.2f} GB "
        f"| {gb['peak'] - gb['before'] - gb['target']:.2f} GB | {largest:.2f} GB | {gb['RssAnon']:.2f}, {gb['RssFile']:.2f} GB "
        f"| {measured['seconds']:.0f} s, {measured['target'] / 1e6 / measured['seconds']:.0f} MB/s |"
    )


if __name__ == "__main__":
    main()
