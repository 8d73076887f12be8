"""MMSearch-R1, VRAG-RL and R1-Router by tool calls: the tokens of the chat template, what is learnt, the papers' rewards."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image

from configs import mmsearch_r1_qwen25_vl_7b, r1_router_qwen25_vl_7b, vrag_rl_qwen25_vl_3b, vrag_rl_qwen25_vl_7b
from routerl_jax.agents.agent import Agent
from routerl_jax.agents.driver import run
from routerl_jax.agents.observation import demonstrated
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.types import Demonstration, DemonstrationStep, Episode, Example, Passage, TextAndImage
from routerl_jax.data.readers import open_dataset
from routerl_jax.data.rounds import RecordedRounds
from routerl_jax.evaluation.records import episode_record
from routerl_jax.recipes.mmsearch_r1.protocol import REFUSAL
from routerl_jax.recipes.mmsearch_r1.rewards import RELEASED_REWARD as MMSEARCH_RELEASED
from routerl_jax.recipes.mmsearch_r1.rewards import REWARD as MMSEARCH_REWARD
from routerl_jax.recipes.r1_router.agents import StepAgent
from routerl_jax.recipes.r1_router.rewards import RELEASED_REWARD as ROUTER_RELEASED
from routerl_jax.recipes.r1_router.rewards import REWARD as ROUTER_REWARD
from routerl_jax.recipes.r1_searcher import STAGE_1
from routerl_jax.recipes.recipe import AgentConfig
from routerl_jax.recipes.vrag_rl.rewards import RELEASED, reward
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.training import config as schema
from routerl_jax.training.demonstrations import open_demonstrations
from routerl_jax.training.setup import build_recipe
from tests import seeing
from tests.agents import chat_templates as templates
from tests.agents.scripted import SeeingScript
from tests.data.trajectories import CAPITAL, write

NAMES = tuple(templates.TEMPLATES)
PICTURE, PAGE = seeing.picture(0), seeing.picture(7, 240, 320)
FLAG = Example(id="q", question="What is its capital?", answers=("Accra",), images=(PICTURE,))
SMALL_PRINT = Example(id="q", question="How many?", answers=("42",), metadata={"supporting": ["deck#1"]})


def tokenizer(name: str) -> Any:
    return templates.tokenizer(templates.TEMPLATES[name], seeing.tokenizer())


def end(name: str) -> str:
    return "<|eot_id|>" if name == "llama31" else "<|im_end|>"


def call(name: str, function: str, thought: str = "hm", **arguments: Any) -> str:
    """A turn with a call, as the template writes it, with the token that ends it."""
    key = "parameters" if name == "llama31" else "arguments"
    written = f'{{"name": "{function}", "{key}": {json.dumps(arguments)}}}'
    if name == "llama31":
        return written + end(name)
    return f"{thought}\n<tool_call>\n{written}\n</tool_call>{end(name)}"


def picture(pixels: np.ndarray) -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


class Finds:
    """Finds the same passages, whatever is asked, and keeps what that was."""

    def __init__(self, *found: Passage) -> None:
        self.found = list(found)
        self.asked: list[Any] = []

    def search(self, queries: Sequence[Any], k: int) -> list[list[Passage]]:
        self.asked += queries
        return [self.found[:k] for _ in queries]


def made(recipe: str, tools: Sequence[str], reward: Any = None, grammar: str = "tool_calls", **agent: Any) -> Any:
    """The agent of a run's configuration."""
    config = schema.TrainConfig(
        recipe=recipe,
        model=schema.ModelConfig(path="somewhere"),
        agent=AgentConfig(
            **{"grammar": grammar, "k": 2, "max_turn_tokens": 400, "answer_tokens": 40, "instruct": True, **agent}
        ),
        knowledge={tool: schema.KnowledgeConfig(source="atlas/text") for tool in tools},
        stages={"main": schema.StageConfig(reward=reward or {"em": 1.0})},
    )
    return build_recipe(config).agent


