"""The search agent's loop, step by step, with a scripted policy, in both tag protocols and with either end of a budget."""

import dataclasses
import re

import numpy as np
import pytest

from configs import quickstart, smollm2_search
from routerl_jax.agents.driver import run
from routerl_jax.agents.observation import demonstrated
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.learning.advantages import overlong
from routerl_jax.recipes.r1_searcher import STAGE_2, violations
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.setup import build_recipe
from tests import tiny
from tests.agents import chat_templates as templates
from tests.agents.scripted import AGENT, AGENTS, ANSWER, SEARCH, ScriptedEngine, knowledge, spelled

EXAMPLE = Example(id="q", question="What is the capital of Ghana?", answers=("Accra",))
CHAT_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


@pytest.fixture(params=list(AGENTS))
def agent(request):
    return AGENTS[request.param]


@pytest.fixture(params=[name for name, agent in AGENTS.items() if agent.grammar.forces_answer])
def forcing(request):
    """An agent that begins the answer when its budget is spent."""
    return AGENTS[request.param]


def search(agent):
    """A turn that searches."""
    return agent.grammar.write_search("hm", "capital of Ghana", agent.grammar.tools[0])


def answer(agent):
    """A turn that answers."""
    return agent.grammar.write_answer("so", "Accra")


def play(*turns, agent=AGENT, tools=None, **engine):
    """Runs the agent on a policy that says these turns."""
    made = ScriptedEngine(lambda example, sample, turn: turns[turn], **engine)
    tools = tools or {name: tiny.ScriptedKB(name) for name in agent.grammar.tools}
    (episode,) = run(agent, [EXAMPLE], made, tools)
    return episode, tools, made


def spoken(episode, engine):
    """The conversation as text."""
    return engine.tokenizer.decode(episode.sequences[0].tokens)


def test_searches_reads_and_answers_in_r1_router():
    episode, _, engine = play(SEARCH.format("table"), SEARCH.format("text"), ANSWER)
    assert episode.answer == "Accra"
    assert [(c.tool, c.query) for c in episode.calls] == [("table", "capital of Ghana"), ("text", "capital of Ghana")]
    assert [t.action.kind for t in episode.turns] == ["search", "search", "answer"]
    assert all(t.well_formed for t in episode.turns)
    assert spoken(episode, engine) == (
        "Question: What is the capital of Ghana?\n"
        + SEARCH.format("table")
        + "<information>\ntar-0: fact 0 about 16\ntar-1: fact 1 about 16\n</information>"
        + SEARCH.format("text")
        + "<information>\nter-0: fact 0 about 16\nter-1: fact 1 about 16\n</information>"
        + ANSWER
    )
    assert not engine.live


def test_searches_reads_and_answers_in_r1_searcher():
    turns = ("hm <|begin_of_query|>capital of Ghana<|end_of_query|>", "so</think>\n<answer>Accra</answer>")
    episode, _, engine = play(*turns, agent=AGENTS["r1_searcher"])
    assert episode.answer == "Accra"
    assert [(c.tool, c.query) for c in episode.calls] == [("text", "capital of Ghana")]
    assert [t.action.kind for t in episode.turns] == ["search", "answer"]
    assert all(t.well_formed for t in episode.turns)
    assert spoken(episode, engine) == (
        "Question: What is the capital of Ghana?\n<think>hm <|begin_of_query|>capital of Ghana<|end_of_query|>"
        "\n\n<|begin_of_documents|>\n(1)Title:  Text: fact 0 about 16\n(2)Title:  Text: fact 1 about 16\n"
        "<|end_of_documents|>\n\nso</think>\n<answer>Accra</answer>"
    )
    assert not engine.live


def test_only_what_the_policy_wrote_is_trained_on(agent):
    """Token in, token out: the mask covers exactly the sampled ids, though encoding their text would give others."""
    episode, _, engine = play(search(agent), "no tags", answer(agent), agent=agent)
    sequence = episode.sequences[0]
    runs = np.split(sequence.tokens, np.flatnonzero(np.diff(sequence.loss_mask)) + 1)
    assert [ids.tolist() for ids in runs[1::2]] == engine.said["q", 0]
    texts = [engine.tokenizer.decode(ids) for ids in runs]
    assert all(engine.tokenizer.encode(text) != ids.tolist() for text, ids in zip(texts[1::2], runs[1::2]))
    assert texts[1::2] == [turn.text for turn in episode.turns]
    assert texts[0::2] == [episode.prompt, *(turn.observation for turn in episode.turns[:-1])]
    assert (sequence.logprobs[sequence.loss_mask] == -1).all()
    assert (sequence.logprobs[~sequence.loss_mask] == 0).all()
    assert (sequence.versions >= 0).tolist() == sequence.loss_mask.tolist()


