"""One of two processes that import a checkpoint, export it, and fail to export it: python -m tests.models.two_processes.

    DIRECTORY [the checkpoint] WORK [to write to]

Prints one JSON line: what this process read, whether its blocks are right, and what the refused exports said.
"""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np
from flax import nnx

from routerl_jax.models import huggingface, safetensors_files
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import make_mesh


def bytes_read(directory: str, sizes: dict[str, int]) -> tuple[Any, int]:
    """The model over all devices, and what this process read for it."""
    seen: list[safetensors_files.Checkpoint] = []
    fill = safetensors_files.fill

    def spy(model: Any, rules: Any, checkpoint: safetensors_files.Checkpoint, *rest: Any) -> None:
        seen.append(checkpoint)
        fill(model, rules, checkpoint, *rest)

    huggingface.fill = spy
    try:
        model = load_pretrained(directory, make_mesh(sizes), layout="fsdp")
    finally:
        huggingface.fill = fill
    return model, seen[-1].bytes_read


def blocks_are_right(directory: str, model: Any) -> bool:
    """Compares each block here with the one process's import of the whole."""
    whole = dict(nnx.to_flat_state(nnx.state(load_pretrained(directory), nnx.Param)))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        expected = np.asarray(whole[path].get_value())
        for shard in variable.get_value().addressable_shards:
            if not np.array_equal(np.asarray(shard.data), expected[shard.index]):
                return False
    return True


def refused(model: Any, directory: pathlib.Path) -> str:
    """How an export there fails."""
    try:
        save_pretrained(model, directory)
    except (ValueError, RuntimeError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return "it did not"


def full(*_: Any) -> None:
    raise OSError("no space left on device")


def main() -> None:
    directory, work = sys.argv[1], pathlib.Path(sys.argv[2])
    multihost.initialize()
    result: dict[str, Any] = {}
    model, result["halves"] = bytes_read(directory, {"fsdp": 4})
    result["right"] = blocks_are_right(directory, model)
    _, result["replicas"] = bytes_read(directory, {"data": 2, "fsdp": 2})
    save_pretrained(model, work / "export")
    result["foreign"] = refused(model, work / "foreign")
    if multihost.is_main():
        safetensors_files.TensorWriter.write = full
    result["full"] = refused(model, work / "full")
    print(json.dumps(result), flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