def play(
    name: str, agent: Agent, example: Example, tools: dict[str, Any], *turns: str, canonical: bool = True, **engine: Any
) -> tuple[Episode, Any]:
    """An episode in one conversation, of these turns."""
    script = SeeingScript(lambda _e, _s, turn: turns[turn], canonical=canonical, **{"max_length": 9000, **engine})
    script.tokenizer = tokenizer(name)
    (episode,) = run(agent, [example], script, tools)
    return episode, script


def check_chat(
    name: str, episode: Episode, engine: Any, messages: list[dict[str, Any]], functions: Sequence[Any], last: str
) -> None:
    """The episode's tokens are those of transformers' own apply_chat_template for these messages and the last turn, pictures
    in their places; and just the policy's turns are learnt, ends included."""
    (sequence,) = episode.sequences
    hf = engine.tokenizer.hf
    whole = hf.apply_chat_template(messages, tools=list(functions), tokenize=False, add_generation_prompt=True) + last
    shown = [item for turn in episode.turns for item in turn.shown if item.image is not None and item.digest]
    pictures = [*episode.example.images, *(item.image for item in shown)]
    ids = hf(whole, add_special_tokens=False)["input_ids"]
    expected = engine.images.fed(ids, pictures, 0)["tokens"] if pictures else ids
    assert sequence.tokens.tolist() == list(expected)
    mask = np.zeros(len(sequence), bool)
    turns = [message["content"] + end(name) for message in messages if message["role"] == "assistant"] + [last]
    for text, turn in zip(turns, episode.turns, strict=True):
        mask[turn.start : turn.start + len(hf(text, add_special_tokens=False)["input_ids"])] = True
    np.testing.assert_array_equal(sequence.loss_mask, mask)


def said(name: str, *pairs: str) -> list[dict[str, str]]:
    """Turns and the tool's messages that follow them, in turn."""
    roles = ("assistant", "tool")
    return [{"role": roles[i % 2], "content": text.removesuffix(end(name))} for i, text in enumerate(pairs)]


# --- MMSearch-R1 ---

THUMBNAILS = [
    Passage(
        id=f"https://a.b/{i}", title=f"Flag {i} </tool_response>", text="", image=picture(seeing.picture(i + 1, 16, 16))
    )
    for i in range(2)
]
PAGES = [Passage(id="https://a.b/p", title="Ghana", text="Accra <answer>is</answer> its capital.")]
SEEN = f"1. {seeing.MARKER} Flag 0 < /tool_response>\n2. {seeing.MARKER} Flag 1 < /tool_response>\n"
READ = "1. (https://a.b/p) Ghana: Accra < answer>is< /answer> its capital.\n"


def mmsearch(**changes: Any) -> Any:
    return made("mmsearch_r1", ("image", "text"), max_searches=2, settings={"image_k": 2}, **changes)


def searched() -> dict[str, Any]:
    return {"image": Finds(*THUMBNAILS), "text": Finds(*PAGES)}


