"""RouteRAG's modes, its loop on scripted policies, its rewards by hand, and its real training questions."""

import dataclasses
import gzip
import itertools
import json

import numpy as np
import pytest

from routerl_jax.agents.driver import run
from routerl_jax.agents.grammar import GRAMMARS
from routerl_jax.agents.observation import demonstrated
from routerl_jax.agents.search_agent import SearchAgent
from routerl_jax.core.types import Action, Call, Demonstration, DemonstrationStep, Episode, Example, Passage, Turn
from routerl_jax.data.readers import open_dataset
from routerl_jax.recipes import routerag
from routerl_jax.recipes.routerag import RouteRAGGrammar, scaled_costs
from routerl_jax.rewards.terms import RewardFunction
from tests import tiny
from tests.agents.scripted import ScriptedEngine

GRAMMAR = RouteRAGGrammar(tools=routerag.TOOLS)
EXAMPLE = Example(id="q", question="Where is Accra?", answers=("Ghana",))
PASSAGES = (
    Passage(id="1", title="Accra", text="A city\nof Ghana."),
    Passage(id="2", title="Togo", text="Togo borders Ghana."),
)


# --- what the policy writes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "tool"),
    [
        ("[passage] the capital of Ghana", "passage"),
        ("[graph] the capital of Ghana", "graph"),
        ("[graph][passage] the capital of Ghana", "graph_passage"),
        ("[passage] [graph] the capital of Ghana", "graph_passage"),
        ("[graph] the capital [passage] of Ghana", "graph_passage"),
        ("[graph][graph] the capital of Ghana", "graph"),
        ("the capital of Ghana", "passage"),
        ("[table] the capital of Ghana", "passage"),
    ],
)
def test_modes_become_knowledge_bases_in_any_order(search, tool):
    action = GRAMMAR.parse(f"<think>hm</think>\n<search> {search} </search>")
    query = "[table] the capital of Ghana" if "[table]" in search else "the capital of Ghana"
    assert (action.kind, action.tool, action.query, action.thought) == ("search", tool, query, "hm")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<think>hm</think> no action", "neither a complete <search> nor an <answer>"),
        ("<search> [graph] never closed", "neither a complete <search> nor an <answer>"),
        ("<search></search>", "the query is empty"),
        ("<search> [graph] [passage] </search>", "the query is empty"),
    ],
)
def test_what_is_no_action_says_why(text, error):
    action = GRAMMAR.parse(text)
    assert action.kind == "invalid"
    assert error in action.error


def test_a_mode_without_its_knowledge_base_is_invalid_and_names_those_that_are_there():
    alone = RouteRAGGrammar(tools=("passage",))
    action = alone.parse("<search> [passage][graph] Accra </search>")
    assert (action.kind, action.error) == ("invalid", "there is no mode [graph][passage]; there are: [passage]")
    with pytest.raises(ValueError, match=r"'passage' must be there; got \('graph',\).*config.knowledge"):
        RouteRAGGrammar(tools=("graph",))
    with pytest.raises(ValueError, match=r"passage, graph, graph_passage.*got \('passage', 'text'\)"):
        RouteRAGGrammar(tools=("passage", "text"))


def test_the_answer():
    action = GRAMMAR.parse("<think>so</think>\n<answer> Accra\n</answer>")
    assert (action.kind, action.answer, action.thought) == ("answer", "Accra", "so")


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("<think>x</think>\n<search> [graph] q </search>", True),
        ("<think>5 < 6</think><search>[graph] [passage] q < r</search>\n", True),
        ("<think>x</think><answer>a</answer>", True),
        ("<search> [graph] q </search>", False),
        ("<think>x</think><search> q </search>", False),
        ("<think>x</think><search> [graph] </search>", False),
        ("<think>x</think><search> [graph] q [passage] </search>", False),
        ("<think>x</think><search> [graph][graph] q </search>", False),
        ("<think>x</think><information>I found it</information><answer>a</answer>", False),
        ("<think>x</think>well<answer>a</answer>", False),
    ],
)
def test_well_formed(text, fine):
    assert GRAMMAR.well_formed(text) is fine


