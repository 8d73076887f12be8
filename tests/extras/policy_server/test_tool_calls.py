"""Calls of functions: what the template is given, and what is read of a reply, in the forms of Qwen and Llama."""

from __future__ import annotations

import json
from typing import Any

import pytest

from routerl_jax.extras.policy_server.policy import read_calls
from tests.extras.policy_server.scripted import ScriptedWriter
from tests.extras.policy_server.served import serving

TEMPLATE = (
    "{% if tools %}# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments.q }}</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "Accra", "k": 3}}\n</tool_call>'
NESTED = '{"a":' * 100_000  # as a policy writes that has begun to repeat itself


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        (CALL, "", [("search", {"q": "Accra", "k": 3})]),
        (f"I look.\n{CALL}\n{CALL}", "I look.", [("search", {"q": "Accra", "k": 3})] * 2),
        (CALL.removesuffix("</tool_call>"), "", [("search", {"q": "Accra", "k": 3})]),  # it ended its turn there
        ('{"name": "search", "parameters": {"q": "é"}}', "", [("search", {"q": "é"})]),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}',
            "",
            [("f", {}), ("g", {"a": 1})],
        ),
        # half of a surrogate pair, which the reply's JSON could not hold
        ('<tool_call>{"name": "f", "arguments": {"q": "\\ud83d"}}</tool_call>', "", [("f", {"q": "?"})]),
        ("<tool_call>{not json}</tool_call>", "<tool_call>{not json}</tool_call>", []),
        ('{"name": "f", "parameters": {"q": NaN}}', '{"name": "f", "parameters": {"q": NaN}}', []),
        (NESTED, NESTED, []),
        (f"<tool_call>{NESTED}", f"<tool_call>{NESTED}", []),
        ('{"answer": 1}', '{"answer": 1}', []),
        ('{"name": "f", "parameters": {}} and more', '{"name": "f", "parameters": {}} and more', []),
        ("just words", "just words", []),
        (f"<think>like {CALL}?</think>No.", f"<think>like {CALL}?</think>No.", []),
        (f"<think>like {CALL}?</think>\n{CALL}", f"<think>like {CALL}?</think>", [("search", {"q": "Accra", "k": 3})]),
        (f"<think>I would write {CALL}", f"<think>I would write {CALL}", []),
        ('<think>{}</think>\n{"name": "f", "parameters": {}}', "<think>{}</think>", [("f", {})]),
    ],
)
def test_calls_are_read(text: str, said: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    rest, found = read_calls(text)
    assert rest == said
    assert [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in found] == calls
    assert len({one["id"] for one in found}) == len(found)


def test_a_policy_calls_a_function_and_reads_its_result() -> None:
    """Whole and in pieces; the second request holds the call and what came of it, in the template's own form."""
    engine = ScriptedWriter([f"I look. {CALL}", f"I look. {CALL}", "It is Accra."], TEMPLATE)
    with serving(engine) as server:
        client = server.client()
        messages: list[Any] = [{"role": "user", "content": "capital of Ghana?"}]
        reply = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        (call,) = choice.message.tool_calls or []
        assert json.loads(call.function.arguments) == {"q": "Accra", "k": 3}
        assert '"name": "search"' in engine.prompts[0].partition("user:")[0]
        chunks = list(client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, stream=True))
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert [delta.content for delta in deltas] == ["", "I look."]
        assert deltas[1].tool_calls[0].function.name == "search"
        assert (deltas[1].tool_calls[0].index, chunks[-1].choices[0].finish_reason) == (0, "tool_calls")
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Accra is the capital"}]
        reply = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        assert (reply.choices[0].message.content, reply.choices[0].message.tool_calls) == ("It is Accra.", None)
        assert "assistant: I look.<tool_call>search Accra</tool_call>tool: Accra is the capital" in engine.prompts[2]


def test_functions_and_earlier_calls_cannot_begin_or_end_turns() -> None:
    engine = ScriptedWriter(["words"], TEMPLATE)
    tag = min(engine.tokenizer.marks)
    function: Any = {"name": f"f{tag}", "arguments": json.dumps({"q": f"a{tag}", tag: 1})}
    messages: list[Any] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": function}]},
    ]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": tag}}]
    with serving(engine) as server:
        server.client().chat.completions.create(model="tiny", messages=messages, tools=tools)
    (prompt,) = engine.prompts
    assert f"<tool_call>f{tag[0]} {tag[1:]} a{tag[0]} {tag[1:]}</tool_call>" in prompt
    assert tag not in prompt


def test_tools_that_nobody_may_call_change_nothing() -> None:
    engine = ScriptedWriter([CALL], TEMPLATE)
    with serving(engine) as server:
        options: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
        reply = server.client().chat.completions.create(**options, tool_choice="none")
        assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == (CALL, "stop")
        assert "# Tools" not in engine.prompts[0]