def test_after_the_last_search_the_answer_is_forced(forcing):
    episode, _, engine = play(*[search(forcing)] * 3, "Accra</answer>", agent=forcing)
    assert len(episode.calls) == 3
    assert episode.answer == "Accra"
    assert episode.turns[-1].forced == forcing.grammar.answer_opening
    assert all(
        turn.well_formed for turn in episode.turns
    )  # that no thought precedes the answer is not the policy's doing
    sequence = episode.sequences[0]
    opening = engine.tokenizer.encode("<answer>")[0]
    assert not sequence.loss_mask[sequence.tokens == opening].any()  # the policy did not choose to answer


@pytest.mark.parametrize("text", ["Accra", "Accra <think>x</think></answer>"])
def test_a_forced_answer_must_be_closed_and_plain(forcing, text):
    episode, _, _ = play(*[search(forcing)] * 3, text, agent=forcing)
    assert episode.turns[-1].forced
    assert not episode.turns[-1].well_formed


def test_in_r1_searcher_an_episode_with_all_its_searches_earns_what_any_may():
    agent = AGENTS["r1_searcher"]
    stage_2 = RewardFunction(STAGE_2, "r1_searcher")
    answered, _, _ = play(*[search(agent)] * 3, answer(agent), agent=agent)
    assert (len(answered.calls), answered.answer, answered.turns[-1].forced) == (3, "Accra", "")
    assert all(turn.well_formed for turn in answered.turns)
    assert stage_2([answered])[0]["total"] == 1.0
    searched_on, _, _ = play(*[search(agent)] * 4, agent=agent)
    assert (len(searched_on.turns), len(searched_on.calls), searched_on.answer) == (4, 3, None)
    assert searched_on.turns[-1].observation == ""
    assert "query_tags" in violations(searched_on)
    assert stage_2([searched_on])[0]["total"] == -2.0


@pytest.mark.parametrize(
    ("protocol", "text", "error"),
    [
        ("r1_router", SEARCH.format("map"), "there is no 'map retriever'"),
        ("r1_router", "<think>x</think><ret>text retriever</ret>", "the sub-question is missing"),
        ("r1_router", SEARCH.format("text").replace("capital of Ghana", " "), "the sub-question is missing"),
        ("r1_searcher", "x <|begin_of_query|> <|end_of_query|>", "the query is empty"),
        ("r1_searcher", "x <|end_of_query|>", "there is neither a complete query nor an answer"),
    ],
)
def test_an_invalid_action_is_explained_and_costs_a_turn(protocol, text, error):
    agent = AGENTS[protocol]
    episode, _, _ = play(text, text, answer(agent), agent=agent)
    assert [t.action.kind for t in episode.turns] == ["invalid", "invalid", "answer"]
    assert error in episode.turns[0].observation
    assert episode.invalid_actions == 2
    assert not episode.calls
    assert episode.answer == "Accra"


@pytest.mark.parametrize(
    ("text", "truncated"),
    [
        ("x <|begin_of_query|> <|end_of_query|>", False),
        ("na " * 60, True),
        ("so", False),
    ],
)
def test_an_invalid_action_may_end_the_episode(text, truncated):
    agent = dataclasses.replace(AGENTS["r1_searcher"], on_invalid="end")
    episode, _, _ = play(search(agent), text, answer(agent), agent=agent)
    assert len(episode.turns) == 2
    assert (episode.answer, episode.truncated, episode.turns[1].observation) == (None, truncated, "")
    assert RewardFunction(STAGE_2, "r1_searcher")([episode])[0]["total"] == -2.0


def test_ending_without_an_answer_ends_the_episode(agent):
    episode, _, _ = play("I give up", agent=agent)
    assert episode.answer is None
    assert episode.turns[-1].stop_reason == "eos"


def test_none_means_that_nothing_more_is_needed():
    episode, _, _ = play("<think>x</think><sub-question>none</sub-question><ret>None</ret>", "Accra</answer>")
    assert not episode.calls
    assert episode.answer == "Accra"