@pytest.mark.parametrize("tool", routerag.TOOLS)
def test_what_it_writes_is_well_formed_and_read_as_it_was_meant(tool):
    written = GRAMMAR.write_search("because", "capital of Ghana", tool)
    assert GRAMMAR.well_formed(written)
    assert GRAMMAR.parse(written) == Action(kind="search", tool=tool, query="capital of Ghana", thought="because")
    assert GRAMMAR.well_formed(GRAMMAR.write_answer("so", "Accra"))


def test_what_surrounds_it_writes():
    call = Call(tool="graph", query="q", passages=PASSAGES)
    two = "\n\n<information>\nDoc 1(Title: Accra) A city of Ghana.\nDoc 2(Title: Togo) Togo borders Ghana.\n</information>\n\n"
    assert GRAMMAR.observation(call, PASSAGES) == two
    assert "too long to be shown" in GRAMMAR.observation(call, ())
    assert "Nothing was found" in GRAMMAR.observation(Call(tool="graph", query="q"), ())
    assert "no reply" in GRAMMAR.observation(Call(tool="graph", query="q", error="no reply"), ())
    reminder = RouteRAGGrammar(tools=("passage", "graph")).reminder("the query is empty")
    assert "the query is empty" in reminder
    assert "([passage], [graph])" in reminder
    for said in (reminder, two):
        assert said.startswith("\n\n<information>\n")
        assert said.endswith("\n</information>\n\n")
    told = GRAMMAR.instructions()
    for mode in ("[passage]", "[graph]", "[graph][passage]"):
        assert f"<search> {mode} birthplace" in told


# --- the loop ----------------------------------------------------------------------------------------------------------

TOOLS = {name: tiny.ScriptedKB(name) for name in routerag.TOOLS}


def play(*turns: str, grammar: RouteRAGGrammar = GRAMMAR, **changes) -> Episode:
    agent = SearchAgent(
        grammar=grammar, **{"max_searches": 4, "k": 3, "max_turn_tokens": 200, "answer_tokens": 60} | changes
    )
    engine = ScriptedEngine(lambda _, __, turn: turns[min(turn, len(turns) - 1)], max_length=6000)
    (episode,) = run(agent, [EXAMPLE], engine, TOOLS)
    return episode


def search(mode: str = "[graph]") -> str:
    return f"<think>hm</think>\n<search> {mode} Accra </search>"


def test_four_actions_then_one_last_turn():
    void = "<think>what now?</think>\n<search> [graph] </search>"
    answer = "<think>so</think>\n<answer>Ghana</answer>"
    episode = play(search(), void, search("[passage]"), search("[graph][passage]"), answer)
    assert [call.tool for call in episode.calls] == ["graph", "passage", "graph_passage"]
    assert all(len(call.passages) == 3 for call in episode.calls)
    assert episode.invalid_actions == 1
    assert "the query is empty" in episode.turns[1].observation
    assert len(episode.turns) == 5
    assert episode.answer == "Ghana"
    assert episode.turns[4].forced == ""


def test_a_search_in_the_last_turn_leads_nowhere():
    episode = play(search())
    assert (len(episode.turns), len(episode.calls), episode.answer) == (5, 4, None)
    assert episode.turns[4].observation == ""
    opened = play(*[search()] * 4, "Ghana</answer>", grammar=GRAMMARS.get("routerag_answer")(tools=routerag.TOOLS))
    assert (opened.answer, opened.turns[4].forced, opened.turns[4].well_formed) == ("Ghana", "<answer>", True)


def test_its_baselines_answer_though_the_last_turn_is_the_policy_s():
    agent = SearchAgent(grammar=GRAMMAR)
    baselines = agent.baselines(GRAMMAR.tools) | agent.vanilla_rag(GRAMMAR.tools)
    engine = ScriptedEngine(lambda *_: "Ghana</answer>", max_length=6000)
    for name, calls in (("no_search", 0), ("vanilla_rag_graph", 1)):
        (episode,) = run(baselines[name], [EXAMPLE], engine, TOOLS)
        assert (episode.answer, len(episode.calls), episode.turns[-1].forced) == ("Ghana", calls, "<answer>")