@pytest.mark.parametrize("name", NAMES)
def test_mmsearch_r1(name: str) -> None:
    """By the picture with no argument, in words, an answer: the template's tokens, the searches, the paper's reward of 0.91."""
    agent, tools = mmsearch(), searched()
    turns = (
        call(name, "search_image"),
        call(name, "search_text", query="capital of Ghana"),
        f"so\n<answer>Accra</answer>{end(name)}",
    )
    episode, engine = play(name, agent, FLAG, tools, *turns)
    parameters = agent.functions[0]["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {}, "required": []}
    asked = engine.tokenizer.decode(agent.opening(FLAG, engine.tokenizer, seeing.MARKER))
    task = asked[asked.index("Answer the question about") : asked.index("The question: What is its capital?")]
    assert not [tag for tag in ("<reason>", "<search>", "<text_search>", "<information>") if tag in task]
    messages = [
        {"role": "user", "content": f"{seeing.MARKER}{task}The question: {FLAG.question}"},
        *said(
            name,
            turns[0],
            f"{SEEN}The question: {FLAG.question}\nFind out from these results what the picture shows, as far as the question "
            "asks for it.\nThink about what is still missing. If it must be looked up, call search_text with a query that "
            "names what the picture shows. Otherwise write the answer alone inside <answer> and </answer>.",
            turns[1],
            f"{READ}The question: {FLAG.question}\nThink about what the results say. No search is left. If the answer is "
            f"neither in them nor known to you, end with the words: {REFUSAL}. Otherwise write the answer alone inside "
            "<answer> and </answer>.",
        ),
    ]
    check_chat(name, episode, engine, messages, agent.functions, turns[2])
    assert isinstance(tools["image"].asked[0], TextAndImage)
    assert tools["text"].asked == ["capital of Ghana"]
    assert [(one.tool, one.query, bool(one.image)) for one in episode.calls] == [
        ("image", "", True),
        ("text", "capital of Ghana", False),
    ]
    (row,) = RewardFunction(dict(MMSEARCH_REWARD))([episode])
    assert row["total"] == pytest.approx(0.91)
    steps = (
        DemonstrationStep(thought="hm", tool="image", passages=tuple(THUMBNAILS)),
        DemonstrationStep(thought="hm", tool="text", query="capital of Ghana", passages=tuple(PAGES)),
    )
    check_demonstration(agent, FLAG, engine, episode, steps, "Accra")


def check_demonstration(
    agent: Any, example: Example, engine: Any, episode: Episode, steps: Sequence[DemonstrationStep], answer: str
) -> None:
    """A demonstration is what the rollout recorded."""
    shown = Demonstration(example=example, steps=tuple(steps), thought="so", answer=answer)
    opening: Any = agent.opening(example, engine.tokenizer, seeing.MARKER)
    if example.images:
        opening = engine.images.fed(opening, list(example.images), 0)
    written = demonstrated(
        opening, agent.pieces(shown), engine.tokenizer, engine.images, agent.special_tokens, example.images
    )
    (sequence,) = episode.sequences
    np.testing.assert_array_equal(written.tokens, sequence.tokens)
    np.testing.assert_array_equal(written.loss_mask, sequence.loss_mask)
    np.testing.assert_array_equal(written.positions, sequence.positions)


IMAGE, TEXT = call("qwen25", "search_image"), call("qwen25", "search_text", query="capital")
RIGHT, OTHER = "so\n<answer>Accra</answer><|im_end|>", "so\n<answer>Lagos</answer><|im_end|>"
REFUSED = f"no\n{REFUSAL}.<|im_end|>"
BAD = IMAGE.replace("{}", '{"query": "x"}')
# turns -> (equation 1, kinds of actions): as with the paper's tags (test_mmsearch_r1.TOTALS)
MMSEARCH: dict[str, tuple[tuple[str, ...], float, list[str]]] = {
    "known": ((RIGHT,), 1.0, ["answer"]),
    "searched": ((TEXT, RIGHT), 0.91, ["search", "answer"]),
    "formless": (("<tool_call>" + RIGHT, "Accra</answer>"), 0.9, ["invalid", "answer"]),
    "wrong": ((IMAGE, OTHER), 0.1, ["search", "answer"]),
    "refused": ((IMAGE, REFUSED), 0.0, ["search", "refusal"]),
    "twice": ((TEXT, TEXT, "Accra</answer>"), 0.81, ["search", "invalid", "answer"]),
    "late": ((TEXT, IMAGE, "Accra</answer>"), 0.81, ["search", "invalid", "answer"]),
    "argument": ((BAD, "Accra</answer>"), 0.9, ["invalid", "answer"]),
}


@pytest.mark.parametrize("plan", MMSEARCH)
def test_mmsearch_r1_s_reward(plan: str) -> None:
    """Limits, the price of a search and the form; what is wrong is said in a tool's message before an answer is begun."""
    turns, total, kinds = MMSEARCH[plan]
    episode, engine = play("qwen25", mmsearch(), FLAG, searched(), *turns)
    assert [turn.action.kind for turn in episode.turns if turn.action] == kinds
    (row,) = RewardFunction(dict(MMSEARCH_REWARD))([episode])
    assert row["total"] == pytest.approx(total)
    if "invalid" in kinds:
        wrong, last = episode.turns[kinds.index("invalid")], episode.turns[-1]
        assert wrong.action is not None
        assert wrong.action.error
        assert f"<tool_response>\nError: {wrong.action.error}.\n</tool_response>" in wrong.observation
        assert last.forced == "<answer>"
        text = engine.tokenizer.decode(episode.sequences[0].tokens)
        assert "<|im_start|>assistant\n<answer>Accra</answer>" in text
    if kinds[-1] == "refusal":
        assert all(turn.well_formed for turn in episode.turns)
        paid = {**MMSEARCH_REWARD, "mmsearch_r1.format": {"weight": 0.1, "refusal": True}}
        assert RewardFunction(paid)([episode])[0]["total"] == pytest.approx(0.1)


def test_mmsearch_r1_s_baselines() -> None:
    agents = mmsearch().baselines(("image", "text"))
    direct, engine = play("qwen25", agents["direct"], FLAG, searched(), "Accra</answer>")
    text = engine.tokenizer.decode(direct.sequences[0].tokens)
    assert (direct.answer, direct.calls) == ("Accra", [])
    assert "search_image" not in text  # it is shown no functions
    assert text.endswith("<|im_start|>assistant\n<answer>Accra</answer>")
    both, engine = play(
        "qwen25", agents["rag_workflow"], FLAG, searched(), 'Ghana"}}\n</tool_call><|im_end|>', "Accra</answer>"
    )
    assert [(one.tool, one.query) for one in both.calls] == [("image", ""), ("text", "Ghana")]
    assert both.answer == "Accra"
    text = engine.tokenizer.decode(both.sequences[0].tokens)
    for written in (call("qwen25", "search_image", ""), call("qwen25", "search_text", "", query="Ghana")):
        assert f"<|im_start|>assistant\n{written.lstrip()}\n<|im_start|>user\n<tool_response>\n" in text


def test_a_turn_that_is_cut_off_or_too_long_to_answer_is_ended_in_the_template_s_form() -> None:
    agent = dataclasses.replace(mmsearch(), max_turn_tokens=8)
    episode, engine = play("qwen25", agent, FLAG, searched(), TEXT, "Accra</answer>")
    assert (episode.turns[0].stop_reason, episode.turns[0].well_formed, episode.truncated) == ("length", False, True)
    assert episode.turns[0].observation.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\nError: ")
    whole, _ = play("qwen25", mmsearch(), FLAG, searched(), TEXT, RIGHT)
    length = whole.turns[1].start - len(engine.tokenizer.encode(READ)) + 60
    short, engine = play("qwen25", mmsearch(), FLAG, searched(), TEXT, "Accra</answer>", max_length=length)
    assert "too long to be shown" in short.turns[0].observation
    assert (short.answer, short.turns[-1].forced, short.truncated) == ("Accra", "<answer>", True)
    assert len(short.sequences[0]) <= length


# --- VRAG-RL ---

DECK = [
    Passage(id="deck#1", title="Deck", text="not shown", image=picture(PAGE)),
    Passage(id="deck#2", title="Deck", text="two", image=picture(seeing.picture(8, 240, 320))),
]


def vrag(**changes: Any) -> Any:
    settings = {"regions": {"least": 4}, **changes.pop("settings", {})}
    return made("vrag_rl", ("pages",), max_searches=4, settings=settings, **{"k": 10, **changes})


@pytest.mark.parametrize("name", NAMES)
def test_vrag_rl(name: str) -> None:
    """A page, a box that marks nothing, a region, an answer: the template's tokens, the crop by hand, the paper's reward."""
    agent, tools = vrag(), {"pages": Finds(*DECK)}
    turns = (
        call(name, "search_pages", query="population"),
        call(name, "look_closer", box=[1, 2, 3]),
        call(name, "look_closer", box=[10, 8, 30, 24]),
        f"so\n<answer>42</answer>{end(name)}",
    )
    episode, engine = play(name, agent, SMALL_PRINT, tools, *turns)
    task = agent.opening(SMALL_PRINT, engine.tokenizer)
    system = engine.tokenizer.decode(task)
    system = system[
        system.index("Find the answer") : system.index("Mount Kenya</answer>.") + len("Mount Kenya</answer>.")
    ]
    assert "call search_pages with a search query" in system
    assert "call look_closer with a box around it, [left, top, right, bottom], in pixels" in system
    assert not [tag for tag in ("<think>", "<search>", "<bbox>") if tag in system]
    wrong = episode.turns[1].action
    assert wrong is not None
    assert "3 numbers" in wrong.error
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Question: How many?"},
        *said(name, turns[0], seeing.MARKER, turns[1], f"Error: {wrong.error}.", turns[2], seeing.MARKER),
    ]
    check_chat(name, episode, engine, messages, agent.functions, turns[3])
    assert [turn.action.kind for turn in episode.turns if turn.action] == ["search", "invalid", "region", "answer"]
    (crop,) = episode.turns[2].shown
    assert (crop.passage, crop.box) == ("deck#1", (80, 60, 240, 180))
    clean, engine = play(name, agent, SMALL_PRINT, {"pages": Finds(*DECK)}, turns[0], turns[2], turns[3])
    steps = (
        DemonstrationStep(thought="hm", tool="pages", query="population", passages=tuple(DECK)),
        DemonstrationStep(thought="hm", box=(10, 8, 30, 24)),
    )
    check_demonstration(agent, SMALL_PRINT, engine, clean, steps, "42")
    terms = reward(0.1, outcome="em")
    rows = RewardFunction(dict(terms))([episode, clean])
    assert [row["total"] for row in rows] == pytest.approx([0.9, 1.0])  # the pattern is not kept with a wrong box


