"""Helpers that keep several processes in step: the same program, order and values on every host."""

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
    """Joins the other processes of the job. Call it before anything uses a device.

    On TPU pods, Slurm, Kubernetes and MPI, JAX finds them by itself. Elsewhere it reads JAX_COORDINATOR_ADDRESS (host:port),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID.

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
    """True on the main process, which is the only one that writes files and prints."""
    return jax.process_index() == 0


def exchange(values: Any) -> list[Any]:
    """Gives every process the JSON-serialisable `values` of all processes, in process order (a collective call)."""
    if jax.process_count() == 1:
        return [values]
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(values).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray([data.size], np.int32))).reshape(-1)
    # Every size is compiled separately, so sizes are powers of two.
    padded = np.zeros(max(_LEAST_PAYLOAD, 1 << (int(sizes.max()) - 1).bit_length()), np.uint8)
    padded[: data.size] = data
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(len(sizes), -1)
    return [json.loads(row[:size].tobytes().decode()) for row, size in zip(rows, sizes)]


def on_main(action: Callable[[], T]) -> T | None:
    """Runs an action on the main process only. An error there is raised on all processes (a collective call).

    So no process waits in the next collective call for one that has given up.

    Returns:
      The action's result on the main process, None on the others.

    Raises:
      ValueError: the action raised one. Other errors become a RuntimeError on the other processes.
    """
    result, error = None, None
    if is_main():
        try:
            result = action()
        except Exception as raised:
            error = raised
    failure = exchange(None if error is None else [isinstance(error, ValueError), str(error) or repr(error)])[0]
    if error is not None:
        raise error
    if failure is not None:
        raise ValueError(failure[1]) if failure[0] else RuntimeError(f"the main process failed: {failure[1]}")
    return result


def barrier(name: str) -> None:
    """Waits until every process has called this."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


def to_host(value: Any) -> Any:
    """A tree of arrays as NumPy arrays on this process. Arrays sharded over processes are gathered (a collective call)."""

    def gathered(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            from jax.experimental import multihost_utils

            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return np.asarray(leaf)

    return jax.tree.map(gathered, value)
