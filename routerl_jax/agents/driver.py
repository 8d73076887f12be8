"""The driver: runs many agents at once, and batches their turns in the engine and their searches per tool. Before a run,
`no_room` checks that prompts fit."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import numbers
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, cast

import jax
from absl import logging

from routerl_jax.agents.agent import LLM, Agent, SearchTool, Tools, UnknownTool, begun, check_choices
from routerl_jax.agents.calls import calls_of_all, settle
from routerl_jax.agents.conversation import Request, Rollout
from routerl_jax.agents.forks import BranchState
from routerl_jax.core import stopping
from routerl_jax.core.background import PausedLoop, run_coroutine
from routerl_jax.core.progress import Bar, waiting
from routerl_jax.core.text import replace_surrogates
from routerl_jax.core.time_limit import DEFAULT_SECONDS
from routerl_jax.core.types import Call, Episode, Example, Turn
from routerl_jax.engine.policy import DoesNotFit, Endpoint, Generated, Policy, Stream, TurnFailed
from routerl_jax.engine.sampling import Sampling


@dataclasses.dataclass
class DriverStats:
    """Seconds that a run spent on generation and on tools, and its numbers of tool calls and of failed ones."""

    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    tool_calls: int = 0
    tool_errors: int = 0


def run(
    agent: Agent,
    examples: Sequence[Example],
    engine: Policy,
    tools: Mapping[str, SearchTool],
    samples: int = 1,
    seed: int = 0,
    *,
    sampling: Sampling | None = None,
    deterministic: bool = True,
    tool_timeout: float = DEFAULT_SECONDS,
    progress: str = "",
    stats: DriverStats | None = None,
    forks: int = 0,
    finished: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Runs an agent `samples` times on every example.

    Args:
      agent: the agent to run.
      examples: questions with distinct ids.
      engine: the policy: an `Engine`, or a chat model behind an endpoint (`services.policy.ChatModel`). Its `seed` becomes
        `seed`.
      tools: knowledge bases by the name that the agent uses.
      samples: attempts per example (the group size).
      sampling: default of the agents' turns; temperature 1 if None.
      deterministic: tool calls and decoding alternate in a fixed order, so that a run repeats bit for bit (given equal
        tool replies). False lets slow tools overlap with decoding; the order then depends on their speed.
      tool_timeout: seconds after which a tool call counts as failed.
      progress: description for a progress bar; no bar if empty.
      stats: filled in if given.
      forks: number of routing decisions at which an attempt is forked into one branch per choice (agents/forks.py). Along each
        branch these are the first decisions. A forked attempt has several episodes, one after the other (`Episode.branches`).
      finished: called with every episode as soon as it ends.

    Returns:
      Episodes, example by example, samples in order. If a prompt, or what the agent feeds later, does not fit the conversation
      (`DoesNotFit`), the episode ends there: it is `truncated` and has no answer. If the policy fails (`TurnFailed`), the
      episode ends there too, with `failure` set.

    Raises:
      ValueError: two examples have the same id; or `forks` is set and the run is not deterministic, the agent does not say how
        its policy chooses (`Agent.choices`), or its choices can't be told apart; or the agent asks for a tool that does not
        exist, returns something else than an Episode, writes `Turn.rewards`, or what no record takes into `Turn.info`.
      RuntimeError: an agent raised, or a tool breaks the interface (such as a `cost` that is no number). A tool that only
        raises or hangs does not end the run: the agent sees `call.error`.
    """
    attempts = Attempts(
        *(agent, engine, tools),
        sampling=sampling,
        deterministic=deterministic,
        tool_timeout=tool_timeout,
        forks=forks,
        finished=finished,
    )
    with contextlib.closing(attempts):
        return attempts.run(examples, samples, seed, progress=progress, stats=stats)


@dataclasses.dataclass(eq=False)
class _Group:
    """The attempts at one example.

    Attributes:
      unfinished: attempts that have not ended; a forked one counts once per branch.
      ended: the episodes of the others.
    """

    example: Example
    unfinished: int
    ended: list[Episode] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Pending:
    """What a rollout waits for: a turn of a stream, the reply to a request to a tool, or a text that is encoded."""

    rollout: Rollout
    asked: Any
    future: asyncio.Future[Any]

    def settle(self, reply: Any) -> None:
        self.rollout.outstanding -= 1
        settle(self.future, reply)