def test_vrag_rl_s_turns_are_read_as_its_tags_are() -> None:
    """The same plans in tags and in calls: equal actions, records, rewards and baselines."""
    tags = {
        "search": "<think>hm</think>\n<search>population</search>",
        "look": "<think>hm</think>\n<bbox>[10, 8, 30, 24]</bbox>",
        "answer": "<think>so</think>\n<answer>42</answer>",
        "bad": "<think>hm</think>",
        "begun": "42</answer>",
    }
    calls = {
        "search": call("qwen25", "search_pages", query="population"),
        "look": call("qwen25", "look_closer", box=[10, 8, 30, 24]),
        "answer": "so\n<answer>42</answer><|im_end|>",
        "bad": "hm<|im_end|>",
        "begun": "42</answer>",
    }
    plans = (
        ("search", "look", "answer"),
        ("search", "search", "search", "answer"),
        ("look", "search", "answer"),
        ("answer",),
        ("bad", "search", "look", "look", "begun"),
    )
    ours, papers = vrag(), vrag(grammar="")
    for one, other in (
        (ours, papers),
        (ours.baselines(("pages",))["react"], papers.baselines(("pages",))["react"]),
        (ours.baselines(("pages",))["centre_box"], papers.baselines(("pages",))["centre_box"]),
    ):
        pairs = []
        for plan in plans:
            if plan[-1] != "begun" and not one.looks and "look" in plan:
                continue
            pairs.append(
                [
                    play("qwen25", agent, SMALL_PRINT, {"pages": Finds(*DECK)}, *(form[step] for step in plan))[0]
                    for agent, form in ((one, calls), (other, tags))
                ]
            )
        for mine, paper in pairs:
            assert mine.answer == paper.answer == "42"
            for a, b in zip(mine.turns, paper.turns, strict=True):
                assert a.action is not None
                assert b.action is not None
                assert (a.action.kind, a.action.query, a.action.box) == (b.action.kind, b.action.query, b.action.box)
                assert [(c.passage, c.box) for c in a.shown] == [(c.passage, c.box) for c in b.shown]
                assert a.well_formed == b.well_formed
        totals = [
            [row["total"] for row in RewardFunction(dict(reward(0.1, outcome="em")))(list(episodes))]
            for episodes in zip(*pairs)
        ]
        assert totals[0] == pytest.approx(totals[1])
    looks = [one["function"]["name"] for one in ours.baselines(("pages",))["react"].functions]
    assert looks == ["search_pages"]
    once, engine = play(
        "qwen25", ours.baselines(("pages",))["vanilla_rag"], SMALL_PRINT, {"pages": Finds(*DECK)}, "42</answer>"
    )
    assert (once.answer, [one.query for one in once.calls]) == ("42", ["How many?"])
    assert [item.passage for item in once.turns[0].shown] == ["deck#1", "deck#2"]
    assert call("qwen25", "search_pages", "", query="How many?").lstrip() in engine.tokenizer.decode(
        once.sequences[0].tokens
    )


