"""What several processes need to stay in step: same program, same order, same values on every host."""

from __future__ import annotations

import json
import os
from typing import Any

import jax
import numpy as np

_LEAST_PAYLOAD = 2**16  # bytes


def initialize() -> None:
    """Joins the job's other processes; call it before anything touches a device.

    On TPU pods, Slurm, Kubernetes and MPI, JAX finds them by itself; elsewhere it reads JAX_COORDINATOR_ADDRESS
    (host:port), JAX_NUM_PROCESSES and JAX_PROCESS_ID.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is None:
        jax.distributed.initialize()
        return
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
