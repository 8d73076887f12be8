"""What models write is read in time that grows with its length, whatever they repeat (steps are counted, not seconds)."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from routerl_jax.agents.grammar import GRAMMARS, Grammar, between
from routerl_jax.agents.tool_calls import FORMS, TAGS, ToolCalls
from routerl_jax.core.secrets import masked
from routerl_jax.core.text import sentence_ends, split_thoughts
from routerl_jax.core.types import Episode, Example, Turn
from routerl_jax.extras.baselines.baseline import boxed, extracted, tidied
from routerl_jax.extras.baselines.rounds import parse_action
from routerl_jax.extras.policy_server.policy import read_calls
from routerl_jax.knowledge.graph.triples import whole_strings
from routerl_jax.recipes.mmsearch_r1.protocol import STOPS, MMSearchCalls, MMSearchTags, form
from routerl_jax.recipes.r1_router.steps import AnswerTags, RouteTags
from routerl_jax.recipes.vrag_rl.protocol import VRAGTags, has_box, with_box
from routerl_jax.recipes.vrag_rl.rewards import pattern
from routerl_jax.services.judge_styles import read_verdict
from tests.steps import growth

MOST = 6  # of steps for four times the text; quadratic reading takes 12 times as many and more
TOOLS = {"routerag": ("passage", "graph")}


def protocols() -> list[Grammar]:
    named = [GRAMMARS.get(name)(tools=TOOLS.get(name, ("text",))) for name in GRAMMARS if not name.endswith("_answer")]
    images = {"tools": ("image", "text"), "image_tool": "image"}
    own = [RouteTags(tools=("text",)), AnswerTags(tools=("text",)), VRAGTags(tools=("text",))]
    forms = [ToolCalls(tools=("text",), form=name) for name in FORMS]
    return [*named, *own, *forms, MMSearchTags(**images), MMSearchCalls(**images)]


@pytest.mark.parametrize("grammar", protocols(), ids=lambda grammar: type(grammar).__name__)
def test_a_turn_is_read_in_linear_time_whatever_it_repeats(grammar: Grammar) -> None:
    tags = dict.fromkeys(
        [*grammar.special_tokens, *TAGS, *STOPS, "<think>", "</think>", "<|im_end|>", " ", "\n", "{", '"']
    )
    closings = "".join(tag for tag in tags if "/" in tag)
    for tag, before in itertools.product(tags, ("", "<think>a</think>")):
        for work in (grammar.parse, grammar.well_formed):
            assert growth(work, functools.partial(repeated, tag, before, f"x{closings}x")) < MOST, (tag, work.__name__)


def repeated(tag: str, before: str, after: str, times: int) -> str:
    return before + tag * times + after


def released_pattern(text: str) -> float:
    episode = Episode(
        example=Example(id="q", question="?", answers=("a",)), sample=0, answer=None, turns=[], sequences=[]
    )
    episode.turns = [Turn(text=text, stop_reason="stop", tokens=1)]
    return pattern(episode, variant="released")


@pytest.mark.parametrize(
    ("work", "text_of"),
    [
        (split_thoughts, lambda n: "<think>a</think>b" * n),
        (lambda text: between(text, "<a>", "</a>"), lambda n: "<a>" * n + "</a>" * n),
        (parse_action, lambda n: "Thought: so Action: search[" * n),
        (boxed, lambda n: "\\boxed{" + "\\text{" * 3 * n + "\n" + "}" * (3 * n + 1)),
        (tidied, lambda n: "a" + "[1]" * n + "x"),
        (tidied, lambda n: "**" * n + "a**"),
        (extracted, lambda n: "answer is: " * n),
        (extracted, lambda n: "answer:\n" * n),
        (sentence_ends, lambda n: "." * n + "x"),
        (sentence_ends, lambda n: "1. " * n),
        (read_calls, lambda n: "<tool_call>" + " " * n + "x"),
        (read_calls, lambda n: "<tool_call>" * n),
        (masked, lambda n: "https://a?key=" * n),
        (masked, lambda n: "Bearer 'token': '" * n),
        (lambda text: whole_strings(text, "facts"), lambda n: '{"facts": ["' + '\\"' * n),
        (read_verdict, lambda n: "verdict: " * n),
        (read_verdict, lambda n: "<judge>" * n),
        (has_box, lambda n: "<bbox><region>" * n),
        (lambda text: with_box(text, (1, 2, 3, 4)), lambda n: "<bbox>" * n + "</region>" * n),
        (released_pattern, lambda n: "<search><answer>" * n),
        (lambda text: form(text, released=True), lambda n: f"<reason></reason>{'<answer>' * n}{'</answer>' * n}x"),
    ],
)
def test_other_replies_are_read_in_linear_time(work: Callable[[str], Any], text_of: Callable[[int], str]) -> None:
    assert growth(work, text_of) < MOST


def test_a_box_is_written_into_the_pairs_of_tags_that_are_closed() -> None:
    text = "<think><bbox>0</bbox></think><bbox>1<bbox>2</bbox> <region>3</region><region>4"
    assert with_box(text, (5, 6, 7, 8)) == (
        "<think><bbox>0</bbox></think><bbox>[5, 6, 7, 8]</bbox> <region>[5, 6, 7, 8]</region><region>4"
    )
    assert has_box(text)
    assert not has_box("<think><bbox>0</bbox></think><bbox>1</region>")
