"""Where the time of a run goes: seconds by part (`Clock`), and config.profile, which traces some steps with JAX's profiler and
prints a table of the longest events."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import pathlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from routerl_jax.core.files import write_atomic
from routerl_jax.core.progress import waiting
from routerl_jax.core.text import counted
from routerl_jax.parallel import multihost

_LONGEST = 10  # rows of a table
_SHOWN = 70  # characters of a name
# Lines of a device's plane that repeat the events of another line, as sums or by other names.
_SUMS = frozenset({"Steps", "XLA Modules", "XLA TraceMe", "Framework Ops", "Framework Name Scope", "Source code"})
_OPS = "XLA Ops"


def profiled_steps(text: str, steps: int | None = None) -> range:
    """The steps that config.profile names: "10:12" is steps 10 and 11, counted from 0 as in metrics.jsonl; "" none.

    Args:
      steps: number of steps of the run; None: not known yet.

    Raises:
      ValueError: it is no such range, or the run does not have these steps.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if not match or int(match[1]) >= int(match[2]):
        raise ValueError(
            f"config.profile={text!r} is no range of steps: write FIRST:END, such as 10:12 for steps 10 and 11 (counted from 0)"
        )
    if steps is not None and int(match[2]) > steps:
        raise ValueError(
            f"config.profile={text!r}: the run has {steps} steps, counted from 0; take an END of {steps} or less"
        )
    return range(int(match[1]), int(match[2]))