def test_passages_are_dropped_whole_when_room_is_short(agent):
    class Verbose:
        def search(self, queries, k):
            return [
                [Passage(id=str(i), title="", text=f"long story {i} " + "na " * 40) for i in range(k)] for _ in queries
            ]

    agent = dataclasses.replace(agent, k=5)
    tools = {name: Verbose() for name in agent.grammar.tools}
    episode, _, _ = play(search(agent), answer(agent), agent=agent, tools=tools, max_length=420)
    shown, (call,) = episode.turns[0].observation, episode.calls
    count = shown.count("long story")
    assert 0 < count < 5
    assert shown == agent.grammar.observation(call, call.passages[:count])
    assert episode.answer == "Accra"
    assert len(episode.sequences[0]) <= 420
    assert not episode.truncated


def test_a_first_passage_that_is_too_long_is_cut_after_a_word(agent):
    """Though the second would fit: it is the best. What is shown is the longest beginning within the limit."""
    first = Passage(id="1", title="Accra", text=" ".join(f"word{i}" for i in range(200)))
    second = Passage(id="2", title="Togo", text="short")

    class Two:
        def search(self, queries, k):
            return [[first, second] for _ in queries]

    limit = 120
    agent = dataclasses.replace(agent, max_observation_tokens=limit)
    tools = {name: Two() for name in agent.grammar.tools}
    episode, _, engine = play(search(agent), answer(agent), agent=agent, tools=tools, max_length=3000)
    shown, (call,) = episode.turns[0].observation, episode.calls
    words = shown.count("word")
    beginnings = [dataclasses.replace(first, text=" ".join(first.text.split()[:n]) + " ..") for n in range(1, 200)]
    texts = [agent.grammar.observation(call, [beginning]) for beginning in beginnings]
    assert 1 < words < 199
    assert shown == texts[words - 1]
    assert len(engine.tokenizer.encode(shown)) <= limit < len(engine.tokenizer.encode(texts[words]))
    assert call.passages == (first, second)  # what the search found is kept whole
    assert not episode.truncated


def prompt_length(agent):
    return len(agent.opening(EXAMPLE, tiny.tokenizer()))


def test_when_not_even_an_empty_observation_fits_the_answer_is_forced(forcing):
    tight = prompt_length(forcing) + len(spelled(tiny.tokenizer(), search(forcing))) + 20
    episode, _, _ = play(search(forcing), "Accra</answer>", agent=forcing, max_length=tight)
    assert episode.turns[-1].forced == forcing.grammar.answer_opening
    assert episode.answer == "Accra"
    assert not episode.turns[0].observation
    assert episode.truncated  # the end of the context, not of the budget


def test_when_no_turn_fits_any_more_the_episode_is_a_truncated_one(forcing):
    ids = len(spelled(tiny.tokenizer(), search(forcing)))
    shown = play(search(forcing), answer(forcing), agent=forcing)[0].turns[0].observation
    fed = len(tiny.tokenizer().encode(shown + forcing.grammar.answer_opening))
    full = prompt_length(forcing) + ids + fed + forcing.answer_tokens
    for more, truncated in ((0, True), (60, False)):
        episode, _, _ = play(
            search(forcing), "Accra</answer>" if truncated else answer(forcing), agent=forcing, max_length=full + more
        )
        assert (episode.answer, episode.truncated) == ("Accra", truncated)
        assert overlong(episode) is truncated


def test_a_prompt_that_leaves_no_room_gives_a_truncated_episode(agent):
    episode, _, _ = play(answer(agent), agent=agent, max_length=prompt_length(agent) + 5)
    assert episode.truncated
    assert episode.answer is None


def test_a_turn_that_runs_into_its_limit_is_invalid_and_the_run_goes_on(agent):
    agent = dataclasses.replace(agent, max_turn_tokens=30)
    episode, _, _ = play("<think>" + "na " * 200, answer(agent), agent=agent)
    assert episode.turns[0].stop_reason == "length"
    assert episode.turns[0].action.kind == "invalid"
    assert episode.turns[0].tokens == 30
    assert episode.answer == "Accra"


def test_demonstrations_are_written_as_rollouts_are(agent):
    """The tokens and the mask of a demonstration equal those of a rollout that says the same, the last turn included."""
    passages = tuple(tiny.ScriptedKB("text").search(["capital of Ghana"], 2)[0])
    step = DemonstrationStep(thought="hm", query="capital of Ghana", tool="text", passages=passages)
    for count in (0, 1, 3):
        demonstration = Demonstration(
            example=EXAMPLE, steps=(step,) * count, thought="so", answer="Accra", forced=count == 3
        )
        last = "Accra</answer>" if count == 3 and agent.grammar.forces_answer else answer(agent)
        episode, _, engine = play(*[search(agent)] * count, last, agent=agent, canonical=True)
        prompt = agent.opening(EXAMPLE, engine.tokenizer)
        written = demonstrated(prompt, agent.pieces(demonstration), engine.tokenizer)
        np.testing.assert_array_equal(written.tokens, episode.sequences[0].tokens)
        np.testing.assert_array_equal(written.loss_mask, episode.sequences[0].loss_mask)


