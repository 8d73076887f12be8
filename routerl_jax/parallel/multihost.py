"""What several processes need to stay in step: same program, same order, same values on every host."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")

_LEAST_PAYLOAD = 2**16  # bytes


def initialize() -> None:
    """Joins the job's other processes; call it before anything touches a device.

    On TPU pods, Slurm, Kubernetes and MPI, JAX finds them by itself; elsewhere it reads JAX_COORDINATOR_ADDRESS
    (host:port), JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Raises:
      ValueError: one of these three is set and another is not.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is None:
        jax.distributed.initialize()
        return
    missing = [name for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if name not in os.environ]
    if missing:
        raise ValueError(f"JAX_COORDINATOR_ADDRESS is set, but {missing[0]} is not; set both for every process")
    jax.distributed.initialize(
        coordinator_address=address,
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
        process_id=int(os.environ["JAX_PROCESS_ID"]),
    )


def is_main() -> bool:
    """True on the one process that writes files and prints."""
    return jax.process_index() == 0


def exchange(values: Any) -> list[Any]:
    """Gives every process the JSON-serialisable `values` of all processes, in process order (a collective call)."""
    if jax.process_count() == 1:
        return [values]
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(values).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray([data.size], np.int32))).reshape(-1)
    # Every size compiles a program of its own: powers of two, so that there are few.
    padded = np.zeros(max(_LEAST_PAYLOAD, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes().decode()) for row, size in zip(rows, sizes)]


def on_main(action: Callable[[], T]) -> T | None:
    """Does something on the main process alone; what it raises there is raised everywhere (a collective call).

    So processes don't wait in the next collective call for one that has given up.

    Returns:
      The action's result on the main process, None on the others.

    Raises:
      ValueError: the action raised one; other errors are a RuntimeError on the other processes.
    """
    result, error = None, None
    if is_main():
        try:
            result = action()
        except Exception as raised:
            error = raised
    said = exchange(None if error is None else [isinstance(error, ValueError), str(error) or repr(error)])[0]
    if error is not None:
        raise error
    if said is not None:
        raise ValueError(said[1]) if said[0] else RuntimeError(f"the main process failed: {said[1]}")
    return result


def barrier(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def to_host(value: Any) -> Any:
    """Brings a tree of arrays to numpy on this process; arrays sharded over processes are gathered (a collective)."""

    def one(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            from jax.experimental import multihost_utils

            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return np.asarray(leaf)

    return jax.tree.map(one, value)