@pytest.mark.parametrize("name", NAMES)
def test_episodes_in_a_chat_are_learnt_from_as_they_were_recorded(name: str, tmp_path: pathlib.Path) -> None:
    """Their observations have the template's marks, which are no text of a page."""
    turns = (call(name, "search_pages", query="population"), f"<answer>42</answer>{end(name)}")
    episode, engine = play(name, vrag(), SMALL_PRINT, {"pages": Finds()}, *turns)
    row = episode_record(episode, step=0)
    write_json_lines(tmp_path / "episodes.jsonl", [row, {**row, "id": "other"}])
    config = schema.TrainConfig(
        model=schema.ModelConfig(path="somewhere"),
        knowledge={"pages": schema.KnowledgeConfig()},
        warm_start=schema.WarmStartConfig(
            demonstrations=str(tmp_path / "episodes.jsonl"), select={"em": 1.0}, least=1.0
        ),
    )
    worked: Any = open_demonstrations(config, vrag())[0][0]
    written = demonstrated(vrag().opening(SMALL_PRINT, engine.tokenizer), worked.pieces, engine.tokenizer)
    np.testing.assert_array_equal(written.tokens, episode.sequences[0].tokens)
    np.testing.assert_array_equal(written.loss_mask, episode.sequences[0].loss_mask)


