"""VRAG-RL in a chat template that writes as Qwen2.5-VL's: every message by hand, what is learnt, and recorded rounds."""

from __future__ import annotations

import copy
import dataclasses
import json
import pathlib
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken

from routerl_jax.agents.driver import run
from routerl_jax.agents.observation import demonstrated
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.types import Demonstration, DemonstrationStep, Episode, Example, Passage
from routerl_jax.data.rounds import RecordedRounds, Round, write_rounds
from routerl_jax.models.regions import RegionRule
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from tests import seeing
from tests.agents.scripted import SeeingScript, spelled
from tests.programs import launch_here, refusal

# Of messages that are text this writes what Qwen2.5-VL's template does: its system message where there is none.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EXAMPLE = Example(
    id="q", question="How many people?", answers=("32.6M",), metadata={"supporting": ["deck#2"], "type": "fine"}
)
SEARCH = "<think>which page?</think>\n<search>population of Ghana</search>"
LOOK = "<think>too small</think>\n<bbox>[10, 8, 30, 24]</bbox>"
BAD = "<think>hm</think>"
ANSWER = "<think>so</think>\n<answer>32.6M</answer>"
AGENT = VRAGAgent(tool="pages", k=3, max_turn_tokens=200, answer_tokens=40, regions=RegionRule(least=4), instruct=True)


def tokenizer() -> Tokenizer:
    hf = copy.deepcopy(seeing.tokenizer().hf)
    hf.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in ("<|im_start|>", "<|im_end|>")])
    hf.chat_template = TEMPLATE
    return Tokenizer(hf)


@pytest.fixture
def found(tmp_path: pathlib.Path) -> list[Passage]:
    """Three pages of 240 x 320, each seen at 40 x 32 in 20 tokens."""
    for number in range(3):
        Image.fromarray(seeing.picture(number, 240, 320)).save(tmp_path / f"{number}.png")
    return [
        Passage(id=f"deck#{number + 1}", title="Deck", text="", image=str(tmp_path / f"{number}.png"))
        for number in range(3)
    ]


def play(found: list[Passage], *turns: str, agent: VRAGAgent = AGENT, canonical: bool = False) -> Episode:
    class Pages:
        def search(self, queries: Any, k: int) -> list[list[Passage]]:
            return [found[:k] for _ in queries]

    engine: Any = SeeingScript(lambda _e, _s, turn: turns[turn], max_length=4000, canonical=canonical)
    engine.tokenizer = tokenizer()
    (episode,) = run(agent, [EXAMPLE], engine, {"pages": Pages()})
    return episode


def said(episode: Episode) -> str:
    """The whole sequence, each picture once."""
    text = tokenizer().decode(episode.sequences[0].tokens)
    return re.sub(r"(<\|image_pad\|>)+", "<|image_pad|>", text)


def test_every_message(found: list[Passage]) -> None:
    """A search, a look, a turn that is no action, an answer: a system message that says how to work, the question, and what
    follows each turn as a user's message, a page or a crop alone in its own. Where the policy has ended its turn, that is
    not said again."""
    episode = play(found, SEARCH, LOOK, f"{BAD}<|im_end|>", ANSWER)
    (task,) = re.findall(r"^<\|im_start\|>system\n(.*?)<\|im_end\|>\n", said(episode), re.DOTALL)
    assert task.startswith("Find the answer to the question in a collection of pages.")
    assert "You are a helpful assistant" not in said(episode)
    next_turn = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    reminder = episode.turns[2].observation.partition("user\n")[2].partition("<|im_end|>")[0]
    assert reminder.startswith("That could not be done: there is neither")
    assert said(episode) == (
        f"<|im_start|>system\n{task}<|im_end|>\n<|im_start|>user\nQuestion: How many people?<|im_end|>\n"
        f"<|im_start|>assistant\n{SEARCH}{next_turn.format(seeing.MARKER)}{LOOK}{next_turn.format(seeing.MARKER)}"
        f"{BAD}{next_turn.format(reminder)}{ANSWER}"
    )
    assert episode.answer == "32.6M"


def test_what_is_learnt_and_where_pictures_stand(found: list[Passage]) -> None:
    """The turns, token by token as they were sampled, and nothing else; 20 tokens a page, whose times are one position."""
    episode = play(found, SEARCH, LOOK, ANSWER)
    (sequence,) = episode.sequences
    sampled = [id for text in (SEARCH, LOOK, ANSWER) for id in spelled(tokenizer(), text)]
    np.testing.assert_array_equal(sequence.tokens[sequence.loss_mask], sampled)
    pad = tokenizer().encode("<|image_pad|>")[0]
    assert [image.tokens for _, image in sequence.images] == [20, 20]
    for start, image in sequence.images:
        place = slice(start, start + image.tokens)
        assert (sequence.tokens[place] == pad).all()
        assert not sequence.loss_mask[place].any()
        assert len(set(sequence.positions[0, place].tolist())) == 1
        assert tokenizer().decode(sequence.tokens[start - 9 : start]).endswith("user\n<|vision_start|>")
    assert (sequence.tokens == pad).sum() == 40
    assert episode.turns[1].shown[0].box == (80, 60, 240, 180)