class Profiler:
    """Traces steps of a run, on its main process, into `workdir/profile`, and prints the longest events.

    TensorBoard's profile plug-in opens the directory, and Perfetto its `*.trace.json.gz`. The table is also written to
    `workdir/profile/profile.txt`. Python's own functions are not traced, because that would slow them down.

        with Profiler(profiled_steps(config.profile), workdir, start=0) as profiler:
            for step in range(steps):
                with profiler.step(step):
                    ...

    Args:
      steps: the steps to trace.
      workdir: the run's directory.
      start: the first step of this session.
    """

    def __init__(self, steps: range, workdir: pathlib.Path, start: int = 0) -> None:
        self._steps = steps if multihost.is_main() else range(0)
        self._directory = workdir / "profile"
        self._traced = 0
        if steps and start >= steps.stop:
            logging.warning(
                "config.profile=%d:%d: the run goes on at step %d, nothing is profiled", steps.start, steps.stop, start
            )

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._end(write_report=kind is None)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around one step."""
        if number not in self._steps:
            yield
            return
        if not self._traced:
            self._directory.mkdir(parents=True, exist_ok=True)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(str(self._directory), profiler_options=options)
        self._traced += 1
        with jax.profiler.StepTraceAnnotation("step", step_num=number):
            yield
        if number + 1 == self._steps.stop:
            self._end(write_report=True)

    def _end(self, *, write_report: bool) -> None:
        """Ends the trace if there is one under way."""
        if not self._traced:
            return
        traced, self._traced = self._traced, 0
        jax.profiler.stop_trace()
        if not write_report:
            return
        newest = max(self._directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
        text = report(newest, traced)
        write_atomic(self._directory / "profile.txt", text)
        print(text)


@dataclasses.dataclass(kw_only=True)
class Spent:
    """The time of all events of one name.

    Attributes:
      own: seconds, without the events inside of them.
      whole: seconds, with the events inside of them.
      times: how many there were.
    """

    own: float = 0.0
    whole: float = 0.0
    times: int = 0


Times = Mapping[str, Spent]  # by name


class Profile(NamedTuple):
    """The time of a trace by events.

    Attributes:
      parts: of a step, as `timing_s` has them.
      devices: operations of XLA's programs, and copies.
      host: everything on the host, parts included.
      seconds: from the first event to the last.
    """

    parts: Times
    devices: Times
    host: Times
    seconds: float


class _Event(NamedTuple):
    name: str
    start: float  # nanoseconds
    duration: float
    device: bool
    part: bool


def report(trace: pathlib.Path, steps: int) -> str:
    """The longest events of a trace (`*.xplane.pb`) of `steps` steps, in three tables: parts of a step, devices, host.

    Operations of XLA's programs count as the devices', also on a CPU, where they run on threads of the host.
    """
    profile = spent(jax.profiler.ProfileData.from_file(str(trace)))
    text = io.StringIO()
    console = Console(file=text, width=120, highlight=False)
    console.print(f"Profile of {counted(steps, 'step')}, {profile.seconds:.2f} s; the trace: {trace}", soft_wrap=True)
    kinds = {
        "parts of the steps": profile.parts,
        "things on the devices": profile.devices,
        "things on the host": profile.host,
    }
    for title, times in kinds.items():
        if not times:
            console.print(f"\nThe trace has no {title}.")
            continue
        table = Table(title=f"\nThe longest {title}", title_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("what", overflow="fold")
        for heading in ("s", "with what is inside, s", "times", "share"):
            table.add_column(heading, justify="right")
        total = sum(entry.own for entry in times.values())
        longest = sorted(times.items(), key=lambda item: -item[1].own)[:_LONGEST]
        for name, entry in longest:
            shown = name if len(name) <= _SHOWN else f"{name[: _SHOWN - 2]}.."
            share = entry.own / total if total else 0.0
            table.add_row(Text(shown), f"{entry.own:.4f}", f"{entry.whole:.4f}", f"{entry.times:,}", f"{share:.1%}")
        console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def spent(trace: Any) -> Profile:
    """The time of a trace (`jax.profiler.ProfileData`) by events."""
    parts, devices, host = (collections.defaultdict[str, Spent](Spent) for _ in range(3))
    first, last = float("inf"), 0.0
    for plane in trace.planes:
        on_device = plane.name.startswith("/device:")
        if not on_device and not plane.name.startswith("/host:"):
            continue
        lines = [line for line in plane.lines if not on_device or line.name not in _SUMS]
        if on_device and any(line.name == _OPS for line in lines):
            lines = [line for line in lines if line.name == _OPS]
        for line in lines:
            events = list(_events(line.events, on_device))
            for event, own in _with_own_time([event for event in events if event.part]):
                _add(parts[event.name], event, own)
            for event, own in _with_own_time(events):
                _add((devices if event.device else host)[event.name], event, own)
                first, last = min(first, event.start), max(last, event.start + event.duration)
    return Profile(parts, devices, host, max(last - first, 0.0) / 1e9)


def _add(total: Spent, event: _Event, own: float) -> None:
    total.own += own / 1e9
    total.whole += event.duration / 1e9
    total.times += 1


def _events(events: Iterable[Any], on_device: bool) -> Iterator[_Event]:
    """The events with a duration. An operation is named with its program, such as `jit_update: fusion.3`."""
    for event in events:
        if not event.duration_ns:
            continue
        stats = dict(event.stats)
        name, module = str(stats.get("hlo_op") or re.sub(r"=\d+/\d+$", "", event.name)), stats.get("hlo_module")
        yield _Event(
            f"{module}: {name}" if module else name,
            event.start_ns,
            event.duration_ns,
            on_device or "hlo_op" in stats,
            PART in stats,
        )


def _with_own_time(events: Sequence[_Event]) -> Iterator[tuple[_Event, float]]:
    """The events of one line, each with its nanoseconds without those of the events inside of it."""
    ordered = sorted(events, key=lambda event: (event.start, -event.duration))
    own = [event.duration for event in ordered]
    open_: list[int] = []  # events that have begun and not ended, outermost first
    for i, event in enumerate(ordered):
        while open_ and ordered[open_[-1]].start + ordered[open_[-1]].duration <= event.start:
            open_.pop()
        if open_:
            outer = ordered[open_[-1]]
            own[open_[-1]] -= min(event.duration, outer.start + outer.duration - event.start)
        open_.append(i)
    yield from zip(ordered, own)


PART = "part"  # marks what is a part of a step in a trace


class Clock:
    """Adds up seconds by name. The bar that is shown names what is under way, and a profile has the same names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, seconds: Mapping[str, float]) -> None:
        """Adds seconds that were measured elsewhere."""
        for name, value in seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with waiting(name.replace("_", " ")), jax.profiler.TraceAnnotation(name, **{PART: 1}):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