# --- R1-Router ---

TOOLS = ("text", "table")
COUNT = Example(id="q", question="How many live in the capital?", answers=("2.5 million",))


def router(**changes: Any) -> Any:
    return made("r1_router", TOOLS, max_searches=3, **changes)


def chats(name: str, agent: Agent, *turns: str, example: Example = COUNT) -> tuple[Episode, Any]:
    """An episode in which chat number i is answered by turns[i]."""
    script = SeeingScript(lambda one, _s, _t: turns[int(one.partition("#")[2] or 0)], canonical=True, max_length=9000)
    script.tokenizer = tokenizer(name)
    tools = {tool: Finds(Passage(id=tool, title="", text=f"fact of {tool}")) for tool in TOOLS}
    (episode,) = run(agent, [example], script, tools)
    return episode, script


@pytest.mark.parametrize("name", NAMES)
def test_r1_router(name: str) -> None:
    """Each chat is what the template makes of its messages; only routes show functions; `enough` stops."""
    agent = router()
    turns = (
        call(name, "search_text", query="capital?"),
        f"so\n<answer>It is Accra.</answer>{end(name)}",
        call(name, "search_table", query="how many live there?"),
        f"<answer>2.5 million.</answer>{end(name)}",
        call(name, "enough"),
        f"so\n<answer>2.5 million</answer>{end(name)}",
    )
    episode, engine = chats(name, agent, *turns)
    assert episode.answer == "2.5 million"
    assert [(one.tool, one.query) for one in episode.calls] == [("text", "capital?"), ("table", "how many live there?")]
    assert [turn.action.kind for turn in episode.turns if turn.action] == ["search", "answer"] * 3
    assert all(turn.well_formed for turn in episode.turns)
    assert [one["function"]["name"] for one in agent.functions] == ["search_text", "search_table", "enough"]
    hf = engine.tokenizer.hf
    history = "Question: How many live in the capital?\n"
    first = "Sub-question 1: capital?\nAnswer 1: It is Accra.\n"
    second = "Sub-question 2: how many live there?\nAnswer 2: 2.5 million.\n"
    asked = [
        f"{history}Next sub-question:",
        "[text retriever 1] fact of text\nQuestion: capital?\nAnswer:",
        f"{history}{first}Next sub-question:",
        "[table retriever 1] fact of table\nQuestion: how many live there?\nAnswer:",
        f"{history}{first}{second}Next sub-question:",
        f"{history}{first}{second}Final answer:",
    ]
    protocol = agent.protocol
    systems = [protocol.route("", ()).system, protocol.answer("", ()).system] * 2
    systems += [protocol.route("", ()).system, protocol.final("", ()).system]
    assert not [tag for system in systems for tag in ("<think>", "<sub-question>", "<ret>") if tag in system]
    assert "call enough" in systems[0]
    assert "- search_text: facts that are told in words" in systems[0]
    for i, sequence in enumerate(episode.sequences):
        messages = [{"role": "system", "content": systems[i]}, {"role": "user", "content": asked[i]}]
        shown = {} if i % 2 else {"tools": list(agent.functions)}
        prompt = engine.tokenizer.render(messages, shown.get("tools", ()))
        assert prompt == hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **shown)
        ids = hf(prompt, add_special_tokens=False)["input_ids"]
        assert sequence.tokens.tolist() == ids + hf(turns[i], add_special_tokens=False)["input_ids"]
        assert sequence.loss_mask.tolist() == [False] * len(ids) + [True] * (len(sequence) - len(ids))