def test_observations_stay_whole_within_their_budget():
    whole = play(search(), "<think>x</think><answer>Ghana</answer>")
    block = whole.turns[0].observation
    tokens = len(tiny.tokenizer().encode(block))
    cut = play(search(), "<think>x</think><answer>Ghana</answer>", max_observation_tokens=tokens - 1)
    shown = cut.turns[0].observation
    assert block.count("Doc ") == 3
    assert shown.count("Doc ") == 2
    assert block.startswith(shown.removesuffix("</information>\n\n"))
    assert len(tiny.tokenizer().encode(shown)) < tokens
    least = play(search(), "<think>x</think><answer>Ghana</answer>", max_observation_tokens=1)
    assert "too long to be shown" in least.turns[0].observation  # tags are never cut, however small the budget


def test_demonstrations_have_the_spacing_of_rollouts():
    episode = play(search(), "<think>so</think>\n<answer>Ghana</answer>")
    (call,) = episode.calls
    step = DemonstrationStep(thought="hm", query="Accra", tool="graph", passages=call.passages)
    agent = SearchAgent(grammar=GRAMMAR, k=3)
    pieces = agent.pieces(Demonstration(example=EXAMPLE, steps=(step,), thought="so", answer="Ghana"))
    shown = demonstrated(agent.opening(EXAMPLE, tiny.tokenizer()), pieces, tiny.tokenizer())
    decode = tiny.tokenizer().decode
    assert decode(shown.tokens.tolist()) == decode(episode.sequences[0].tokens.tolist())
    fed = decode(shown.tokens[~shown.loss_mask].tolist())
    assert fed == decode(episode.sequences[0].tokens[~episode.sequences[0].loss_mask].tolist())


# --- rewards -----------------------------------------------------------------------------------------------------------


def episode(answer: str, *costs: float, seconds: float = 0.0) -> Episode:
    calls = [Call(tool="graph", query="q", cost=cost, seconds=seconds) for cost in costs]
    turns = [Turn(text="", stop_reason="stop", tokens=1, calls=calls)]
    return Episode(example=EXAMPLE, sample=0, answer=answer, turns=turns, sequences=[])


def totals(episodes, stage, **options) -> list[float]:
    terms = {name: {**spec, **options} if isinstance(spec, dict) else spec for name, spec in stage.items()}
    return [rewards["total"] for rewards in RewardFunction(terms)(episodes)]


STEP = [episode("Ghana"), episode("Ghana", 1.0), episode("Togo", 2.0), episode("Ghana", 2.0, 3.0)]


def test_stage_1_is_exact_match():
    assert totals(STEP, routerag.STAGE_1) == [1.0, 1.0, 0.0, 1.0]


def test_stage_2_by_hand():
    # costs 0, 1, 2, 5; T = 8: s = 0, 1/8, 1/4, 1/2 (5/8 clipped), mean 7/32
    assert totals(STEP, routerag.STAGE_2, scale=8.0) == pytest.approx([1 + 7 / 32, 1 + 3 / 32, 0.0, 1 - 9 / 32])
    # p95 of 0, 1, 2, 5 lies 0.85 of the way from 2 to 5: 4.55
    s = np.array([0, 0.5 / 4.55, 1 / 4.55, 0.5])
    assert totals(STEP, routerag.STAGE_2) == pytest.approx((np.array([1, 1, 0, 1]) * (1 + s.mean() - s)).tolist())


def test_stage_2_by_the_clock():
    step = [episode("Ghana", 9.0, seconds=0.1), episode("Ghana", 1.0, 1.0, seconds=0.2)]
    # seconds 0.1 and 0.4, T = 1: s = 0.1 and 0.4
    assert totals(step, routerag.STAGE_2_SECONDS, scale=1.0) == pytest.approx([1.15, 0.85])


