"""VRAG-RL (arXiv 2505.22019): search of pages with closer looks, and the paper's baselines; and the recipe "vrag_rl"."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from routerl_jax.agents.agent import LLM, Agent, CallingAgent, LearnsFrom, Pieces, Tools
from routerl_jax.agents.chat import Chat, ChatRules, read_turn
from routerl_jax.agents.grammar import opening_ids
from routerl_jax.agents.observation import Look, Marked, Spoken
from routerl_jax.agents.tool_calls import LOOK
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import (
    Action,
    Call,
    Demonstration,
    DemonstrationStep,
    Episode,
    Example,
    Passage,
    Shown,
    Turn,
)
from routerl_jax.data.rounds import RecordedRounds
from routerl_jax.models.images import ImageSource, image_size, smart_resize
from routerl_jax.models.regions import RefusedRegion, RegionRule, Size, reframed
from routerl_jax.recipes.recipe import AgentConfig, Recipe, check_own_protocol
from routerl_jax.recipes.search import StageSettings, stages_of
from routerl_jax.recipes.vrag_rl import protocol
from routerl_jax.recipes.vrag_rl.protocol import PageGrammar, Shows, VRAGCalls, VRAGTags
from routerl_jax.recipes.vrag_rl.rewards import AFTER_SFT

# Pixels per image token of Qwen2.5-VL: the sides of the copies to which recorded boxes refer are multiples of this.
_FACTOR = 28


@dataclasses.dataclass(frozen=True, kw_only=True)
class VRAGAgent(CallingAgent):
    """Searches page images, looks closer at regions of the latest picture, and answers (algorithm 1).

    A search shows the best page that has not been shown yet, or says that none is left. A turn without an action, or with one
    that can't be carried out, is invalid: the policy is told why, and the turn is used up. An answer before the first search
    ends the episode like any other, but counts as an invalid action (section 3.3). After the last turn, the answer is begun for
    the policy.

    Attributes:
      tool: name of the knowledge base.
      max_turns: turns in which the policy may search, look or answer. The paper gives no number; the released code has 4.
      searches: most searches among these turns; 0: every turn may search. A further search is an invalid action.
      k: pages that a search finds, of which `pages` are shown.
      pages: pages shown per search.
      shows: show pages as pictures, or as their text (the paper's OCR form).
      looks: whether there are closer looks. Without them this is the paper's Search-R1-VL and ReAct.
      regions: how the boxes that the policy writes are read.
      max_turn_tokens: most tokens of a turn.
      max_observation_tokens: most tokens of a search's result; 0: as many as there is room for. Text is cut to it.
      answer_tokens: tokens kept free for an answer that is begun for the policy.
      force_answer: begin the answer for a policy that has used up its turns. The paper ends without an answer; the released
        code lets the policy write once more.
      thoughts: let the policy think before an answer that is begun for it.
      recorded_pixels: least and most pixels of the resized copies to which boxes of recorded conversations (`messages:FILE`)
        refer, for rows without `frame_pixels`; (): the boxes are already in the form of this run's model. VRAG-RL's rows refer
        to copies by smart-resize with at most 512 x 28 x 28 pixels.
      instruct: explain the task (for pretrained models). Observations then come as a user's messages.
      grammar: tool calls instead of the tags. Observations then come as a tool's messages.
    """

    searches_field: ClassVar[str] = "searches"

    tool: str
    max_turns: int = 4
    searches: int = 0
    k: int = 10
    pages: int = 1
    shows: Shows = "picture"
    looks: bool = True
    regions: RegionRule = RegionRule()
    max_turn_tokens: int = 512
    max_observation_tokens: int = 0
    answer_tokens: int = 64
    force_answer: bool = True
    thoughts: bool = False
    recorded_pixels: tuple[int, ...] = (4 * 28 * 28, 512 * 28 * 28)
    instruct: bool = False
    grammar: VRAGCalls | None = None

    def __post_init__(self) -> None:
        if self.thoughts:
            self.check_tags("config.agent.settings.thoughts")
        if self.recorded_pixels and not (
            len(self.recorded_pixels) == 2 and 0 < self.recorded_pixels[0] <= self.recorded_pixels[1]
        ):
            setting = f"recorded_pixels={self.recorded_pixels}"
            raise ValueError(f"{setting} must be a least and a most number of pixels, or ()")

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = self.begin(example, llm)
        shown_ids: set[str] = set()
        searches = 0
        for _ in range(self.max_turns):
            action = await chat.act(functools.partial(self.allowed, searches=searches))
            if action is None:
                break
            if action.kind == "answer":
                return chat.episode(answer=action.answer)
            if action.kind == "search":
                searches += 1
                await self.search(action.query, chat, tools, shown_ids)
            elif action.kind == "region" and (crop := self.look(chat)) is not None:
                chat.tell([crop])
            else:
                chat.remind()
        return await chat.final_answer()

    @property
    def form(self) -> PageGrammar:
        """The tool calls, or the tags."""
        grammar = self.grammar or VRAGTags(tools=(self.tool,))
        return dataclasses.replace(
            grammar, looks=self.looks, max_turns=self.max_turns, regions=self.regions, shows=self.shows
        )

    @property
    def rules(self) -> ChatRules:
        return ChatRules(
            protocol=self.form,
            role="tool" if self.functions else "user" if self.instruct else None,
            around="\n",
            max_turn_tokens=self.max_turn_tokens,
            max_observation_tokens=self.max_observation_tokens,
            answer_tokens=self.answer_tokens,
            opening=protocol.ANSWER_OPENING if self.force_answer else None,
            last_stops=("</answer>",),
            thoughts=protocol.THINK if self.thoughts else (),
        )

    @property
    def search_budget(self) -> int:
        """`max_turns`, because every turn may search; or `searches`, if that is less."""
        return min(self.max_turns, self.searches or self.max_turns)

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        """The functions of the grammar; without `looks`, the closer look is left out."""
        return tuple(function for function in super().functions if self.looks or function["function"]["name"] != LOOK)

    def baselines(self, tools: Sequence[str]) -> dict[str, Agent]:
        """The paper's `vanilla_rag` and `react`; and `random_box` and `centre_box`, which move the policy's boxes."""
        baselines = {**self.vanilla_rag(tools), "react": dataclasses.replace(self, looks=False)}
        if not self.looks:
            return baselines
        return {
            **baselines,
            "random_box": MovedBoxes(**self.fields_of(VRAGAgent), to="random"),
            "centre_box": MovedBoxes(**self.fields_of(VRAGAgent), to="centre"),
        }

    def vanilla_rag(self, tools: Sequence[str]) -> dict[str, Agent]:
        return {"vanilla_rag": VanillaRAG(**{**self.fields_of(VRAGAgent), "force_answer": True})}

    def recorded(self, recorded: RecordedRounds) -> Episode:
        """The rounds up to the first answer, each read as in a rollout. An answer after the last turn counts as begun for the
        policy, because the released code asks once more then."""
        self.check_tags("reading recorded rounds")
        turns: list[Turn] = []
        searches = 0
        for number, item in enumerate(recorded.rounds):
            late = number >= self.max_turns
            opening, begun, rest = item.text.rpartition(protocol.ANSWER_OPENING) if late else ("", "", item.text)
            forced = opening + begun
            turn = Turn(text=rest, forced=forced, stop_reason="stop", tokens=0, observation=item.observation)
            action = read_turn(turn, self.form, functools.partial(self.allowed, searches=searches))
            turns.append(turn)
            if action.kind == "answer" or late:
                break
            if action.kind == "search":
                searches += 1
                passages = tuple(Passage(id=id, title="", text="") for id in item.passages)
                turn.calls = [Call(tool=self.tool, query=action.query, passages=passages, error=item.error)]
                turn.shown = [Shown(passage=id) for id in item.passages]
        return self.recorded_episode(recorded.example, turns)

    # --- how it is shown what to write ---

    @property
    def learns_from(self) -> LearnsFrom:
        return "demonstrations"

    def opening(
        self, example: Example, tokenizer: Tokenizer, image_marker: str = "", room: int | None = None
    ) -> list[int]:
        """The token ids of the prompt: the question's pictures, the question, and with `instruct` the explanation of the
        task."""
        question = image_marker * len(example.images) + tokenizer.plain(example.question)
        self.of(tokenizer)  # refuses a model that can't write in this form
        task = self.form.instructions() if self.instruct else None
        return opening_ids(tokenizer, f"Question: {question}", task, self.functions or None)

    def pieces(self, demonstration: Demonstration) -> Pieces:
        """The turns of a demonstration. A step with a box is a closer look, any other a search that finds its passages."""
        pieces: Pieces = []
        shown_ids: set[str] = set()
        for step in demonstration.steps:
            pieces.append((self._written(step), True))
            if step.box:
                pieces.append(
                    (Look(box=step.box, rule=self.regions, render=lambda crop: self.rules.framed([crop])), False)
                )
                continue
            call = Call(tool=step.tool, query=step.query, passages=step.passages)
            fresh = self.fresh(step.passages, shown_ids)
            shown_ids.update(passage.id for passage in fresh)
            pieces.append((self.rules.framed(self.form.page(call, fresh, fresh)), False))
        if not demonstration.forced:
            last = self.form.write_answer(demonstration.thought, demonstration.answer)
            return [*pieces, (self.spoken(lambda _: last), True)]
        opening = protocol.ANSWER_OPENING
        if self.thoughts:
            begins, ends = protocol.THINK
            pieces += [(begins, False), (f"{demonstration.thought}{ends}", True)]
            opening = f"\n{opening}"
        return [*pieces, (opening, False), (f"{demonstration.answer}</answer>", True)]

    def _written(self, step: DemonstrationStep) -> str | Spoken:
        """A turn that searches or looks closer."""

        def write(agent: VRAGAgent) -> str:
            if step.box:
                return agent.form.write_look(step.thought, step.box)
            return agent.form.write_search(step.thought, step.query, agent.tool)

        return self.spoken(write)

    def recorded_pieces(self, recorded: RecordedRounds) -> Pieces:
        self.check_tags("reading recorded rounds")
        pieces: Pieces = []
        latest = recorded.example.images[-1:]
        pixels = self.recorded_pixels if recorded.frame_pixels is None else recorded.frame_pixels
        for number, item in enumerate(recorded.rounds, 1):
            pieces.append((self._marked(item.text, number, latest, pixels), True))
            latest = item.images[-1:] or latest
            if number < len(recorded.rounds):
                pieces.append((self.rules.framed(item.pieces), False))
        return pieces

    def _marked(
        self, text: str, number: int, latest: Sequence[ImageSource], frame_pixels: Sequence[int]
    ) -> str | Marked:
        """A recorded turn whose box will be converted to the frame of the trained model.

        Args:
          latest: the latest picture shown, if there is one.
          frame_pixels: least and most pixels of the copy to which the box refers; empty if the box is already in the form of
            this run's model.

        Raises:
          ValueError: the turn has a box that marks nothing.
        """
        if not frame_pixels or not protocol.has_box(text):
            return text
        action = self.form.parse(text)
        try:
            if action.kind != "region":
                raise RefusedRegion(action.error)
            if not latest:
                raise RefusedRegion("no picture has been shown yet to look closer at")
            wide, high = size = image_size(latest[0])
            rows, columns = smart_resize(high, wide, _FACTOR, *frame_pixels)
            reframed(action.box, size, (columns, rows), size)
        except RefusedRegion as error:
            raise ValueError(
                f"turn {number} of the assistant: {error}. Boxes are read in pixels of copies of {frame_pixels[0]} to "
                f"{frame_pixels[1]} pixels (the row's 'frame_pixels', else config.agent.settings.recorded_pixels, () for boxes "
                "in the run's own frame); mend the row, or leave it out"
            ) from error
        return Marked(
            box=action.box, frame=(columns, rows), rule=self.regions, render=lambda box: protocol.with_box(text, box)
        )

    # --- what a rollout is made of ---

    def allowed(self, action: Action, searches: int) -> Action:
        """An action after so many searches, as it counts. An answer before any search has `error` set."""
        action = dataclasses.replace(action, query=action.query[: protocol.QUERY_LETTERS])
        if action.kind == "region" and not self.looks:
            return dataclasses.replace(action, kind="invalid", error=protocol.NO_REGIONS)
        if action.kind == "search" and 0 < self.searches <= searches:
            return dataclasses.replace(action, kind="invalid", error=protocol.NO_SEARCHES)
        if action.kind == "answer" and not searches:
            return dataclasses.replace(action, error=protocol.UNSEARCHED)
        return action

    def look(self, chat: Chat) -> Shown | None:
        """The region that the latest turn's box marks. None, and the action becomes invalid, if it marks nothing."""
        return chat.look(chat.turn, self.regions)

    def fresh(self, passages: Sequence[Passage], shown_ids: set[str]) -> list[Passage]:
        """The best pages that have not been shown yet."""
        return [passage for passage in passages if passage.id not in shown_ids][: self.pages]

    async def search(self, query: str, chat: Chat, tools: Tools, shown_ids: set[str]) -> None:
        """Searches and shows new pages."""
        tool = tools[self.tool]
        call = await tool.search(query, self.k, pictures=False)
        fresh = self.fresh(call.passages, shown_ids)
        if self.shows == "picture":
            call = await tool.with_pictures(call, fresh)
            fresh = self.fresh(call.passages, shown_ids)
        page = functools.partial(self.form.page, call, fresh)
        shown = await chat.show(call, fresh, page, cut=self.shows == "text")
        shown_ids.update(passage.id for passage in shown or ())


@dataclasses.dataclass(frozen=True, kw_only=True)
class VanillaRAG(VRAGAgent):
    """Gets as many pages for its question as its searches could have shown, then answers (figure 11).

    The agent writes the search in place of the policy.
    """

    async def run(self, example: Example, llm: LLM, tools: Tools) -> Episode:
        chat = self.begin(example, llm)
        question = llm.tokenizer.plain(example.question)
        search = f"{protocol.SEARCH_OPENING}{question}</search>"
        if self.functions:
            search = chat.protocol.write_search("", question, self.tool)
        if chat.tokens_of(search) <= chat.room - chat.reserve:
            chat.write(search).action = Action(kind="search", tool=self.tool, query=example.question)
            await self.search(example.question, chat, tools, set())
        return await chat.final_answer(truncated=False)

    def fresh(self, passages: Sequence[Passage], shown_ids: set[str]) -> list[Passage]:
        return list(passages[: self.pages * self.search_budget])


@dataclasses.dataclass(frozen=True, kw_only=True)
class MovedBoxes(VRAGAgent):
    """The same policy, but its boxes are moved to another part of the picture, with their size kept. The policy's text does not
    change, but it is shown another region. This controls whether it matters where the policy looks.

    Attributes:
      to: a random position (the same in every run), or the centre of the picture.
    """

    to: Literal["random", "centre"]

    def look(self, chat: Chat) -> Shown | None:
        frame, written = chat.frame, chat.turn.action
        crop = chat.look(chat.turn, self.regions)
        if crop is None or frame is None or written is None:
            return crop
        position = (0.5, 0.5)
        if self.to == "random":
            seed = [5, zlib.crc32(chat.example.id.encode()), chat.sample, chat.turn.start]
            position = tuple(np.random.default_rng(seed).random(2).tolist())
        return chat.look(chat.turn, self.regions, moved(written.box, self.regions.box_scale, frame, position))


def moved(box: Sequence[float], box_scale: float, frame: Size, position: Sequence[float]) -> tuple[float, ...]:
    """A box of the same size, as far as it fits, moved within the picture. `position` is relative: at 0 it touches
    the left (top) edge, at 1 the right (bottom) one."""
    sides = (box_scale or frame[0], box_scale or frame[1])
    spans = [min(box[axis + 2], side) - max(box[axis], 0) for axis, side in enumerate(sides)]
    # slightly larger, so that rounding does not make a box too small
    sizes = [min(span * (1 + 1e-9), side) for span, side in zip(spans, sides)]
    starts = [(side - size) * at for side, size, at in zip(sides, sizes, position)]
    return (*starts, *(start + size for start, size in zip(starts, sizes)))


def vrag_rl(agent: AgentConfig, stages: Mapping[str, StageSettings], tools: Sequence[str], normalizer: str) -> Recipe:
    """Builds the recipe from its configuration.

    config.agent.max_searches is the number of turns in which the policy may search, look closer or answer (4 in the released
    code). config.agent.k is the number of pages that a search finds (10), of which the best new one is shown. `shows`, `looks`,
    `regions`, `force_answer` and `thoughts` are in config.agent.settings.

    Raises:
      ValueError: there is not exactly one knowledge base, or no turn; another grammar than `tool_calls`, a prompt, `sees` or
        `on_invalid` is set, which this recipe does not have; or a reward term is unknown.
    """
    check_own_protocol(
        agent,
        "vrag_rl",
        prompt="a prompt of its own, which config.agent.instruct shows",
        instead_of_on_invalid="tells the policy why a turn can't be read",
    )
    if agent.sees:
        raise ValueError(
            f"config.agent.sees={tuple(agent.sees)}: config.recipe='vrag_rl' searches in words alone; leave it empty"
        )
    if len(tools) != 1:
        raise ValueError(
            "config.recipe='vrag_rl' needs one knowledge base, of pages; config.knowledge has "
            f"{', '.join(tools) or 'none'}"
        )
    if not agent.max_searches:
        raise ValueError(
            "config.agent.max_searches=0: config.recipe='vrag_rl' needs a turn at least; 4 is the paper's code's"
        )
    return Recipe(
        agent=VRAGAgent(
            tool=tools[0],
            max_turns=agent.max_searches,
            k=agent.k,
            max_turn_tokens=agent.max_turn_tokens,
            max_observation_tokens=agent.max_observation_tokens,
            answer_tokens=agent.answer_tokens,
            instruct=agent.instruct,
            grammar=VRAGCalls(tools=tuple(tools)) if agent.grammar else None,
        ),
        stages=stages_of(stages, normalizer),
        reward=AFTER_SFT.reward,
    )
