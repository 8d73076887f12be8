"""A planner and a grounder that demonstrate how to search pages, look closer and answer (VRAG-RL, arXiv 2505.22019, section
2.2, equations 3 to 6, appendix D): settings, prompts, what is read in replies, and attempts.

The planner sees pages and decides what to do. To look closer, it describes a region in words, and the grounder gives the
region's box. An attempt is recorded as the policy would have written and seen it. The wording of the prompts is ours.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, TypeVar

from PIL import Image

from routerl_jax.agents.grammar import between
from routerl_jax.agents.observation import Viewer
from routerl_jax.core.config import Count, NonNegative, PositiveFraction, Size, checked
from routerl_jax.core.types import Action, Episode, Example, Message, Shown, Verdict
from routerl_jax.data.formats.verl import PICTURE
from routerl_jax.data.rounds import RecordedRounds, Round
from routerl_jax.extras.curation.job import (
    Attempt,
    AttemptFailed,
    DemonstrationConfig,
    Services,
    model_identity,
    model_reply,
)
from routerl_jax.models.images import decode_image, smart_resize
from routerl_jax.models.regions import Box, Pixels, RefusedRegion, RegionRule, read_box, region
from routerl_jax.models.regions import Size as FrameSize
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.recipes.recipe import AgentConfig
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.rewards.metrics import ANSWER_METRICS, accepted_answers
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.services.base import without_thinking
from routerl_jax.services.config import ChatModelConfig, JudgeConfig
from routerl_jax.services.judge import settings_that_count
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.demonstrations import Worked
from routerl_jax.training.sections import ModelConfig
from routerl_jax.training.setup import build_recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ExpertJobConfig(DemonstrationConfig):
    """A job in which two language models demonstrate how to search pages, look closer, and answer."""

    job: Literal["experts"] = "experts"  # the job that this configuration is for
    planner: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # thinks, searches, answers
    # finds where the planner wants to look
    grounder: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)
    judge: JudgeConfig = JudgeConfig(style="vrag")  # judge of answers; without a model `metric` decides
    min_pixels: Count = 0  # fewest pixels of a picture that the policy sees (config.model.min_pixels of its run)
    max_pixels: Count = 0  # most pixels of a picture that the policy sees
    agent: AgentConfig = AgentConfig(max_searches=6, k=10, instruct=True)  # max_searches: turns, the answer included
    picture_pixels: Size = 1280 * 28 * 28  # most pixels of a picture as the planner and the grounder get it
    box_scale: NonNegative = 0  # the grounder's coordinates run from 0 to this; 0: they are pixels of its picture
    released: bool = False  # the grounder also writes the thought of a look, as in the released code
    oracle: bool = False  # among the pages that a search finds, gold ones that were not shown yet come first
    retries: Count = 1  # further requests if a reply can't be used; the model is told why
    least_steps: Size = 2  # fewest steps of a trajectory, including the answer; config.agent.max_searches is the most
    steps_share: PositiveFraction = 0.4  # largest share of trajectories with the same number of steps
    actions_share: PositiveFraction = 0.4  # largest share of trajectories with the same sequence of actions

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least_steps > self.agent.max_searches:
            raise ValueError(
                f"config.least_steps={self.least_steps}: a trajectory has at most config.agent.max_searches="
                f"{self.agent.max_searches} steps"
            )

    def decisive(self) -> dict[str, Any]:
        pixels = ("min_pixels", "max_pixels", "picture_pixels")
        keys = ("job", *pixels, "box_scale", "released", "oracle", "retries", "least_steps")
        return {
            **super().decisive(),
            **{key: getattr(self, key) for key in keys},
            "planner": model_identity(self.planner),
            "grounder": model_identity(self.grounder),
            "judge": dict(settings_that_count(self.judge)) if self.judge.model else None,
        }

    def build_agent(self) -> VRAGAgent:
        """The student's agent.

        Raises:
          ValueError: a setting is wrong (the message names its key), or the agent does not show pictures or look at them.
        """
        run = TrainConfig(
            kind="sft", recipe="vrag_rl", model=self.student_model(), agent=self.agent, knowledge=self.knowledge
        )
        agent = build_recipe(run).agent
        assert isinstance(agent, VRAGAgent)
        agent.check_tags("a job that makes demonstrations")
        if agent.shows != "picture" or not agent.looks:
            raise ValueError(
                f"config.agent.settings: shows={agent.shows!r}, looks={agent.looks}: the experts show how to look at pictures; "
                "leave these two as they are"
            )
        return agent

    def student_model(self) -> ModelConfig:
        """The student in the form of a run's configuration."""
        return ModelConfig(path=self.student, min_pixels=self.min_pixels, max_pixels=self.max_pixels)