def test_each_reward_belongs_to_its_row_whatever_the_order():
    """The released code kept times apart from the rows, which were then reordered."""
    rng = np.random.default_rng(0)
    step = [
        episode("Ghana" if rng.random() < 0.7 else "Togo", *rng.uniform(0, 3, rng.integers(0, 5))) for _ in range(40)
    ]
    expected = totals(step, routerag.STAGE_2)
    for _ in range(5):
        order = rng.permutation(len(step))
        assert totals([step[i] for i in order], routerag.STAGE_2) == pytest.approx([expected[i] for i in order])


def test_right_answers_get_between_a_half_and_one_and_a_half_wrong_ones_nothing():
    rng = np.random.default_rng(1)
    for size in (1, 2, 3, 50):
        step = [
            episode("Ghana" if i % 3 else "Togo", *10 ** rng.uniform(-3, 3, rng.integers(0, 5))) for i in range(size)
        ]
        for total, candidate in zip(totals(step, routerag.STAGE_2), step):
            assert (0.5 < total < 1.5) if candidate.answer == "Ghana" else total == 0.0
    cheap_among_dear = [episode("Ghana"), *(episode("Ghana", 5.0) for _ in range(99))]
    assert totals(cheap_among_dear, routerag.STAGE_2)[0] == pytest.approx(1.495)
    dear_among_cheap = [episode("Ghana", 5.0), *(episode("Ghana") for _ in range(9))]
    assert totals(dear_among_cheap, routerag.STAGE_2)[0] == pytest.approx(0.55)


def test_a_step_without_searches_is_judged_by_its_answers_alone():
    assert totals([episode("Ghana"), episode("Togo")], routerag.STAGE_2) == [1.0, 0.0]
    assert totals([], routerag.STAGE_2) == []


def test_where_hardly_anyone_searches_the_percentile_is_zero_and_nothing_is_nan():
    scaled = scaled_costs(np.array([3.0] + [0.0] * 39))
    assert np.percentile([3.0] + [0.0] * 39, 95) == 0
    assert scaled.tolist() == [0.5] + [0.0] * 39


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"by": "tokens"}, "'tokens'.*neither 'cost' nor 'seconds'"),
        ({"scale": 0}, "scale=0 .*positive number or 'p95'"),
        ({"scale": "p90"}, "scale='p90'"),
        ({"kind": 1}, "kind"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        totals(STEP, routerag.STAGE_2, **options)


def test_equation_9_the_mean_of_the_step_cancels_where_a_whole_group_is_right():
    """Within such a group, advantages without division by the deviation depend on costs alone."""
    group = [episode("Ghana", 1.0), episode("Ghana", 3.0)]
    for others in ([], [episode("Togo", 4.0)], [episode("Ghana")] * 3):
        first, second = totals([*group, *others], routerag.STAGE_2, scale=10.0)[:2]
        assert first - second == pytest.approx(0.2)  # the costs differ by 2


# --- data --------------------------------------------------------------------------------------------------------------


def test_its_real_training_questions(shared_data):
    path = shared_data("routerag_rl/questions_dev.jsonl.gz")
    source = open_dataset(str(path))
    with gzip.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(source) == len(rows) == 7092
    for i in (0, 1, 3500, 7091):
        assert (source[i].id, source[i].question) == (rows[i]["id"], rows[i]["question"])
        assert list(source[i].answers) == rows[i]["golden_answers"]
    assert all(len(source[i].answers) == 1 for i in range(len(source)))  # one gold a row, RECIPES 2.5
    yes_no = sum(source[i].answers[0].lower() in ("yes", "no") for i in range(len(source)))
    assert 0.05 < yes_no / len(source) < 0.075  # 6.2 % of the 10,000
    questions = [source[i].question for i in range(len(source))]
    assert not any(
        tag in question for question, tag in itertools.product(questions, ("<search>", "Question:", "[graph]"))
    )


def test_the_recipe_is_reached_by_name():
    assert isinstance(GRAMMARS.get("routerag")(tools=("passage",)), RouteRAGGrammar)
    assert dataclasses.replace(GRAMMAR, tools=("passage", "graph")).tools == ("passage", "graph")