def test_the_opening_of_a_conversation(agent):
    """A prompt of one's own, the bare question, instructions as text, and instructions as a chat."""
    plain, chatty = (tiny.with_template(tiny.tokenizer(), template) for template in (None, CHAT_TEMPLATE))
    instructions, question = agent.grammar.instructions(), EXAMPLE.question

    def opening(tokenizer, **changes):
        changed = dataclasses.replace(agent, prompt_suffix="<think>", **changes)
        return tokenizer.decode(changed.opening(EXAMPLE, tokenizer))

    for tokenizer in (plain, chatty):
        assert opening(tokenizer, prompt="Q {question} {A}:\n", instruct=True) == f"Q {question} {{A}}:\n<think>"
        assert opening(tokenizer) == f"Question: {question}\n<think>"
    assert opening(plain, instruct=True) == f"{instructions}\n\nUser: {question}\nAssistant: <think>"
    assert opening(chatty, instruct=True) == f"[system] {instructions}\n[user] {question}\n[assistant] <think>"


@pytest.mark.parametrize(
    "shipped",
    [
        quickstart.get_config(),
        *(smollm2_search.get_config(recipe) for recipe in ("r1_searcher", "search_r1-cpu", "routerag", "tool_calls")),
    ],
)
def test_the_agents_of_shipped_configurations_work(shipped):
    config = from_config_dict(TrainConfig, shipped)
    agent = build_recipe(config).agent
    assert isinstance(agent, SearchAgent)
    assert agent.grammar.tools == tuple(config.knowledge)
    for name in ("max_searches", "k", "max_turn_tokens", "answer_tokens", "instruct", "prompt_suffix"):
        assert getattr(agent, name) == getattr(config.agent, name)
    turns = [search(agent)] * agent.max_searches
    tokenizer = templates.tokenizer(templates.HERMES) if config.agent.grammar == "tool_calls" else None
    episode, _, _ = play(*turns, "Accra</answer>", agent=agent, max_length=3000, tokenizer=tokenizer)
    assert len(episode.calls) == agent.max_searches
    assert [len(call.passages) for call in episode.calls] == [agent.k] * agent.max_searches
    assert all(turn.well_formed for turn in episode.turns)
    assert episode.answer == "Accra"
    assert episode.prompt.endswith(config.agent.prompt_suffix)
    assert (agent.grammar.instructions() in episode.prompt) == config.agent.instruct


def test_routing_baselines_change_the_call_not_the_words():
    agents = AGENT.baselines(("text", "table"))
    assert list(agents) == ["only_text", "only_table", "random_kb", "no_search"]
    only_table = agents["only_table"]
    assert only_table.with_passages(7).with_searches(1) == dataclasses.replace(
        only_table, agent=dataclasses.replace(AGENT, k=7, max_searches=1)
    )
    episode, _, _ = play(SEARCH.format("text"), ANSWER, agent=only_table, tools=knowledge())
    assert episode.turns[0].action.tool == "text"
    assert [call.tool for call in episode.calls] == ["table"]
    examples = [dataclasses.replace(EXAMPLE, id=str(i)) for i in range(200)]
    engine = ScriptedEngine(lambda example, sample, turn: [SEARCH.format("text"), ANSWER][turn])
    tools = {name: tiny.ScriptedKB(name) for name in ("text", "table")}
    drawn = [e.calls[0].tool for e in run(agents["random_kb"], examples, engine, tools)]
    assert 70 < drawn.count("table") < 130  # of 200; four standard deviations are 28
    assert drawn == [e.calls[0].tool for e in run(agents["random_kb"], examples, engine, tools)]
    episode, _, _ = play("Accra</answer>", agent=agents["no_search"])
    assert not episode.calls
    assert episode.answer == "Accra"


class Down:
    """A knowledge base whose every search fails."""

    def search(self, queries, k):
        raise OSError("no route")