Kind = Literal["search", "look", "answer"]

KINDS: tuple[Kind, ...] = ("search", "look", "answer")
PAGE, PART = "This is the page that was found.", "This is that part of it, enlarged."
_FORM = (
    "Think first, inside <thought> and </thought>, in a few sentences. Then do one thing: write a query inside <search> and "
    "</search>; or, inside <look> and </look>, in words, which part of the last picture you want to see enlarged; or the "
    "answer inside <answer> and </answer>."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """A planner's step. `content` is the query, the description of a region, or the answer."""

    kind: Kind
    thought: str
    content: str


def planner_task(max_turns: int) -> str:
    """The instructions of the planner."""
    return (
        "You find the answer to a question in a collection of pages, which you can search. A search shows you the best page "
        "that you have not seen yet, as a picture. If something in a picture is too small to be read with certainty, look "
        "closer at that part, also at a part of an enlarged part. Search again where a page does not have what you need. "
        f"{_FORM} The answer is short: a name, a number, a few words. You have {max_turns} turns in all, the answer included."
    )


def planner_question(question: str) -> str:
    """The planner's first message after its task."""
    return f"Question: {question}"


def last_turn(observation: str) -> str:
    """The observation before the planner's last turn."""
    return f"{observation}\n\nThis is your last turn: answer now."


def retry_prompt(prompt: str, why: str) -> str:
    """A repeated prompt after a reply that could not be used, with the reason."""
    return f"{prompt}\n\nA reply to this could not be used: {why}. Reply in the form that was asked for."


def grounder_task(
    question: str, history: Sequence[str], thought: str, region: str, frame: FrameSize, box_scale: float, thinks: bool
) -> str:
    """The prompt that asks where something is in the picture before the prompt.

    Args:
      history: the earlier thoughts and steps, one line each.
      thought: the planner's thought.
      region: the region in the planner's words.
      frame: width and height of the picture as it is sent.
      box_scale: coordinates run from 0 to this; 0: they are pixels.
      thinks: also ask for the thought of this turn.
    """
    so_far = "\n".join(f"{number}. {line}" for number, line in enumerate(history, 1)) or "nothing"
    unit = (
        f"numbers from 0 to {box_scale:g} over each side"
        if box_scale
        else f"pixels of the picture, {frame[0]} x {frame[1]}"
    )
    thinking = (
        "First say inside <thought> and </thought>, in a few sentences and as your own thought, what you see and why you look "
        "closer there. "
    )
    return (
        f"The question is: {question}\n\nDone so far:\n{so_far}\n\nThe picture is what was shown last. The thought now: "
        f"{thought}\n\nTo be looked at: {region}\n\n{thinking if thinks else ''}Find that in the picture, and give the box "
        f"around it, with all that is needed to understand it, as <box>[left, top, right, bottom]</box>, in {unit}."
    )


def history_line(step: Step) -> str:
    """A step as the grounder reads it."""
    verb = {"search": "searched for", "look": "looked closer at", "answer": "answered"}[step.kind]
    return f"{step.thought} ({verb}: {step.content})"


def read_step(reply: str) -> Step:
    """The step in a planner's reply.

    Raises:
      AttemptFailed: the reply has no thought, no action, an empty one, or several.
    """
    text = without_thinking(reply)
    if not text:
        raise AttemptFailed("empty reply", "there is nothing in it")
    after_thought = text.partition("</thought>")[2] or text
    actions: list[Kind] = [kind for kind in KINDS for _ in range(after_thought.count(f"<{kind}>"))]
    if len(actions) > 1:
        raise AttemptFailed("several actions", f"there are {len(actions)} actions in it; write one")
    content = between(after_thought, f"<{actions[0]}>", f"</{actions[0]}>") if actions else None
    if not content:
        raise AttemptFailed("no action", "there is neither a complete search, look nor answer in it")
    return Step(kind=actions[0], thought=_thought(text), content=" ".join(content.split()))


def read_location(reply: str, thinks: bool) -> tuple[Box, str]:
    """The box in a grounder's reply, and its thought ("" unless it is asked for one).

    Raises:
      AttemptFailed: there is no box, or no thought where one is asked for.
    """
    text = without_thinking(reply)
    if not text:
        raise AttemptFailed("empty reply", "there is nothing in it")
    box_text = between(text.rpartition("</thought>")[2], "<box>", "</box>")
    if box_text is None:
        raise AttemptFailed("unreadable box", "there is no box between <box> and </box>")
    try:
        box = read_box(box_text)
    except RefusedRegion as error:
        raise AttemptFailed("unreadable box", str(error)) from error
    return box, _thought(text) if thinks else ""


def _thought(text: str) -> str:
    thought = " ".join((between(text, "<thought>", "</thought>") or "").split())
    if not thought:
        raise AttemptFailed("no thought", "there is no thought between <thought> and </thought>")
    return thought


T = TypeVar("T")

# Side of an image token in pixels, in common models. Sides of sent pictures are multiples of it: models don't resize them.
_SIDE = 28
_LEAST_PIXELS = 56 * 56  # fewest pixels of a sent picture
_QUALITY = 95  # JPEG quality of a sent picture


@dataclasses.dataclass(kw_only=True)
class ExpertAttempt:
    """The result of an attempt.

    Attributes:
      planner: the outcome, and the planner's replies and tokens.
      grounder: the grounder's replies and tokens.
      unusable: the reason for each reply that could not be used, such as "planner: no action", even if a later one could.
      actions: the actions so far: search, look, answer.
    """

    planner: Attempt = dataclasses.field(default_factory=Attempt)
    grounder: Attempt = dataclasses.field(default_factory=Attempt)
    unusable: list[str] = dataclasses.field(default_factory=list)
    actions: list[str] = dataclasses.field(default_factory=list)

    @property
    def outcome(self) -> str:
        return self.planner.outcome

    @property
    def detail(self) -> str:
        return self.planner.detail

    def record(self) -> dict[str, Any]:
        """The result, JSON-serialisable."""
        grounder = self.grounder.record()
        return {
            **self.planner.record(),
            "grounder": {key: grounder[key] for key in ("calls", "replies", "prompt_tokens", "tokens")},
            "unusable": self.unusable,
            "actions": self.actions,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """A planner and a grounder that make attempts.

    Attributes:
      agent: the student's agent.
      student: the policy's tokenizer and image processing.
      planner: the planner and the knowledge base of pages.
      grounder: the grounder.
      judge: says whether an episode's answer is right; None: the metric decides.
    """

    agent: VRAGAgent
    student: VisionLanguageModel
    config: ExpertJobConfig
    planner: Services
    grounder: Services
    judge: Callable[[Episode], Awaitable[Verdict]] | None = None

    async def attempt(self, example: Example, number: int) -> tuple[ExpertAttempt, RecordedRounds | None]:
        """Works on a question to the end. Returns the trajectory if the attempt is right, else None.

        Failures of the models or of the search are outcomes; they don't raise.

        Args:
          number: number of the attempt, from 0. Above temperature 0, different attempts get different replies.
        """
        running = _RunningAttempt(self, example, number)
        planner = running.result.planner
        try:
            await running.run()
            # boxes are written as the policy writes them
            recorded = RecordedRounds(example=example, rounds=tuple(running.rounds), frame_pixels=())
            await self._check(recorded, planner.answer, number)
        except AttemptFailed as reason:
            planner.outcome, planner.detail = reason.outcome, str(reason)
            return running.result, None
        return running.result, recorded

    async def _check(self, recorded: RecordedRounds, answer: str, number: int) -> None:
        """Raises AttemptFailed if the trajectory is not worth learning."""
        example, steps = recorded.example, len(recorded.rounds)
        if steps < self.config.least_steps:
            raise AttemptFailed("too few steps", f"{steps} of at least {self.config.least_steps}")
        if self.judge is None:
            metric = ANSWER_METRICS[self.config.metric]
            if metric(answer, accepted_answers(example, answer), self.config.normalizer) < 1.0:
                raise AttemptFailed("wrong answer", answer)
        else:
            verdict = await self.judge(Episode(example=example, sample=number, answer=answer, turns=[], sequences=[]))
            if verdict.kind == "failed":
                raise AttemptFailed("judge failed", verdict.said)
            if verdict.kind == "unreadable":
                raise AttemptFailed("unreadable verdict", verdict.said)
            if verdict.kind != "right":
                raise AttemptFailed("wrong answer", answer)
        if self.config.max_length:
            pieces = self.agent.recorded_pieces(recorded)
            length = len(Worked(example, pieces).sequence(self.agent, self.student))
            if length > self.config.max_length:
                raise AttemptFailed("too long", f"{length} tokens")


class _RunningAttempt:
    """An attempt in progress."""

    def __init__(self, experts_: Experts, example: Example, number: int) -> None:
        self.result = ExpertAttempt()
        self.rounds: list[Round] = []
        self._experts, self._example, self._number = experts_, example, number
        self._agent, self._config = experts_.agent, experts_.config
        self._gold = gold_passages_of(example)
        self._viewer = Viewer(experts_.student.image_tokens)
        self._shown_ids: set[str] = set()  # ids of the pages shown so far
        self._steps: list[Step] = []
        self._chat: list[Message] = []  # the planner's chat
        self._latest: tuple[bytes, FrameSize] | None = None  # the latest picture as it was sent, and its size

    async def run(self) -> None:
        """Adds rounds up to the answer. Raises AttemptFailed if the attempt ends without one."""
        self._begin()
        for turns_left in reversed(range(self._agent.max_turns)):
            step = await self._plan(last=not turns_left)
            if step.kind == "answer":
                if all(earlier.kind != "search" for earlier in self._steps):
                    raise AttemptFailed("answer before a search", step.content)
                self.result.planner.answer = step.content
                action = Action(kind="answer", answer=step.content)
                self._record(step, self._agent.form.write_answer(step.thought, step.content), action)
                return
            if not turns_left:
                break
            self._report(await self._search(step) if step.kind == "search" else await self._look(step))
        raise AttemptFailed("no answer", f"in {self._agent.max_turns} turns")

    # --- the planner ---

    def _begin(self) -> None:
        question = planner_question(self._example.question)
        images = self._register([Shown(image=image) for image in self._example.images])
        self._chat = [
            Message(role="system", content=planner_task(self._agent.max_turns)),
            Message(role="user", content=question, images=images),
        ]

    async def _plan(self, last: bool) -> Step:
        *before, latest = self._chat
        content = last_turn(latest.content) if last else latest.content

        async def ask(text: str, sample: int) -> Step:
            chat = [*before, dataclasses.replace(latest, content=text)]
            return read_step(await self._written(self._experts.planner, self.result.planner, chat, sample))

        return await self._first_usable("planner", content, ask)

    def _report(self, pieces: Sequence[str | Shown]) -> None:
        """Tells the planner the result of its step."""
        step, pictures = self._steps[-1], [piece for piece in pieces if isinstance(piece, Shown)]
        words = PAGE if step.kind == "search" else PART
        content = words if pictures else " ".join(piece for piece in pieces if isinstance(piece, str))
        reply = f"<thought>{step.thought}</thought>\n<{step.kind}>{step.content}</{step.kind}>"
        self._chat += [
            Message(role="assistant", content=reply),
            Message(role="user", content=content, images=self._register(pictures)),
        ]

    def _register(self, pictures: Sequence[Shown]) -> tuple[bytes, ...]:
        """Registers the pictures with the viewer. Returns them as they are sent to the experts."""
        try:
            self._viewer.see(pictures)
        except ValueError as error:
            raise AttemptFailed("no picture", str(error)) from error
        sent = [self._encoded(item.image) for item in pictures]
        self._latest = sent[-1] if sent else self._latest
        return tuple(picture for picture, _ in sent)

    # --- results of its steps ---

    async def _search(self, step: Step) -> list[str | Shown]:
        agent = self._agent
        action = Action(kind="search", tool=agent.tool, query=step.content)
        self._record(step, agent.form.write_search(step.thought, step.content, agent.tool), action)
        self.result.planner.searches += 1
        call = await self._experts.planner.search(agent.tool, action.query, agent.k)
        if call.error is not None:
            raise AttemptFailed("search failed", f"{call.tool}: {call.error}")
        pages = call.passages
        if self._config.oracle:  # gold ones first
            pages = sorted(pages, key=lambda page: not any(hop.found_in((page,)) for hop in self._gold))
        fresh = agent.fresh(pages, self._shown_ids)
        if bare := [passage.id for passage in fresh if not passage.image]:
            raise AttemptFailed("no picture", f"page {bare[0]!r} of {agent.tool!r} has none")
        self._shown_ids.update(passage.id for passage in fresh)
        return self._observed(agent.form.page(call, fresh, fresh))

    async def _look(self, step: Step) -> list[str | Shown]:
        if self._latest is None:
            raise AttemptFailed("look before a page", step.content)
        (picture, frame), config = self._latest, self._config
        history = [history_line(earlier) for earlier in self._steps]
        prompt = grounder_task(
            self._example.question, history, step.thought, step.content, frame, config.box_scale, config.released
        )

        async def ask(text: str, sample: int) -> tuple[str, Pixels, Shown]:
            chat = [Message(role="user", content=text, images=(picture,))]
            reply = await self._written(self._experts.grounder, self.result.grounder, chat, sample)
            box, thought = read_location(reply, config.released)
            return thought or step.thought, *self._located(box, frame)

        thought, box, crop = await self._first_usable("grounder", prompt, ask)
        if crop.error:
            raise AttemptFailed("no picture", crop.error)
        step = dataclasses.replace(step, thought=thought)
        self._record(step, self._agent.form.write_look(thought, box), Action(kind="region", box=box))
        return self._observed([crop])

    def _located(self, box: Sequence[float], frame: FrameSize) -> tuple[Pixels, Shown]:
        """A grounder's box in the policy's frame, and the crop that the policy is shown for it.

        Args:
          frame: size of the picture that the grounder got.
        """
        try:
            view = dataclasses.replace(self._viewer.view(), frame=frame)
            pixels = region(box, view, RegionRule(box_scale=self._config.box_scale, least=1))
            box_written = self._viewer.written(pixels, self._agent.regions)
            return box_written, self._viewer.region(box_written, self._agent.regions)
        except RefusedRegion as error:
            raise AttemptFailed("refused box", str(error)) from error
        except ValueError as error:
            raise AttemptFailed("no picture", str(error)) from error

    # --- recording ---

    def _record(self, step: Step, text: str, action: Action) -> None:
        """Adds a round of the policy. Raises AttemptFailed if the policy's own parser would read the text differently."""
        parsed = self._agent.form.parse(text)
        is_same = dataclasses.replace(parsed, thought="", error="") == dataclasses.replace(
            action, box=tuple(map(float, action.box))
        )
        if not is_same or not self._agent.form.well_formed(text) or PICTURE in text:
            raise AttemptFailed("out of form", text[:200])
        self.rounds.append(Round(text=text, tool=action.tool))
        self.result.actions.append(step.kind)
        self._steps.append(step)

    def _observed(self, pieces: list[str | Shown]) -> list[str | Shown]:
        """Adds the observation of the latest round."""
        images = tuple(piece.image for piece in pieces if isinstance(piece, Shown))
        observation = "".join(piece if isinstance(piece, str) else PICTURE for piece in pieces)
        self.rounds[-1] = dataclasses.replace(self.rounds[-1], observation=observation, images=images)
        return pieces

    # --- asking ---

    async def _written(self, services: Services, attempt: Attempt, chat: Sequence[Message], sample: int) -> str:
        config = self._config
        return await model_reply(
            services, chat, attempt, max_tokens=config.max_tokens, temperature=config.temperature, sample=sample
        )

    async def _first_usable(self, expert: str, prompt: str, ask: Callable[[str, int], Awaitable[T]]) -> T:
        """The content of the first usable reply. If a reply can't be used, the expert is told why and asked again.

        Raises:
          AttemptFailed: no reply could be used, after `config.retries` further requests.
        """
        request, retries = prompt, self._config.retries
        for retry in range(retries + 1):
            try:
                return await ask(request, self._number + retry * self._config.attempts)
            except AttemptFailed as reason:
                if reason.outcome in ("model failed", "no picture"):
                    raise
                self.result.unusable.append(f"{expert}: {reason.outcome}")
                if retry == retries:
                    raise
                request = retry_prompt(prompt, str(reason))
        raise AssertionError("the last reply can be used or raises")

    def _encoded(self, image: Any) -> tuple[bytes, FrameSize]:
        """A picture as it is sent to the experts, and its size there (width, height)."""
        try:
            picture = decode_image(image)
            height, width = smart_resize(
                picture.height, picture.width, _SIDE, _LEAST_PIXELS, self._config.picture_pixels
            )
        except ValueError as error:
            raise AttemptFailed("no picture", str(error)) from error
        buffer = io.BytesIO()
        resized = picture.resize((width, height), Image.Resampling.BICUBIC)
        resized.save(buffer, "JPEG", quality=_QUALITY, subsampling=0)
        return buffer.getvalue(), (width, height)