class Attempts:
    """Attempts of an agent at examples, group by group. Some may be under way when `run` returns; the next `run` goes on with
    them.

    Between two runs nothing moves but the tools' threads. The engine may get new weights meanwhile, and others may use it while
    the conversations are suspended (`Engine.suspend`). Until `close`, all must be done by one thread at a time.

    Args and errors: see `run`.
    """

    def __init__(
        self,
        agent: Agent,
        engine: Policy,
        tools: Mapping[str, SearchTool],
        *,
        sampling: Sampling | None = None,
        deterministic: bool = True,
        tool_timeout: float = DEFAULT_SECONDS,
        forks: int = 0,
        finished: Callable[[Episode], None] | None = None,
    ) -> None:
        if not deterministic and jax.process_count() > 1:
            raise ValueError("deterministic=False needs a single process: with several, all must see the same order")
        if forks and not deterministic:
            raise ValueError(
                f"forks={forks} with deterministic=False: a forked attempt replays what was done in a fixed order; take "
                "deterministic=True"
            )
        if isinstance(engine, Endpoint):
            engine.check(forks, jax.process_count())
        if forks:
            check_choices(agent, f"forks={forks}")
        self.agent = agent
        self.engine = engine
        self.tools = tools
        self.sampling = sampling or Sampling()
        self.deterministic = deterministic
        self.tool_timeout = tool_timeout
        self.stats = DriverStats()
        self.forks = forks
        self.finished = finished
        self._choices = agent.choices if forks else None
        self._loop = PausedLoop()
        self._groups: list[_Group] = []  # those that no run has returned yet, oldest first
        self._queue: collections.deque[tuple[_Group, int]] = collections.deque()
        self._turns: dict[int, _Pending] = {}  # by the id of the stream
        self._calls: list[_Pending] = []
        self._texts: list[_Pending] = []
        self._in_flight: set[asyncio.Task[None]] = set()
        self._active: dict[asyncio.Task[Episode], tuple[Rollout, _Group]] = {}
        self._spawned: list[tuple[Rollout, BranchState]] = []
        self._unfit: list[str] = []  # messages of DoesNotFit errors
        self._changed = asyncio.Event()

    @property
    def under_way(self) -> dict[str, int]:
        """The ids of the examples whose groups no run has returned yet, oldest first, and the attempts of each that have not
        ended."""
        return {group.example.id: group.unfinished for group in self._groups}

    def run(
        self,
        examples: Sequence[Example],
        samples: int = 1,
        seed: int = 0,
        *,
        groups: int | None = None,
        awaited: int = 0,
        progress: str = "",
        stats: DriverStats | None = None,
    ) -> list[Episode]:
        """Begins attempts at the examples, after those under way, and runs all until enough groups are complete.

        Args:
          groups: number of groups that are enough; None: all.
          awaited: so many of the oldest groups must be among them.

        Returns:
          Episodes of the complete groups, the oldest first, and of no more than `groups`.

        Raises:
          ValueError, RuntimeError: as in the function `run`. Nothing is under way then.
        """
        ids = [*self.under_way, *(example.id for example in examples)]
        if len(set(ids)) != len(ids):
            repeated = next(i for i, count in collections.Counter(ids).items() if count > 1)
            raise ValueError(f"example id {repeated!r} occurs twice; ids must be distinct (they seed the sampling)")
        self.engine.seed = seed
        self.stats, self._unfit = stats or DriverStats(), []
        for example in examples:
            group = _Group(example, samples)
            self._groups.append(group)
            self._queue.extend((group, sample) for sample in range(samples))
        oldest = self._groups[:awaited]

        def enough() -> bool:
            if groups is None or any(group.unfinished for group in oldest):
                return False
            return sum(not group.unfinished for group in self._groups) >= groups

        total = sum(group.unfinished for group in self._groups)
        with Bar(total=total, desc=progress, unit="episode", disable=not progress) as bar:
            self._loop.run(stopping.awaited(self._run(enough, bar)))
        completed = [group for group in self._groups if not group.unfinished][:groups]
        self._groups = [group for group in self._groups if group not in completed]
        episodes = [episode for group in completed for episode in sorted(group.ended, key=self._sort_key)]
        self._warn(episodes)
        return episodes

    def close(self) -> None:
        """Ends the attempts that are under way. Their conversations must not be suspended."""
        self._abandon()
        self._loop.close()

    def _warn(self, episodes: Sequence[Episode]) -> None:
        if self._unfit:
            logging.warning(
                "%d of %d episodes end without an answer, as something does not fit a conversation. The first: %s",
                *(len(self._unfit), len(episodes), self._unfit[0]),
            )
        if failed := [episode.failure for episode in episodes if episode.failure is not None]:
            kinds = collections.Counter(failure.kind for failure in failed)
            logging.warning(
                "%d of %d episodes end without an answer, as the policy failed (%s). The first: %s",
                *(len(failed), len(episodes), ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common())),
                failed[0].message,
            )

    async def _run(self, enough: Callable[[], bool], bar: Any) -> None:
        concurrency = self.engine.rows
        try:
            while (self._queue or self._active) and not enough():
                while self._queue and len(self._active) < concurrency:
                    group, sample = self._queue.popleft()
                    choices = self._choices
                    branch = None if choices is None else BranchState(choices, self.forks, self._spawn)
                    self._start(group, sample, branch)
                await self._settle()
                for parent, state in self._spawned:
                    group = next(group for rollout, group in self._active.values() if rollout is parent)
                    self._start(group, parent.sample, state)
                    group.unfinished += 1
                    bar.total += 1
                if self._spawned:
                    self._spawned.clear()
                    continue
                ended = [task for task in self._active if task.done()]
                for task in ended:
                    rollout, group = self._active.pop(task)
                    rollout.close()
                    episode = self._result(task, rollout)
                    group.ended.append(episode)
                    group.unfinished -= 1
                    if self.finished is not None:
                        self.finished(episode)
                    bar.update()
                if ended and (self._queue or enough()):  # the next segment decodes with the freed rows
                    continue
                await self._advance()
        except BaseException:
            self._abandon()
            raise

    def _abandon(self) -> None:
        for task, (rollout, _) in self._active.items():
            task.cancel()
            rollout.close()
        for task in self._in_flight:
            task.cancel()
        for container in (
            self._active,
            self._groups,
            self._queue,
            self._turns,
            self._calls,
            self._texts,
            self._spawned,
        ):
            container.clear()

    def _start(self, group: _Group, sample: int, branch: BranchState | None) -> None:
        example = group.example
        rollout = Rollout(
            *(example, sample, self.engine, self.sampling, self._wait_turn, self._wait_tool, self._wait_text),
            tags=self.agent.special_tokens,
            foreign=self.agent.foreign,
            branch=branch,
        )
        try:
            working = begun(self.agent, example, LLM(rollout), Tools(rollout, list(self.tools)))
        except ValueError:
            rollout.close()
            raise
        task = asyncio.ensure_future(working)
        task.add_done_callback(lambda _: self._changed.set())
        self._active[task] = rollout, group

    def _spawn(self, rollout: Rollout, state: BranchState) -> None:
        """Notes a further branch of an attempt; it starts once all running attempts wait."""
        self._spawned.append((rollout, state))

    def _result(self, task: asyncio.Task[Episode], rollout: Rollout) -> Episode:
        error = task.exception()
        if isinstance(error, TurnFailed):
            return rollout.cut_short(error.failure)
        if isinstance(error, DoesNotFit):
            self._unfit.append(str(error))
            return rollout.cut_short()
        where = f"example {rollout.example.id!r}, sample {rollout.sample}"
        if isinstance(error, UnknownTool):  # the message says it all
            raise ValueError(f"the agent failed on {where}: {error}") from error
        if error is not None:
            raise RuntimeError(f"the agent failed on {where}: {error}") from error
        if not isinstance(episode := task.result(), Episode):
            raise ValueError(
                f"{type(self.agent).__name__}.run gave {episode!r:.80} on {where}, and no Episode: let it end with "
                "`return chat.episode(answer=..)`"
            )
        for number, turn in enumerate(episode.turns):
            _check_measured(turn, f"turn {number} of {where}")
        return episode

    def _sort_key(self, episode: Episode) -> tuple[int, ...]:
        """Sort key of a group's episodes: the sample, and its choice at every decision, in the order of the choices."""
        choices = self._choices
        names = [] if choices is None else list(choices.names)
        return episode.sample, *(names.index(branch.tool) for branch in episode.branches)

    async def _settle(self) -> None:
        """Lets agents run until each waits for the engine or a tool (or, when not deterministic, for something else)."""
        patience = 8
        while any(rollout.outstanding == 0 and not task.done() for task, (rollout, _) in self._active.items()):
            self._changed.clear()
            if self.deterministic:
                # Also wait for an agent that awaits something outside the driver: the order must not depend on its speed.
                await self._changed.wait()
            elif patience:
                patience -= 1
                await asyncio.sleep(0)
            else:
                return

    async def _advance(self) -> None:
        """Does the next piece of work: texts to encode, then pending tool calls, then a decode segment."""
        if self._texts:
            texts, self._texts = self._texts, []
            self.engine.tokenizer.prepare(pending.asked for pending in texts)
            for pending in texts:
                pending.settle(None)
            return
        if self._calls:
            calls, self._calls = self._calls, []
            if self.deterministic:
                await self._run_calls(calls)
                return
            # one task per tool, so that no agent waits for another agent's tool
            for tool in dict.fromkeys(call.asked.tool for call in calls):
                task = asyncio.ensure_future(self._run_calls([call for call in calls if call.asked.tool == tool]))
                self._in_flight.add(task)
                task.add_done_callback(self._in_flight.discard)
                task.add_done_callback(lambda _: self._changed.set())
        if self.engine.busy:
            stopping.check()
            started = time.perf_counter()
            finished = await _to_its_end(self.engine.step) if self._in_flight else self.engine.step()
            self.stats.generate_seconds += time.perf_counter() - started
            for stream, generated in finished:
                self._turns.pop(id(stream)).settle(generated)
        elif self._active and not self.deterministic:
            self._changed.clear()
            await self._changed.wait()

    async def _wait_turn(self, rollout: Rollout, stream: Stream) -> Generated:
        self._turns[id(stream)] = pending = self._pending(rollout, stream)
        return await pending.future

    async def _wait_tool(self, rollout: Rollout, request: Request) -> Call:
        self._calls.append(pending := self._pending(rollout, request))
        return await pending.future

    async def _wait_text(self, rollout: Rollout, text: str) -> None:
        self._texts.append(pending := self._pending(rollout, text))
        await pending.future

    def _pending(self, rollout: Rollout, asked: Stream | Request | str) -> _Pending:
        self._changed.set()
        rollout.outstanding += 1
        return _Pending(rollout, asked, asyncio.get_running_loop().create_future())

    async def _run_calls(self, calls: list[_Pending]) -> None:
        """Runs calls, one batch per tool. If a tool breaks the interface, the agents that wait for it get the error."""
        started = time.perf_counter()
        try:
            with waiting("tools"):
                replies = await calls_of_all(self.tools, [call.asked for call in calls], self.tool_timeout)
        except Exception as error:
            for call in calls:
                call.settle(error)
            return
        self.stats.tool_seconds += time.perf_counter() - started
        self.stats.tool_calls += sum(call.asked.want != "pictures" for call in calls)
        self.stats.tool_errors += sum(reply.error is not None for reply in replies)
        for call, reply in zip(calls, replies, strict=True):
            call.settle(reply)


