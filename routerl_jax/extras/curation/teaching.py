"""Makes demonstrations for MMSearch-R1's policy (arXiv 2506.20670, section 4.2, finding 4; appendix F.2).

A language model works in the policy's place, with the same searches and limits. Its right attempts are kept.

WORKDIR/construct.json             settings and data of the job
WORKDIR/questions.jsonl            a record per finished question: its attempts, and the episode of the right one
WORKDIR/demonstrations.jsonl       the episodes, as config.warm_start.demonstrations reads them
WORKDIR/pictures/                  pictures of these episodes
WORKDIR/report.json, report.md     written when the job ends
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from routerl_jax.agents.agent import SearchTool
from routerl_jax.agents.observation import rendered
from routerl_jax.core.config import checked
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Episode, Example, Message, Observation, Shown, Turn
from routerl_jax.evaluation.records import PictureFiles, episode_record
from routerl_jax.extras.curation.job import (
    Attempt,
    AttemptFailed,
    Demonstrate,
    DemonstrationConfig,
    ModelUse,
    Record,
    Report,
    Services,
    best_of,
    by_frequency,
    listed,
    load_student,
    model_identity,
    model_reply,
    run_demonstrations,
)
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.recipes.mmsearch_r1 import protocol
from routerl_jax.recipes.mmsearch_r1.agents import MMSearchAgent, picture_query
from routerl_jax.recipes.mmsearch_r1.protocol import Kind
from routerl_jax.rewards.metrics import ANSWER_METRICS, accepted_answers
from routerl_jax.services.base import ChatModel, without_thinking
from routerl_jax.services.config import ChatModelConfig
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.sections import ModelConfig
from routerl_jax.training.setup import build_recipe

_MADE = ("questions.jsonl", "demonstrations.jsonl", "report.json", "report.md", "pictures")

OpenServices = Callable[[], tuple[ChatModel, Mapping[str, SearchTool]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TeachingConfig(DemonstrationConfig):
    """A job in which a language model demonstrates how to search on demand."""

    job: Literal["sft"] = "sft"  # the job that this configuration is for
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # the teacher
    form: bool = True  # keep only attempts in which every turn has the protocol's form

    def decisive(self) -> dict[str, Any]:
        return {**super().decisive(), "job": self.job, "form": self.form, "llm": model_identity(self.llm)}

    def build_agent(self) -> MMSearchAgent:
        """The student's agent. Raises ValueError if a setting is wrong; the message names its key."""
        run = TrainConfig(
            kind="sft",
            recipe="mmsearch_r1",
            model=ModelConfig(path=self.student),
            agent=self.agent,
            knowledge=self.knowledge,
        )
        agent = build_recipe(run).agent
        assert isinstance(agent, MMSearchAgent)
        agent.check_tags("a job that makes demonstrations")
        return agent


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeachingReport(Report):
    """Numbers of episodes, and their cost.

    Attributes:
      tried, accepted: number of questions by data set.
      reasons: number of questions without an episode, by the outcome of their last attempt.
      ways: number of episodes by their sequence of searches.
    """

    tried: Mapping[str, int]
    accepted: Mapping[str, int]
    reasons: Mapping[str, int]
    ways: Mapping[str, int]
    searches: int

    def __str__(self) -> str:
        lines = ["| data set | tried | accepted |", "|---|---|---|"]
        lines += [f"| {name} | {count:,} | {self.accepted.get(name, 0):,} |" for name, count in self.tried.items()]
        return "\n".join(
            [
                *lines,
                "",
                f"- not accepted because of: {listed(self.reasons)}",
                f"- episodes by what they searched: {listed(self.ways)}",
                f"- {self.model}: {self.use}",
                f"- {self.searches:,} searches; {self.seconds:,.0f} s in this session",
            ]
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MMSearchTeacher:
    """A language model in the policy's place, with the same messages, parser, limits and searches.

    The policy reads pictures between words. The teacher gets them before the text, and a number in their place.

    Attributes:
      agent: the student's agent.
      student: the policy's tokenizer and image processing (`load_without_weights`).
    """

    agent: MMSearchAgent
    student: Decoder
    config: TeachingConfig
    services: Services

    async def attempt(self, example: Example, number: int) -> tuple[Attempt, Episode | None]:
        """Works on a question to the end. Returns the episode if the attempt is right, else None.

        Failures of the model or of a search are outcomes; they don't raise.
        """
        attempt, turns = Attempt(), []
        try:
            await self._run_turns(example, number, attempt, turns)
            episode = Episode(
                example=example,
                sample=number,
                answer=attempt.answer,
                turns=turns,
                sequences=[],
                prompt=self._tokenizer.decode(self._opening(example)),
            )
            self._check(episode)
        except AttemptFailed as reason:
            attempt.outcome, attempt.detail = reason.outcome, str(reason)
            return attempt, None
        return attempt, episode

    async def _run_turns(self, example: Example, number: int, attempt: Attempt, turns: list[Turn]) -> None:
        """Adds turns up to the answer. Raises AttemptFailed if the attempt ends without one."""
        instructed = dataclasses.replace(self.agent, instruct=True)
        first = self.agent.form.first(example.question, True)
        chat = [Message(role="user", content=first, images=example.images)]
        kinds: list[Kind] = []
        for _ in range(self.agent.searches + 1):
            turn = await self._turn(chat, number, attempt)
            turns.append(turn)
            action = self.agent.read(turn, example, kinds)
            if action.kind == "invalid":
                raise AttemptFailed("unreadable turn", action.error)
            if action.kind == "refusal":
                raise AttemptFailed("refused", "")
            if action.kind == "answer":
                attempt.answer = action.answer
                return
            kind = self.agent.kind_of(action.tool)
            query = picture_query(example) if kind == "image" else action.query
            attempt.searches += 1
            call = await self.services.search(
                action.tool, query, self.agent.image_k if kind == "image" else self.agent.k
            )
            if call.error is not None:
                raise AttemptFailed("search failed", f"{call.tool}: {call.error}")
            kinds.append(kind)
            turn.calls = [call]
            self._observe(turn, self.agent.observation(call, call.passages, kind, example, kinds))
            observation = instructed.observation(call, call.passages, kind, example, kinds)
            chat += [Message(role="assistant", content=turn.text), numbered(observation)]
        raise AssertionError("the agent lets no search through in the last round")

    async def _turn(self, chat: Sequence[Message], number: int, attempt: Attempt) -> Turn:
        """The model's next turn, cut at the stop strings of the policy."""
        text = await model_reply(
            self.services,
            chat,
            attempt,
            max_tokens=self.config.max_tokens,
            temperature=self.config.temperature,
            sample=number,
        )
        text = until_stop(without_thinking(text))
        return Turn(text=text, stop_reason="stop", tokens=len(self._tokenizer.encode(text)))

    def _observe(self, turn: Turn, observation: Observation) -> None:
        """Adds the observation to a turn, as the student reads it and its rollouts record it."""
        rendering = rendered(observation, self._tokenizer, self._images, self.agent.special_tokens)
        as_message = self.agent.instruct
        turn.observation = (
            self._tokenizer.decode(self._tokenizer.reply(rendering.text)) if as_message else rendering.text
        )
        turn.shown = list(rendering.shown)

    def _check(self, episode: Episode) -> None:
        """Raises AttemptFailed if the episode is not worth learning."""
        metric = ANSWER_METRICS[self.config.metric]
        accepted = accepted_answers(episode.example, episode.answer)
        if metric(episode.answer, accepted, self.config.normalizer) < 1.0:
            raise AttemptFailed("wrong answer", "")
        if self.config.form and not all(turn.well_formed for turn in episode.turns):
            raise AttemptFailed("out of form", "")
        if self.config.max_length and (length := self._length(episode)) > self.config.max_length:
            raise AttemptFailed("too long", f"{length} tokens")

    def _length(self, episode: Episode) -> int:
        """Number of tokens of an episode as the student reads it."""
        images = self._images
        observed = [item.image for turn in episode.turns for item in turn.shown if item.digest]
        pictures = [*episode.example.images, *observed]
        expanded = sum(images.process(image).tokens - 1 for image in pictures) if images else 0
        texts = [turn.text + turn.observation for turn in episode.turns]
        return len(self._opening(episode.example)) + expanded + sum(len(self._tokenizer.encode(text)) for text in texts)

    def _opening(self, example: Example) -> list[int]:
        images = self._images
        return self.agent.opening(example, self._tokenizer, self._tokenizer.decode(images.marker) if images else "")

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        assert self.student.tokenizer is not None
        return self.student.tokenizer

    @functools.cached_property
    def _images(self) -> ImageTokens | None:
        return self.student.image_tokens if isinstance(self.student, VisionLanguageModel) else None


def numbered(observation: Observation) -> Message:
    """An observation as a chat model gets it: the pictures first, and in the text their numbers."""
    images: list[Any] = []
    text = ""
    for piece in [observation] if isinstance(observation, str) else observation:
        if isinstance(piece, Shown):
            images.append(piece.image)
            text += f"[picture {len(images)}]"
        else:
            text += f" {piece}" if text.endswith("]") and piece[:1].strip() else piece
    return Message(role="user", content=text.strip(), images=tuple(images))


def until_stop(text: str) -> str:
    """A reply up to the first stop string of the protocol (included), as an engine cuts a policy's turn."""
    ends = [text.index(stop) + len(stop) for stop in protocol.STOPS if stop in text]
    return text[: min(ends)] if ends else text.strip()


def teach(
    config: TeachingConfig,
    workdir: pathlib.Path,
    open_services: OpenServices,
    *,
    student: Decoder | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> TeachingReport:
    """Lets the teacher work on the questions of `config.data`, and writes the right attempts.

    After a kill, the same call continues the job. No finished question is asked again.

    Args:
      open_services: opens the teacher and the knowledge bases. It is not called if nothing is left to do.
      student: the policy of `config.student`, if it is in memory already.
      overwrite: delete the files of a job with other settings in `workdir`.

    Raises:
      ValueError: `workdir` holds a job with other settings, another process uses it, the data or the student can't be used, or
        too many questions failed in a row.
    """
    agent = config.build_agent()
    plans: tuple[tuple[Kind, ...], ...] = (("image",), ("text",), ("image", "text"))
    prompts = [agent.form.first("", True), *(agent.form.after("", plan, True) for plan in plans)]

    @contextlib.contextmanager
    def demonstrating() -> Iterator[Demonstrate]:
        policy = student or load_student(config.student)
        model, tools = open_services()
        services = Services(model, tools, config.search_timeout)
        teacher = MMSearchTeacher(agent=agent, student=policy, config=config, services=services)
        pictures = PictureFiles(workdir)

        def record(episode: Episode | None) -> dict[str, Any]:
            return {"episode": episode and episode_record(episode, pictures)}

        yield lambda question: best_of(question, teacher.attempt, config.attempts, record)

    return run_demonstrations(
        config,
        {"workdir": workdir, "outputs": _MADE, "doing": "teaching"},
        prompts,
        demonstrating,
        functools.partial(_write, config, workdir),
        overwrite=overwrite,
        progress=progress,
    )


def _write(
    config: TeachingConfig, workdir: pathlib.Path, records: Sequence[Record], tried: Sequence[Record], seconds: float
) -> TeachingReport:
    """Writes the episodes and the report."""
    accepted = [record for record in tried if record["episode"] is not None]
    write_json_lines(workdir / "demonstrations.jsonl", (record["episode"] for record in accepted))
    attempts = [attempt for record in records for attempt in record["attempts"]]
    report = TeachingReport(
        model=config.llm.model,
        tried=dict(collections.Counter(record["dataset"] for record in tried)),
        accepted=dict(collections.Counter(record["dataset"] for record in accepted)),
        reasons=by_frequency(record["outcome"] for record in tried if record["episode"] is None),
        ways=by_frequency(
            ", ".join(call["tool"] for turn in record["episode"]["turns"] for call in turn["calls"]) or "nothing"
            for record in accepted
        ),
        use=ModelUse.counted(attempts, config),
        searches=sum(attempt["searches"] for attempt in attempts),
        seconds=round(seconds, 1),
    )
    report.write(workdir)
    return report