WRONG_ROUTES = {
    "so\n<answer>Accra</answer><|im_end|>": "there is no tool call",
    "It is Accra.<|im_end|>": "there is no tool call",
    call("qwen25", "search_text", query="None"): "call enough if nothing more is needed",
    call("qwen25", "enough", query="x"): "enough has no argument 'query'; it has none",
    call("qwen25", "search_web", query="x"): "no function 'search_web'; there are: search_text, search_table, enough",
}


@pytest.mark.parametrize("route", WRONG_ROUTES)
def test_r1_router_asks_again_for_what_can_not_be_read(route: str) -> None:
    final = "so\n<answer>2.5 million</answer><|im_end|>"
    episode, engine = chats("qwen25", router(), route, call("qwen25", "enough"), final)
    wrong, again, _ = episode.turns
    assert (wrong.well_formed, again.well_formed, episode.answer) == (False, True, "2.5 million")
    assert wrong.action is not None
    assert WRONG_ROUTES[route] in wrong.action.error
    text = engine.tokenizer.decode(episode.sequences[1].tokens)
    assert f"could not be used: {wrong.action.error}. Keep to the form." in text


def test_r1_router_s_answers() -> None:
    """No call in an answer chat, nothing empty, and the third answer is begun for the policy."""
    enough, empty = call("qwen25", "enough"), "so\n<answer> </answer><|im_end|>"
    searches = call("qwen25", "search_text", query="x")
    episode, engine = chats("qwen25", router(), enough, searches, empty, "2.5 million</answer><|im_end|>")
    errors = [turn.action.error for turn in episode.turns if turn.action]
    assert "no function 'search_text'" in errors[1]
    assert "nothing in <answer> and </answer>" in errors[2]
    assert (episode.answer, episode.turns[-1].forced, episode.turns[-1].well_formed) == (
        "2.5 million",
        "<answer>",
        True,
    )
    text = engine.tokenizer.decode(episode.sequences[-1].tokens)
    assert text.endswith("<|im_start|>assistant\n<answer>2.5 million</answer><|im_end|>")
    cut, _ = chats(
        "qwen25", dataclasses.replace(router(), attempts=1), enough, "<answer>2.5 million</answer>" + " x" * 300
    )
    assert cut.turns[-1].stop_reason == "length"
    assert not cut.turns[-1].well_formed


def test_r1_router_may_be_kept_from_stopping() -> None:
    """`full_budget`: no function stops; a turn that calls none is replaced by the question itself."""
    agent = dataclasses.replace(router().baselines(TOOLS)["full_budget"], max_searches=1)
    found, final = "<answer>x</answer><|im_end|>", "<answer>2.5 million</answer><|im_end|>"
    enough = call("qwen25", "enough")
    own, engine = chats("qwen25", agent, enough, call("qwen25", "search_table", query="how many?"), found, final)
    assert [(one.tool, one.query) for one in own.calls] == [("table", "how many?")]
    shown = ['"name": "enough"' in engine.tokenizer.decode(one.tokens[~one.loss_mask]) for one in own.sequences]
    assert shown == [True, False, False, False]
    none, _ = chats("qwen25", agent, enough, enough, found, final)
    assert [(one.tool, one.query) for one in none.calls] == [("text", COUNT.question)]