def test_an_answer_that_is_begun_goes_on_in_the_assistants_turn(found: list[Passage]) -> None:
    agent = dataclasses.replace(AGENT, max_turns=1)
    episode = play(found, SEARCH, "32.6M</answer>", agent=agent)
    assert said(episode).endswith(f"{seeing.MARKER}<|im_end|>\n<|im_start|>assistant\n<answer>32.6M</answer>")
    (sequence,) = episode.sequences
    assert tokenizer().decode(sequence.tokens[sequence.loss_mask]) == f"{SEARCH}32.6M</answer>"


def test_demonstrations_are_what_a_rollout_records(found: list[Passage]) -> None:
    episode = play(found, SEARCH, LOOK, ANSWER, canonical=True)
    steps = (
        DemonstrationStep(thought="which page?", query="population of Ghana", tool="pages", passages=tuple(found)),
        DemonstrationStep(thought="too small", box=(10, 8, 30, 24)),
    )
    shown = Demonstration(example=EXAMPLE, steps=steps, thought="so", answer="32.6M")
    prompt = AGENT.opening(EXAMPLE, tokenizer(), seeing.MARKER)
    written = demonstrated(prompt, AGENT.pieces(shown), tokenizer(), seeing.image_tokens(1024), AGENT.special_tokens)
    (sequence,) = episode.sequences
    np.testing.assert_array_equal(written.tokens, sequence.tokens)
    np.testing.assert_array_equal(written.loss_mask, sequence.loss_mask)
    np.testing.assert_array_equal(written.positions, sequence.positions)


# --- recorded rounds ---


def recorded(*rounds: Round) -> RecordedRounds:
    return RecordedRounds(example=EXAMPLE, rounds=rounds)


def test_recorded_rounds_are_read_as_a_rollout_is(found: list[Passage]) -> None:
    """The same turns, actions, form, pages and answer as the episode that they were taken from."""
    episode = play(found, SEARCH, SEARCH, LOOK, ANSWER)
    rounds = [
        Round(
            text=turn.text,
            observation="x" if turn.observation else "",
            passages=tuple(item.passage for item in turn.shown if not item.box),
        )
        for turn in episode.turns
    ]
    again = AGENT.recorded(recorded(*rounds, Round(text=SEARCH)))  # what follows an answer is not read
    assert again.answer == episode.answer
    assert [turn.action for turn in again.turns] == [turn.action for turn in episode.turns]
    assert [turn.well_formed for turn in again.turns] == [turn.well_formed for turn in episode.turns]
    assert [[item.passage for item in turn.shown] for turn in again.turns] == [["deck#1"], ["deck#2"], [], []]
    assert [call.query for call in again.calls] == [call.query for call in episode.calls]
    early = AGENT.recorded(recorded(Round(text=ANSWER)))
    assert early.invalid_actions == play(found, ANSWER).invalid_actions == 1


def test_an_answer_after_the_turns_was_begun_for_the_policy() -> None:
    agent = dataclasses.replace(AGENT, max_turns=1)
    late = agent.recorded(recorded(Round(text=SEARCH), Round(text=ANSWER), Round(text=SEARCH)))
    assert [turn.forced for turn in late.turns] == ["", "<think>so</think>\n<answer>"]
    assert (late.answer, late.turns[1].text) == ("32.6M", "32.6M</answer>")
    never = agent.recorded(recorded(Round(text=SEARCH), Round(text=BAD), Round(text=ANSWER)))
    assert (never.answer, len(never.turns)) == (None, 2)


def test_the_program_scores_them(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: the gold page is the second of two (1 / log2 3 of 1), the other attempt answers without a search."""
    rounds = [
        Round(text=SEARCH, tool="search", observation="x", passages=("deck#1",)),
        Round(text=SEARCH, tool="search", observation="x", passages=("deck#2",)),
        Round(text=LOOK, observation="x"),
        Round(text=ANSWER),
    ]
    second = dataclasses.replace(EXAMPLE, id="r")
    path = tmp_path / "rounds.jsonl"
    write_rounds(path, [recorded(*rounds), RecordedRounds(example=second, rounds=(Round(text=ANSWER),))])
    flags = ("--recipe=vrag_rl", "--tools=pages", '--agent={"max_turns": 4}', "--json")
    reward = '--reward={"vrag_rl.ndcg": 1, "vrag_rl.pattern": 1}'
    assert not launch_here("score", f"--trajectories={path}", *flags, reward)
    scores = json.loads(capsys.readouterr().out)
    assert scores["actions"] == {"answer": 2, "region": 1, "search pages": 2}
    metrics = scores["metrics"]
    assert (metrics["em"], metrics["finish_rate"], metrics["forced_rate"]) == (1, 1, 0)
    assert metrics["recall"] == 0.5
    assert scores["reward"]["vrag_rl.ndcg"] == pytest.approx(1 / np.log2(3) / 2)
    assert [one["reward"] for one in scores["episodes"]] == pytest.approx([1 / np.log2(3) + 1, 0])
    assert "asks a judge" in refusal("score", f"--trajectories={path}", *flags)
    path.write_text(path.read_text().replace('["deck#1"]', '"deck#1"'))
    said = refusal("score", f"--trajectories={path}", *flags, reward)
    assert "rounds.jsonl, line 1: key 'rounds', round 1: 'passages' must be a list of ids" in said
