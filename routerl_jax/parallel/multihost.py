"""Helpers that keep several processes in step: the same program, order and values on every host. When one is lost, the others
say which, and end (`_Peers`)."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import itertools
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np

T = TypeVar("T")

PEER_TIMEOUT = 60.0  # seconds without a sign of life after which a process of the job is lost
_LEAST_PAYLOAD = 2**16  # bytes
_BEATS = 10  # signs of life in that time
_FAILED = 3  # beats that a process may be silent when a collective call has failed
_KEY = "routerl_jax/alive"
# XLA's statuses that a lost connection has; JAX raises some of them as ValueErrors
_FAILURE = re.compile("UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION")


def initialize(peer_timeout: float = PEER_TIMEOUT, how_to_go_on: Callable[[], str] | None = None) -> None:
    """Joins the other processes of the job. Call it before anything uses a device.

    On TPU pods, Slurm, Kubernetes and MPI, JAX finds them by itself. Elsewhere it reads JAX_COORDINATOR_ADDRESS (host:port),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID.

    Args:
      peer_timeout: seconds without a sign of life after which another process is lost. This one then says so, and ends.
      how_to_go_on: gives the last sentences of what it says.

    Raises:
      ValueError: one of these three is set and another is not.
    """
    global _peers
    # JAX, too, ends a process when another one is silent, but with dumps of all threads: it must wait longer
    limits: dict[str, Any] = {"heartbeat_timeout_seconds": int(2 * peer_timeout) + 10}
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is None:
        jax.distributed.initialize(**limits)
    else:
        missing = [name for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID") if name not in os.environ]
        if missing:
            raise ValueError(f"JAX_COORDINATOR_ADDRESS is set, but {missing[0]} is not; set both for every process")
        jax.distributed.initialize(
            coordinator_address=address,
            num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
            process_id=int(os.environ["JAX_PROCESS_ID"]),
            **limits,
        )
    _peers = _Peers(peer_timeout, how_to_go_on or (lambda: "Start all processes again, to resume"))


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


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process (a collective call)."""
    if jax.process_count() == 1:
        return flag
    from jax.experimental import multihost_utils

    return bool(np.asarray(multihost_utils.process_allgather(np.asarray([flag], np.int32))).any())


# --- lost processes ----------------------------------------------------------------------------------------------------


def at_step(step: int) -> None:
    """Says in this process's signs of life at which step it is."""
    if _peers is not None:
        _peers.step = step


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Around a job: if a call fails on the devices, it is waited for whether this is because a process is lost."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if _peers is not None and _FAILURE.match(str(error)):
            _peers.wait()
        raise


class _Peers:
    """Signs of life of a job's processes, in the store of JAX's coordinator, which process 0 runs.

    One thread writes and reads them. Its calls hang while process 0 is stopped, so another thread judges.
    """

    def __init__(self, timeout: float, how_to_go_on: Callable[[], str]) -> None:
        from jax._src.distributed import global_state as job  # JAX has no public name for the store

        self.step: int | None = None
        self._client: Any = job.client
        self._timeout, self._beat, self._how_to_go_on = timeout, timeout / _BEATS, how_to_go_on
        self._failed = threading.Event()
        self._me = job.process_id
        self._signs: dict[int, str] = {}  # the last ones, by process
        self._heard = {other: time.monotonic() for other in range(job.num_processes) if other != self._me}
        if not self._heard:
            return
        for work in (self._exchange, self._judge):
            threading.Thread(target=work, name="signs of life", daemon=True).start()
        if self._me:
            host, _, port = str(job.coordinator_address).rpartition(":")
            self._coordinator = host.strip("[]"), int(port)
            # JAX aborts as soon as it loses the connection to process 0, on a thread of its own: no handler of Python would run
            self._on_abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)
            ctypes.CDLL(None).signal(signal.SIGABRT, self._on_abort)

    def wait(self) -> None:
        """Waits, after a failure, until a lost process must have been noticed. It does not return if there is one."""
        self._failed.set()
        time.sleep((_FAILED + 2) * self._beat if self._heard else 0)

    def _aborted(self, _: int) -> None:
        """Runs in the place of an abort. It returns, and the process is aborted, if process 0 still listens."""
        try:
            socket.create_connection(self._coordinator, 2.0).close()
        except OSError:
            self._end(0)
        faulthandler.dump_traceback()

    def _exchange(self) -> None:
        name = f"process {self._me} (host {socket.gethostname()}, process id {os.getpid()})"
        for count in itertools.count():
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # process 0 does not answer
                sign = json.dumps([count, self.step, name])
                self._client.key_value_set(f"{_KEY}/{self._me}", sign, allow_overwrite=True)
                signs = {int(key.rsplit("/", 1)[1]): sign for key, sign in self._client.key_value_dir_get(_KEY)}
                new = {process for process, sign in signs.items() if sign != self._signs.get(process)}
                self._signs = signs
                self._heard |= dict.fromkeys(new - {self._me}, time.monotonic())
            time.sleep(self._beat)

    def _judge(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(self._beat / 4)
            now = time.monotonic()
            if now - last > self._beat:  # this process itself was stopped
                self._heard = dict.fromkeys(self._heard, now)
            last, limit = now, _FAILED * self._beat if self._failed.is_set() else self._timeout
            if silent := [process for process, heard in self._heard.items() if now - heard > limit]:
                self._end(min(silent), limit)  # of process 0 if that is silent: it brings the signs of all

    def _end(self, lost: int, seconds: float | None = None) -> None:
        """Says which process is lost, and ends this one. `seconds`: since its last sign of life; None: its connection broke."""
        _, step, name = json.loads(self._signs.get(lost, f'[0, null, "process {lost}"]'))
        place = "before its first step" if step is None else f"at step {step}"
        ended = "closed its connection"
        if seconds is not None:
            ended = f"given no sign of life for {seconds:.0f} s (config.mesh.peer_timeout={self._timeout:g})"
        text = (
            f"\n{name} is lost: it was {place}, and has {ended}. Process {self._me} ends, too. {self._how_to_go_on()}\n"
        )
        os.write(2, text.encode())
        sys.stdout.flush()
        if self._me == 0:
            time.sleep(2 * self._beat)  # the others say so, too, before JAX ends them because process 0 is gone
        os._exit(1)


_peers: _Peers | None = None