@pytest.mark.parametrize("name", NAMES)
def test_r1_router_s_golden_steps(name: str, tmp_path: Any) -> None:
    """They are learnt as a rollout records them, and the paper's rewards pay the right step in full, others not."""
    agent = router(reward={**ROUTER_REWARD})
    examples = open_dataset(f"trajectories:{write(tmp_path / 'golden.jsonl', CAPITAL)}")
    golden = [examples[i] for i in range(len(examples))]
    model = tokenizer(name)
    assert isinstance(agent, StepAgent)
    right, wrong = [], []
    for example in golden:
        ((piece, learnt),) = agent.step_pieces(example)
        text = piece.render(model) + end(name)  # type: ignore[union-attr]
        episode, _ = chats(name, agent, text, example=example)
        assert learnt
        written = demonstrated(agent.opening(example, model), agent.step_pieces(example), model)
        np.testing.assert_array_equal(written.tokens, episode.sequences[0].tokens)
        np.testing.assert_array_equal(written.loss_mask, episode.sequences[0].loss_mask)
        right.append(episode)
        wrong.append(chats(name, agent, f"<think>x</think>{end(name)}", example=example)[0])
    terms = RewardFunction(dict(ROUTER_REWARD))
    assert [row["total"] for row in terms(right)] == pytest.approx([1.0] * len(golden))
    assert [row["total"] for row in terms(wrong)] == [0.0] * len(golden)


# --- configurations, and what tool calls can't express ---


@pytest.mark.parametrize(
    ("module", "function"),
    [
        (mmsearch_r1_qwen25_vl_7b, "search_image"),
        (vrag_rl_qwen25_vl_7b, "search_pages"),
        (vrag_rl_qwen25_vl_3b, "search_pages"),
        (r1_router_qwen25_vl_7b, "search_text"),
    ],
)
def test_full_size_configurations(module: ModuleType, function: str) -> None:
    """The rewards of the paper stay, and the model gets a chat template that shows tools."""
    config = from_config_dict(schema.TrainConfig, module.get_config("tool_calls"))
    assert (config.model.chat_template, config.agent.instruct) == ("hermes", True)
    assert function in [one["function"]["name"] for one in build_recipe(config).agent.functions]


@pytest.mark.parametrize(
    ("recipe", "tools", "reward", "term"),
    [
        ("r1_router", TOOLS, ROUTER_RELEASED, "r1_router.route"),
        ("vrag_rl", ("pages",), {"em": 1.0, "vrag_rl.pattern": {"variant": "released"}}, "vrag_rl.pattern"),
        ("vrag_rl", ("pages",), {"vrag_rl.ndcg": RELEASED.reward["vrag_rl.ndcg"]}, "vrag_rl.ndcg"),
        ("r1_searcher", ("text",), STAGE_1, "r1_searcher.format"),
        ("mmsearch_r1", ("image", "text"), MMSEARCH_RELEASED, "mmsearch_r1.format"),
    ],
)
def test_rewards_that_look_for_tags_are_refused(recipe: str, tools: Sequence[str], reward: Any, term: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.stages\.main\.reward\.{term} looks for tags"):
        made(recipe, tools, reward)
    assert made(recipe, tools, reward, grammar="") is not None


def test_settings_that_need_tags_are_refused() -> None:
    for recipe, tools in (("mmsearch_r1", ("image", "text")), ("vrag_rl", ("pages",))):
        with pytest.raises(ValueError, match=r"settings\.thoughts needs the tags of the agent's own protocol"):
            made(recipe, tools, settings={"thoughts": True}, max_searches=2)
        with pytest.raises(ValueError, match="has tags of its own; leave it empty, or take 'tool_calls'"):
            made(recipe, tools, grammar="tool_calls_with_looks", max_searches=2)
        agent = made(recipe, tools, max_searches=2)
        assert agent.choices is None
        with pytest.raises(ValueError, match="reading recorded rounds needs the tags"):
            agent.recorded(RecordedRounds(example=FLAG, rounds=()))
    assert router().choices is None
    with pytest.raises(ValueError, match="the retriever 'text_image', which is no function"):
        router().protocol.routes.write_search("", "x", "text_image")
    with pytest.raises(ValueError, match="no chat template"):
        mmsearch().opening(FLAG, seeing.tokenizer(), seeing.MARKER)
