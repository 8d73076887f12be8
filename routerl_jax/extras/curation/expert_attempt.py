"""One attempt at a question by a planner and a grounder (VRAG-RL, arXiv 2505.22019, equations 3 to 6).

It is recorded as the policy would have written and seen it.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from PIL import Image

from routerl_jax.agents.viewer import Viewer
from routerl_jax.core.types import Action, Episode, Example, Message, Passage, Shown, Verdict
from routerl_jax.data.formats.verl import PICTURE
from routerl_jax.data.rounds import RecordedRounds, Round
from routerl_jax.extras.curation import experts
from routerl_jax.extras.curation.attempts import Attempt, AttemptFailed, model_reply
from routerl_jax.extras.curation.expert_config import ExpertJobConfig
from routerl_jax.extras.curation.experts import Step
from routerl_jax.extras.curation.services import Services
from routerl_jax.models.images import decode_image, smart_resize
from routerl_jax.models.regions import Pixels, RefusedRegion, RegionRule, Size, region
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.recipes.vrag_rl import protocol
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.rewards.metrics import ANSWER_METRICS, accepted_answers
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.training.demonstrations import Worked

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
        self._latest: tuple[bytes, Size] | None = None  # the latest picture as it was sent, and its size

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
                self._record(step, protocol.answer(step.thought, step.content), action)
                return
            if not turns_left:
                break
            self._report(await self._search(step) if step.kind == "search" else await self._look(step))
        raise AttemptFailed("no answer", f"in {self._agent.max_turns} turns")

    # --- the planner ---

    def _begin(self) -> None:
        question = experts.planner_question(self._example.question)
        images = self._register([Shown(image=image) for image in self._example.images])
        self._chat = [
            Message(role="system", content=experts.planner_task(self._agent.max_turns)),
            Message(role="user", content=question, images=images),
        ]

    async def _plan(self, last: bool) -> Step:
        *before, latest = self._chat
        content = experts.last_turn(latest.content) if last else latest.content

        async def ask(text: str, sample: int) -> Step:
            chat = [*before, dataclasses.replace(latest, content=text)]
            return experts.read_step(await self._written(self._experts.planner, self.result.planner, chat, sample))

        return await self._first_usable("planner", content, ask)

    def _report(self, pieces: Sequence[str | Shown]) -> None:
        """Tells the planner the result of its step."""
        step, pictures = self._steps[-1], [piece for piece in pieces if isinstance(piece, Shown)]
        words = experts.PAGE if step.kind == "search" else experts.PART
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
        self._record(step, protocol.search(step.thought, step.content), action)
        self.result.planner.searches += 1
        call = await self._experts.planner.search(agent.tool, action.query, agent.k)
        if call.error is not None:
            raise AttemptFailed("search failed", f"{call.tool}: {call.error}")
        pages = sorted(call.passages, key=self._is_no_gold) if self._config.oracle else call.passages
        fresh = agent.fresh(pages, self._shown_ids)
        if bare := [passage.id for passage in fresh if not passage.image]:
            raise AttemptFailed("no picture", f"page {bare[0]!r} of {agent.tool!r} has none")
        self._shown_ids.update(passage.id for passage in fresh)
        return self._observed(protocol.page(call, fresh, fresh, agent.shows))

    def _is_no_gold(self, passage: Passage) -> bool:
        return not any(hop.found_in((passage,)) for hop in self._gold)

    async def _look(self, step: Step) -> list[str | Shown]:
        if self._latest is None:
            raise AttemptFailed("look before a page", step.content)
        (picture, frame), config = self._latest, self._config
        history = [experts.history_line(earlier) for earlier in self._steps]
        prompt = experts.grounder_task(
            self._example.question, history, step.thought, step.content, frame, config.box_scale, config.released
        )

        async def ask(text: str, sample: int) -> tuple[str, Pixels, Shown]:
            chat = [Message(role="user", content=text, images=(picture,))]
            reply = await self._written(self._experts.grounder, self.result.grounder, chat, sample)
            box, thought = experts.read_location(reply, config.released)
            return thought or step.thought, *self._located(box, frame)

        thought, box, crop = await self._first_usable("grounder", prompt, ask)
        if crop.error:
            raise AttemptFailed("no picture", crop.error)
        step = dataclasses.replace(step, thought=thought)
        self._record(step, protocol.look(thought, box), Action(kind="region", box=box))
        return self._observed([crop])

    def _located(self, box: Sequence[float], frame: Size) -> tuple[Pixels, Shown]:
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
        parsed = protocol.parse(text, self._agent.tool)
        is_same = dataclasses.replace(parsed, thought="", error="") == dataclasses.replace(
            action, box=tuple(map(float, action.box))
        )
        if not is_same or not protocol.well_formed(text) or PICTURE in text:
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
        request, last = prompt, None
        for retry in range(self._config.retries + 1):
            try:
                return await ask(request, self._number + retry * self._config.attempts)
            except AttemptFailed as reason:
                if reason.outcome in ("model failed", "no picture"):
                    raise
                last = reason
                self.result.unusable.append(f"{expert}: {reason.outcome}")
                request = experts.retry_prompt(prompt, str(reason))
        assert last is not None
        raise last

    def _encoded(self, image: Any) -> tuple[bytes, Size]:
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