async def _to_its_end(work: Callable[[], Any]) -> Any:
    """The result of work on another thread. A cancellation waits for it, as what is closed then is what it works with."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _check_measured(turn: Turn, where: str) -> None:
    """Makes the numbers of `Turn.info` floats. Raises ValueError for a value that no record takes, and for `Turn.rewards`."""
    if turn.rewards:
        raise ValueError(
            f"the agent wrote Turn.rewards={turn.rewards} in {where}: those are of reward terms, whose sum an episode's reward "
            f"holds. Write turn.info[{next(iter(turn.rewards))!r}] = .., and let a reward term read it (rewards.terms.TurnTerm)"
        )
    if not isinstance(turn.info, dict):
        raise ValueError(
            f"the agent wrote Turn.info={turn.info!r:.80} in {where}: keep it a dict, of numbers and texts by name"
        )
    for name, value in cast(dict[str, Any], turn.info).items():
        value = value.item() if getattr(value, "ndim", None) == 0 else value  # of NumPy and JAX
        finite = isinstance(value, numbers.Real) and abs(cast(float, value)) <= sys.float_info.max
        if not (isinstance(name, str) and (finite or isinstance(value, str))):
            raise ValueError(
                f"the agent wrote turn.info[{name!r}] = {value!r:.80} in {where}: give a finite number or a text, or nothing"
            )
        turn.info[name] = replace_surrogates(value) if isinstance(value, str) else float(cast(float, value))


class _Asked(BaseException):
    """Raised when the agent asks the policy or a tool. Not an Exception, because an agent may catch those."""


def no_room(agent: Agent, examples: Iterable[Example], engine: Policy, tools: Sequence[str]) -> str:
    """Runs an agent on each example up to its first request to the policy or a tool. Nothing is computed on a device.

    Returns:
      "" if the agent makes such a request on one of the examples; else the reason why it does not on the first one.

    Raises:
      ValueError: the agent asks for a tool that does not exist, or its `run` is no coroutine.
    """
    reasons: list[str] = []
    for example in examples:
        reason = run_coroutine(_try(agent, example, engine, tools))
        if not reason:
            return ""
        reasons.append(reason)
    return reasons[0] if reasons else ""


async def _try(agent: Agent, example: Example, engine: Policy, tools: Sequence[str]) -> str:
    async def asked(*_: Any) -> NoReturn:
        raise _Asked

    rollout = Rollout(example, 0, engine, Sampling(), asked, asked, tags=agent.special_tokens)
    try:
        episode = await begun(agent, example, LLM(rollout), Tools(rollout, tools))
    except _Asked:
        return ""
    except DoesNotFit as error:
        return str(error)
    except UnknownTool as error:
        raise ValueError(f"the agent failed on example {example.id!r}: {error}") from error
    finally:
        rollout.close()
    if not isinstance(episode, Episode):  # the driver says so
        return ""
    if episode.turns or not episode.truncated:
        return ""
    prompt_tokens = max((len(sequence) for sequence in episode.sequences), default=0)
    return f"the prompt of example {example.id!r} has {prompt_tokens} tokens, and a turn does not fit beside it"
