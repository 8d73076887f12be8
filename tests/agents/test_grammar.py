"""Both published tag protocols: parsing, strictness, and what is written back."""

import re

import pytest

from routerl_jax.agents.grammar import GRAMMARS
from routerl_jax.core.types import Call, Passage
from routerl_jax.recipes import known  # noqa: F401 - all grammars register themselves
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar
from routerl_jax.recipes.r1_searcher import R1SearcherGrammar

ROUTER = R1RouterGrammar(tools=("text", "text_image", "table"))
SEARCHER = R1SearcherGrammar(tools=("text",))
PASSAGES = (
    Passage(id="1", title="Accra", text="A city\nof Ghana."),
    Passage(id="2", title="Togo", text="Togo borders Ghana."),
)


def test_r1_router_reads_its_three_kinds_of_turns():
    action = ROUTER.parse("<think>a\nb</think>\n<sub-question>Who?</sub-question>\n<ret>Text Image Retriever</ret>")
    assert (action.kind, action.tool, action.query, action.thought) == ("search", "text_image", "Who?", "a\nb")
    assert ROUTER.parse("<think>x</think><ret> None </ret>").tool == "none"
    assert ROUTER.parse("<think>x</think><answer> Accra </answer>").answer == "Accra"
    assert ROUTER.parse("nothing").kind == "invalid"
    nothing = "<think>x</think><sub-question>None</sub-question><ret>"
    assert ROUTER.parse(f"{nothing}table retriever</ret>").error == "the sub-question is none, and the retriever is not"
    assert ROUTER.parse(f"{nothing}none</ret>").tool == "none"
    assert not ROUTER.choices.open(nothing)  # nothing to choose between
    capitals = R1RouterGrammar(tools=("Wiki", "table"))
    action = capitals.parse(capitals.write_search("t", "q", "Wiki"))
    assert (action.kind, action.tool) == ("search", "Wiki")


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("<think>x</think><sub-question>q</sub-question><ret>text retriever</ret>", True),
        ("<think>x</think>\n<answer>a</answer>\n", True),
        ("<sub-question>q</sub-question><ret>text retriever</ret>", False),
        ("<think>x</think>well<answer>a</answer>", False),
        ("<think>x</think><answer>a</answer><answer>b</answer>", False),
        ("<think>x<think></think><answer>a</answer>", False),
    ],
)
def test_r1_router_well_formed(text, fine):
    assert ROUTER.well_formed(text) is fine


def test_r1_router_observations():
    call = Call(tool="text_image", query="q", passages=PASSAGES)
    expected = "<information>\ntir-0: Accra: A city of Ghana.\ntir-1: Togo borders Ghana.\n</information>"
    assert ROUTER.observation(call, PASSAGES) == expected
    assert ROUTER.observation(call, ()) == "<information>\nWhat was found is too long to be shown.\n</information>"
    nothing = Call(tool="text", query="q")
    assert ROUTER.observation(nothing, ()) == "<information>\nNothing was found.\n</information>"
    failed = Call(tool="text", query="q", error="no reply within 2 s")
    assert "no reply within 2 s" in ROUTER.observation(failed, ())


def test_r1_searcher_reads_queries_in_running_text():
    action = SEARCHER.parse('I need this. <|begin_of_query|> "Fort  Hood"\nshooting <|end_of_query|>')
    assert (action.kind, action.tool, action.query, action.thought) == (
        "search",
        "text",
        "Fort Hood shooting",
        "I need this.",
    )
    assert SEARCHER.parse("so</think>\n<answer>Nidal Hasan</answer>").answer == "Nidal Hasan"
    assert SEARCHER.parse("<|begin_of_query|> <|end_of_query|>").error == "the query is empty"
    assert SEARCHER.parse("no marks").kind == "invalid"


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("thinking <|begin_of_query|>q<|end_of_query|>", True),
        ("thinking <|begin_of_query|>q<|end_of_query|>\n\n", True),  # Qwen and Llama have one token for ">\n\n"
        ("thinking <|begin_of_query|>q<|end_of_query|> so", False),
        ("done</think>\n<answer>a</answer>", True),
        ("done<answer>a</answer>", False),
        ("done</think><answer>a</answer> and more", False),
        ("x <|begin_of_documents|>forged<|end_of_documents|> <|begin_of_query|>q<|end_of_query|>", False),
        ("<|begin_of_query|>a<|end_of_query|> <|begin_of_query|>b<|end_of_query|>", False),
    ],
)
def test_r1_searcher_well_formed(text, fine):
    assert SEARCHER.well_formed(text) is fine


def test_r1_searcher_observation():
    text = SEARCHER.observation(Call(tool="text", query="q", passages=PASSAGES), PASSAGES)
    assert "too long to be shown" in SEARCHER.observation(Call(tool="text", query="q", passages=PASSAGES), ())
    assert "Nothing was found" in SEARCHER.observation(Call(tool="text", query="q"), ())
    assert text == (
        "\n\n<|begin_of_documents|>\n(1)Title: Accra Text: A city of Ghana.\n(2)Title: Togo Text: Togo borders Ghana.\n"
        "<|end_of_documents|>\n\n"
    )


@pytest.mark.parametrize("name", list(GRAMMARS))
def test_what_a_grammar_writes_it_reads(name):
    tool = "passage" if name.startswith("routerag") else "text"
    grammar = GRAMMARS.get(name)(tools=(tool,))
    search = grammar.write_search("I wonder", "who?", tool)
    assert grammar.well_formed(search)
    action = grammar.parse(search)
    assert (action.kind, action.tool, action.query, action.thought) == ("search", tool, "who?", "I wonder")
    answer = grammar.write_answer("so", "Accra")
    assert grammar.well_formed(answer)
    assert (grammar.parse(answer).answer, grammar.parse(answer).thought) == ("Accra", "so")
    assert grammar.parse(grammar.answer_opening + "Accra</answer>").answer == "Accra"
    if grammar.functions:  # what ends turns and marks calls is the chat template's (test_tool_calls)
        assert grammar.stops == ()
        return
    assert any(search.endswith(stop) for stop in grammar.stops)
    assert any(answer.endswith(stop) for stop in grammar.stops)
    for tag in re.findall(r"<[^<>]+>", search + answer + grammar.observation(Call(tool=tool, query=""), ())):
        assert tag in grammar.special_tokens
        assert tag in grammar.instructions()


def test_r1_searcher_needs_one_knowledge_base():
    with pytest.raises(ValueError, match="needs exactly one"):
        R1SearcherGrammar(tools=("a", "b"))
