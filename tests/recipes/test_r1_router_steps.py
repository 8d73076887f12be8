"""R1-Router's chats: what is said, what is read back, and what counts as the form."""

import dataclasses

import pytest

from routerl_jax.data.trajectories import Document, GoldenStep, golden_steps, read_trajectories
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar
from routerl_jax.recipes.r1_router.steps import StepProtocol
from tests import tiny

PROTOCOL = StepProtocol(tools=("text", "table", "text_image"))
HISTORY = [("capital of ghana?", "Accra."), ("people of accra?", "2.5 million.")]
ROUTE = "<think>hm</think>\n<sub-question>{}</sub-question>\n<ret>{}</ret>"


@pytest.mark.parametrize(
    ("query", "name", "tool"),
    [
        ("How long?", "text retriever", "text"),
        ("How long?", " Text Image  Retriever\n", "text_image"),
        ("how long?", "table retriever", "table"),
        ("None", "none", "none"),
    ],
)
def test_routes_are_read(query, name, tool):
    """In chats of their own and in one growing conversation the names mean the same."""
    action = PROTOCOL.routes.parse(ROUTE.format(query, name))
    assert (action.kind, action.tool, action.query, action.thought) == ("search", tool, query, "hm")
    growing = R1RouterGrammar(tools=PROTOCOL.tools)
    assert growing.parse(ROUTE.format(query, name)).tool == tool
    assert growing.choices.names == PROTOCOL.choices.names


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            ROUTE.format("q", "web retriever"),
            "there is no 'web retriever'; there are: text retriever, table retriever, text",
        ),
        (ROUTE.format("q", "text retriever, table retriever"), "there is no 'text retriever, table retriever'"),
        (ROUTE.format("none", "text retriever"), "must both be none, or neither"),
        (ROUTE.format("q", "none"), "must both be none, or neither"),
        (ROUTE.format(" ", "text retriever"), "nothing in <sub-question>"),
        ("<think>hm</think><sub-question>q</sub-question>", "nothing in <ret>"),
        ("<answer>Accra</answer>", "nothing in <sub-question>"),
    ],
)
def test_what_is_no_route_says_why(text, error):
    action = PROTOCOL.routes.parse(text)
    assert action.kind == "invalid"
    assert error in action.error


def test_answers_are_read():
    action = PROTOCOL.answers.parse("<think>so</think>\n<answer> Accra </answer>")
    assert (action.kind, action.answer, action.thought) == ("answer", "Accra", "so")
    assert PROTOCOL.answers.parse("<think>so</think> Accra").kind == "invalid"
    assert PROTOCOL.answers.parse("<answer> </answer>").kind == "invalid"


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        (ROUTE.format("q", "text retriever"), True),
        (ROUTE.format("is 2 < 3?", "any name"), True),
        (ROUTE.format("none", "none") + "\n", True),
        (ROUTE.format("", "text retriever"), False),
        (ROUTE.format("q", "text retriever") + " and more", False),
        ("well " + ROUTE.format("q", "text retriever"), False),
        (ROUTE.format("q", "text retriever").replace("<think>hm</think>\n", ""), False),
        (ROUTE.format("q</ret>", "text retriever"), False),
        ("<think>hm</think><ret>text retriever</ret><sub-question>q</sub-question>", False),
        ("<think>hm</think><answer>q</answer>", False),
    ],
)
def test_the_form_of_a_route(text, fine):
    assert PROTOCOL.routes.well_formed(text) is fine


@pytest.mark.parametrize(
    ("text", "fine"),
    [
        ("<think>so</think>\n<answer>Accra</answer>", True),
        ("<think></think><answer>Accra</answer>", True),
        ("<answer>Accra</answer>", False),
        ("<think>so</think><answer></answer>", False),
        ("<think>so</think>Well: <answer>Accra</answer>", False),
        ("<think><answer>x</answer></think><answer>Accra</answer>", False),
    ],
)
def test_the_form_of_an_answer(text, fine):
    assert PROTOCOL.answers.well_formed(text) is fine