def test_every_kb_makes_a_search_in_each_and_shows_all():
    """The passages of all, under the name that the policy gave; only where all fail, the search has failed."""
    agents = AGENT.alternatives(("text", "table"))
    assert list(agents)[-1] == "every_kb"
    assert set(AGENT.baselines(("text", "table"))) < set(agents)
    assert "every_kb" not in AGENT.alternatives(("text",))
    tools = {name: tiny.ScriptedKB(name) for name in ("text", "table")}
    episode, _, engine = play(SEARCH.format("text"), ANSWER, agent=agents["every_kb"], tools=tools)
    assert [(call.tool, len(call.passages)) for call in episode.calls] == [("text", AGENT.k), ("table", AGENT.k)]
    assert spoken(episode, engine).count("\nter-") == 2 * AGENT.k
    text, _, _ = play(SEARCH.format("text"), ANSWER, tools={name: tiny.ScriptedKB(name) for name in ("text", "table")})
    half = tools | {"table": Down()}
    shown, _, _ = play(SEARCH.format("table"), ANSWER, agent=agents["every_kb"], tools=half)
    assert [call.error is None for call in shown.calls] == [True, False]
    assert [call.passages for call in shown.calls] == [text.calls[0].passages, ()]
    assert "fact 0" in shown.turns[0].observation
    lost, _, _ = play(SEARCH.format("text"), ANSWER, agent=agents["every_kb"], tools={"text": Down(), "table": Down()})
    assert "no route" in lost.turns[0].observation


class Named:
    """A knowledge base whose passages say whose they are."""

    def __init__(self, name):
        self.name = name

    def search(self, queries, k):
        return [[Passage(id=f"{self.name}{rank}", title="", text=f"{self.name}{rank}") for rank in range(k)]] * len(
            queries
        )


def test_every_kb_leaves_out_the_worst_passages_of_all_not_the_last_knowledge_base():
    """Where all four fit, and where two do."""
    tools = {name: Named(name) for name in ("text", "table")}
    agent, tokenizer = AGENT.alternatives(tuple(tools))["every_kb"], tiny.tokenizer()
    two = len(tokenizer.encode("<information>\nter-0: text0\nter-1: table0\n</information>"))
    for most, expected in ((0, ["text0", "table0", "text1", "table1"]), (two, ["text0", "table0"])):
        limited = dataclasses.replace(agent, agent=dataclasses.replace(AGENT, max_observation_tokens=most))
        episode, _, _ = play(SEARCH.format("text"), ANSWER, agent=limited, tools=tools, max_length=3000)
        assert re.findall(r"(?:text|table)\d", episode.turns[0].observation) == expected


def test_without_a_search_the_answer_is_begun_whatever_ends_the_budget(agent):
    """A policy that may begin as it likes begins with a search, as it was trained to."""
    baseline = agent.baselines(agent.grammar.tools)["no_search"]
    episode, _, _ = play("Accra</answer>", agent=baseline)
    assert (episode.answer, episode.calls, episode.turns[0].forced) == ("Accra", [], agent.grammar.answer_opening)


def test_vanilla_rag_searches_for_the_question_and_has_it_answered(agent):
    """In every grammar and with either end of a budget; nothing but the answer is the policy's."""
    for name, baseline in agent.vanilla_rag(agent.grammar.tools).items():
        tool = name.removeprefix("vanilla_rag").removeprefix("_") or agent.grammar.tools[0]
        said = "Accra</answer>"
        episode, _, engine = play(said, agent=baseline)
        assert episode.answer == "Accra"
        assert [(call.tool, call.query) for call in episode.calls] == [(tool, EXAMPLE.question)]
        [sequence] = episode.sequences
        text = engine.tokenizer.decode(sequence.tokens)
        assert agent.grammar.write_search("", EXAMPLE.question, tool) in text
        assert episode.calls[0].passages[0].text in text
        assert engine.tokenizer.decode(sequence.tokens[sequence.loss_mask]) == said
    assert len(agent.vanilla_rag(agent.grammar.tools)) == len(agent.grammar.tools)


def test_vanilla_rag_without_room_answers_all_the_same():
    [baseline] = AGENTS["r1_searcher_answer"].vanilla_rag(("text",)).values()
    long = dataclasses.replace(EXAMPLE, question="Who? " * 30)
    opening = len(baseline.opening(long, tiny.tokenizer()))
    engine = ScriptedEngine(lambda example, sample, turn: "Accra</answer>", max_length=opening + 150)
    [episode] = run(baseline, [long], engine, {"text": tiny.ScriptedKB("text")})
    assert episode.answer == "Accra"
    assert not episode.calls
