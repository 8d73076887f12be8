"""One attempt at a question by a planner and a grounder (VRAG-RL, arXiv 2505.22019, equations 3 to 6), written down as the
policy would have written and seen it."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from PIL import Image

from routerl_jax.agents.viewer import Viewer
from routerl_jax.core.types import Action, Episode, Example, Message, Passage, Shown, Verdict
from routerl_jax.curation import experts
from routerl_jax.curation.attempts import Attempt, GivenUp, written
from routerl_jax.curation.expert_config import ExpertsConfig
from routerl_jax.curation.experts import Step
from routerl_jax.curation.services import Services
from routerl_jax.data.formats.verl import PICTURE
from routerl_jax.data.rounds import RecordedRounds, Round
from routerl_jax.models.images import decode_image, smart_resize
from routerl_jax.models.regions import Pixels, RefusedRegion, RegionRule, Size, region
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.recipes.vrag_rl import protocol
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.ranges import accepted_answers
from routerl_jax.rewards.retrieval import gold_passages_of
from routerl_jax.training.demonstrations import Worked

T = TypeVar("T")

_SIDE = (
    28  # pixels of an image token of the usual models: pictures of such sides are sent, which they don't resize again
)
_LEAST_PIXELS = 56 * 56  # of a picture as it is sent
_QUALITY = 95  # of it, a JPEG


@dataclasses.dataclass(kw_only=True)
class Tried:
    """What became of an attempt: its outcome and the planner's use, the grounder's, and what it did.

    Attributes:
      unusable: reasons of all replies that could not be used, also where another one could, as "planner: no action".
      actions: search, look, answer, as far as it came.
    """

    planner: Attempt = dataclasses.field(default_factory=Attempt)
    grounder: Attempt = dataclasses.field(default_factory=Attempt)
    unusable: list[str] = dataclasses.field(default_factory=list)
    actions: list[str] = dataclasses.field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """JSON-serialisable."""
        grounder = self.grounder.record()
        return {
            **self.planner.record(),
            "grounder": {key: grounder[key] for key in ("calls", "replies", "prompt_tokens", "tokens")},
            "unusable": self.unusable,
            "actions": self.actions,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """Who makes attempts.

    Attributes:
      agent: the student's.
      student: the policy's tokenizer and processing of pictures.
      planner: with the pages.
      judge: says of an episode's answer whether it is right; None: the metric does.
    """

    agent: VRAGAgent
    student: VisionLanguageModel
    config: ExpertsConfig
    planner: Services
    grounder: Services
    judge: Callable[[Episode], Awaitable[Verdict]] | None = None

    async def attempt(self, example: Example, number: int) -> tuple[Tried, RecordedRounds | None]:
        """Works on a question to the end; the trajectory of a right attempt. Never raises for what the models and the pages
        do.

        Args:
          number: of the attempt, from 0; replies of different attempts differ, above temperature 0.
        """
        course = _Course(self, example, number)
        made = course.made.planner
        try:
            await course.run()
            # boxes are written as the policy writes them
            recorded = RecordedRounds(example=example, rounds=tuple(course.rounds), frame_pixels=())
            await self._check(recorded, made.answer, number)
        except GivenUp as reason:
            made.outcome, made.detail = reason.outcome, str(reason)
            return course.made, None
        return course.made, recorded

    async def _check(self, recorded: RecordedRounds, answer: str, number: int) -> None:
        """Raises GivenUp for what is not worth learning."""
        example, steps = recorded.example, len(recorded.rounds)
        if steps < self.config.least_steps:
            raise GivenUp("too few steps", f"{steps} of at least {self.config.least_steps}")
        if self.judge is None:
            metric = ANSWER_METRICS[self.config.metric]
            if metric(answer, accepted_answers(example, answer), self.config.normalizer) < 1.0:
                raise GivenUp("wrong answer", answer)
        else:
            verdict = await self.judge(Episode(example=example, sample=number, answer=answer, turns=[], sequences=[]))
            if verdict.kind == "failed":
                raise GivenUp("judge failed", verdict.said)
            if verdict.kind == "unreadable":
                raise GivenUp("unreadable verdict", verdict.said)
            if verdict.kind != "right":
                raise GivenUp("wrong answer", answer)
        if self.config.max_length:
            pieces = self.agent.recorded_pieces(recorded)
            length = len(Worked(example, pieces).sequence(self.agent, self.student))
            if length > self.config.max_length:
                raise GivenUp("too long", f"{length} tokens")


class _Course:
    """An attempt while it runs."""

    def __init__(self, experts_: Experts, example: Example, number: int) -> None:
        self.made = Tried()
        self.rounds: list[Round] = []
        self._experts, self._example, self._number = experts_, example, number
        self._agent, self._config = experts_.agent, experts_.config
        self._gold = gold_passages_of(example)
        self._viewer = Viewer(experts_.student.image_tokens)
        self._known: set[str] = set()  # ids of pages that were shown
        self._done: list[Step] = []
        self._chat: list[Message] = []  # the planner's
        self._latest: tuple[bytes, Size] | None = None  # the latest picture as experts got it

    async def run(self) -> None:
        """Adds rounds up to the answer. Raises GivenUp."""
        self._begin()
        for left in reversed(range(self._agent.max_turns)):
            step = await self._plan(last=not left)
            if step.kind == "answer":
                if all(done.kind != "search" for done in self._done):
                    raise GivenUp("answer before a search", step.content)
                self.made.planner.answer = step.content
                action = Action(kind="answer", answer=step.content)
                self._book(step, protocol.answer(step.thought, step.content), action)
                return
            if not left:
                break
            self._tell(await self._search(step) if step.kind == "search" else await self._look(step))
        raise GivenUp("no answer", f"in {self._agent.max_turns} turns")

    # --- the planner ---

    def _begin(self) -> None:
        asked = experts.planner_question(self._example.question)
        images = self._see([Shown(image=image) for image in self._example.images])
        self._chat = [
            Message(role="system", content=experts.planner_task(self._agent.max_turns)),
            Message(role="user", content=asked, images=images),
        ]

    async def _plan(self, last: bool) -> Step:
        *before, said = self._chat
        content = experts.last_turn(said.content) if last else said.content

        async def ask(text: str, sample: int) -> Step:
            chat = [*before, dataclasses.replace(said, content=text)]
            return experts.read_step(await self._written(self._experts.planner, self.made.planner, chat, sample))

        return await self._usable("planner", content, ask)

    def _tell(self, said: Sequence[str | Shown]) -> None:
        """Tells the planner what its step has brought."""
        step, shown = self._done[-1], [piece for piece in said if isinstance(piece, Shown)]
        words = experts.PAGE if step.kind == "search" else experts.PART
        content = words if shown else " ".join(piece for piece in said if isinstance(piece, str))
        written_ = f"<thought>{step.thought}</thought>\n<{step.kind}>{step.content}</{step.kind}>"
        self._chat += [
            Message(role="assistant", content=written_),
            Message(role="user", content=content, images=self._see(shown)),
        ]

    def _see(self, shown: Sequence[Shown]) -> tuple[bytes, ...]:
        """Takes note of what is shown; the pictures as experts get them."""
        try:
            self._viewer.see(shown)
        except ValueError as error:
            raise GivenUp("no picture", str(error)) from error
        sent = [self._sent(item.image) for item in shown]
        self._latest = sent[-1] if sent else self._latest
        return tuple(picture for picture, _ in sent)

    # --- what follows its steps ---

    async def _search(self, step: Step) -> list[str | Shown]:
        agent = self._agent
        action = Action(kind="search", tool=agent.tool, query=step.content)
        self._book(step, protocol.search(step.thought, step.content), action)
        self.made.planner.searches += 1
        call = await self._experts.planner.search(agent.tool, action.query, agent.k)
        if call.error is not None:
            raise GivenUp("search failed", f"{call.tool}: {call.error}")
        found = sorted(call.passages, key=self._is_no_gold) if self._config.oracle else call.passages
        fresh = agent.fresh(found, self._known)
        if bare := [passage.id for passage in fresh if not passage.image]:
            raise GivenUp("no picture", f"page {bare[0]!r} of {agent.tool!r} has none")
        self._known.update(passage.id for passage in fresh)
        return self._followed(protocol.page(call, fresh, fresh, agent.shows))

    def _is_no_gold(self, passage: Passage) -> bool:
        return not any(hop.found_in((passage,)) for hop in self._gold)

    async def _look(self, step: Step) -> list[str | Shown]:
        if self._latest is None:
            raise GivenUp("look before a page", step.content)
        (picture, frame), config = self._latest, self._config
        history = [experts.history_line(done) for done in self._done]
        said = experts.grounder_task(
            self._example.question, history, step.thought, step.content, frame, config.box_scale, config.released
        )

        async def ask(text: str, sample: int) -> tuple[str, Pixels, Shown]:
            chat = [Message(role="user", content=text, images=(picture,))]
            reply = await self._written(self._experts.grounder, self.made.grounder, chat, sample)
            box, thought = experts.read_location(reply, config.released)
            return thought or step.thought, *self._located(box, frame)

        thought, box, crop = await self._usable("grounder", said, ask)
        if crop.error:
            raise GivenUp("no picture", crop.error)
        step = dataclasses.replace(step, thought=thought)
        self._book(step, protocol.look(thought, box), Action(kind="region", box=box))
        return self._followed([crop])

    def _located(self, box: Sequence[float], frame: Size) -> tuple[Pixels, Shown]:
        """A grounder's box in the policy's frame, and what the policy is shown for that.

        Args:
          frame: of the picture that the grounder has got.
        """
        try:
            view = dataclasses.replace(self._viewer.view(), frame=frame)
            pixels = region(box, view, RegionRule(box_scale=self._config.box_scale, least=1))
            written_ = self._viewer.written(pixels, self._agent.regions)
            return written_, self._viewer.region(written_, self._agent.regions)
        except RefusedRegion as error:
            raise GivenUp("refused box", str(error)) from error
        except ValueError as error:
            raise GivenUp("no picture", str(error)) from error

    # --- what is written down ---

    def _book(self, step: Step, text: str, action: Action) -> None:
        """Adds a round of the policy's. Raises GivenUp where the policy's own parser reads anything else in it."""
        read = protocol.parse(text, self._agent.tool)
        same = dataclasses.replace(read, thought="", error="") == dataclasses.replace(
            action, box=tuple(map(float, action.box))
        )
        if not same or not protocol.well_formed(text) or PICTURE in text:
            raise GivenUp("out of form", text[:200])
        self.rounds.append(Round(text=text, tool=action.tool))
        self.made.actions.append(step.kind)
        self._done.append(step)

    def _followed(self, said: list[str | Shown]) -> list[str | Shown]:
        """Adds what the policy is shown after its latest round."""
        images = tuple(piece.image for piece in said if isinstance(piece, Shown))
        observation = "".join(piece if isinstance(piece, str) else PICTURE for piece in said)
        self.rounds[-1] = dataclasses.replace(self.rounds[-1], observation=observation, images=images)
        return said

    # --- asking ---

    async def _written(self, services: Services, made: Attempt, chat: Sequence[Message], sample: int) -> str:
        config = self._config
        return await written(
            services, chat, made, max_tokens=config.max_tokens, temperature=config.temperature, sample=sample
        )

    async def _usable(self, who: str, said: str, ask: Callable[[str, int], Awaitable[T]]) -> T:
        """What a reply comes to that can be used; an expert is asked again, and told why, where it can't. Raises GivenUp after
        `config.retries`."""
        asked, last = said, None
        for retry in range(self._config.retries + 1):
            try:
                return await ask(asked, self._number + retry * self._config.attempts)
            except GivenUp as reason:
                if reason.outcome in ("model failed", "no picture"):
                    raise
                last = reason
                self.made.unusable.append(f"{who}: {reason.outcome}")
                asked = experts.again(said, str(reason))
        assert last is not None
        raise last

    def _sent(self, image: Any) -> tuple[bytes, Size]:
        """A picture as the experts get it, and its size there."""
        try:
            picture = decode_image(image)
            high, wide = smart_resize(picture.height, picture.width, _SIDE, _LEAST_PIXELS, self._config.picture_pixels)
        except ValueError as error:
            raise GivenUp("no picture", str(error)) from error
        buffer = io.BytesIO()
        resized = picture.resize((wide, high), Image.Resampling.BICUBIC)
        resized.save(buffer, "JPEG", quality=_QUALITY, subsampling=0)
        return buffer.getvalue(), (wide, high)