@pytest.mark.parametrize("tool", [*PROTOCOL.tools, "none"])
def test_what_it_writes_is_well_formed_and_read_as_it_was_meant(tool):
    written = PROTOCOL.routes.write_search("because", "none" if tool == "none" else "how long?", tool)
    assert PROTOCOL.routes.well_formed(written)
    assert PROTOCOL.routes.parse(written).tool == tool
    assert PROTOCOL.answers.well_formed(PROTOCOL.answers.write_answer("so", "Accra"))


def test_a_golden_step_is_asked_for_in_the_words_of_any_other():
    documents = (Document(retriever="text retriever", text="Accra\nis  big."),)
    asked = {
        "route": (GoldenStep(kind="route", history=tuple(HISTORY)), PROTOCOL.route("Why?", HISTORY)),
        "answer": (
            GoldenStep(kind="answer", history=tuple(HISTORY), query="big?", documents=documents),
            PROTOCOL.answer("big?", documents),
        ),
        "final": (GoldenStep(kind="final", history=tuple(HISTORY)), PROTOCOL.final("Why?", HISTORY)),
    }
    for step, said in asked.values():
        assert PROTOCOL.golden("Why?", step) == said
    so_far = "Question: Why?\nSub-question 1: capital of ghana?\nAnswer 1: Accra.\n"
    assert asked["route"][1].user.startswith(so_far)
    assert asked["final"][1].user.startswith(so_far)
    assert asked["answer"][1].user == "[text retriever 1] Accra is big.\nQuestion: big?\nAnswer:\n"
    assert [said.form.stops for _, said in asked.values()] == [("</ret>",), ("</answer>",), ("</answer>",)]
    assert len({said.system for _, said in asked.values()}) == 3
    assert "The search failed: no reply" in PROTOCOL.answer("big?", (), "The search failed: no reply").user


def test_the_instructions_name_every_retriever_and_the_form():
    system = PROTOCOL.route("Why?", []).system
    for name in ("text retriever", "table retriever", "text image retriever"):
        assert f"- {name}: " in system
    assert PROTOCOL.routes.well_formed(system[system.rindex("<think>") :])
    assert "'elements'" in StepProtocol(tools=("text", "elements")).route("Why?", []).system


def test_prompts_with_and_without_a_chat_template():
    said, plain = PROTOCOL.final("Why?", []), tiny.tokenizer()
    shown = {
        instruct: plain.decode(PROTOCOL.opening(said, plain, instruct=instruct, marks="<i>")) for instruct in (0, 1)
    }
    assert shown[0] == "<i>Question: Why?\nFinal answer:\n"
    assert shown[1] == f"{said.system}\n\nUser: <i>Question: Why?\nFinal answer:\nAssistant: "
    again = PROTOCOL.again(said, "there was nothing")
    assert again == dataclasses.replace(said, user=again.user)
    assert again.user.startswith(said.user)
    assert "there was nothing" in again.user


def test_every_released_golden_step_can_be_written_and_read(shared_data):
    path = shared_data("r1router_trajectories/trajectories_dev.jsonl.gz")
    kinds = set()
    for _, trajectory in read_trajectories(path):
        for step in golden_steps(trajectory):
            written = PROTOCOL.write_golden(step)
            kinds.add(step.kind)
            if step.kind == "route":
                action = PROTOCOL.routes.parse(written)
                assert (action.query, (PROTOCOL.label(action.tool),)) == (step.query, step.retrievers)
                assert PROTOCOL.routes.well_formed(written)
            elif step.answers[0]:
                assert PROTOCOL.answers.parse(written).answer == step.answers[0].strip()
                assert PROTOCOL.answers.well_formed(written)
    assert kinds == {"route", "answer", "final"}
