"""What a run's policy is told of its knowledge bases, and the chat template that it is told in."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from configs import smollm2_search
from routerl_jax.agents.tool_forms import form_of
from routerl_jax.core.config import from_config_dict
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.core.tool_schema import ToolSchema
from routerl_jax.core.types import Example, Passage
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.training import config as schema
from routerl_jax.training.knowledge import tool_schemas
from routerl_jax.training.setup import build_mesh, build_policy, build_recipe
from tests import tiny
from tests.agents import chat_templates as templates
from tests.knowledge.test_mcp import command

EXAMPLE = Example(id="q", question="Who?", answers=("A",))
MADE: list[str] = []


class Described:
    """A tool that has a schema of its own."""

    def __init__(self, where: str) -> None:
        MADE.append(where)

    schema = ToolSchema(name="look_up", description="Looks up.", query="words")

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [[] for _ in queries]


class Wrong(Described):
    schema: Any = property(lambda _: {"name": "x"})


def described(where: str) -> Described:
    return Described(where)


def unsaid(where: str):
    raise AssertionError("made for nothing")


def tool(source: str, **settings: str) -> schema.KnowledgeConfig:
    return schema.KnowledgeConfig(kind="tool", source=f"tests.training.test_tool_schemas:{source}", settings=settings)


def test_schemas_come_from_names_descriptions_and_tools() -> None:
    """A tool with a schema is made once in a process to be asked, and only if that is said of what makes it."""
    MADE.clear()
    knowledge = {
        "wiki 18": schema.KnowledgeConfig(source="corpus.jsonl", description="Wikipedia."),
        "web": tool("Described", where="here"),
        "more": tool("described", where="there"),
        "plain": tool("unsaid", where="nowhere"),
    }
    for _ in range(2):
        schemas = tool_schemas(knowledge)
    assert {name: one.name for name, one in schemas.items()} == {
        "wiki 18": "search_wiki_18",
        "web": "look_up",
        "more": "search_more_look_up",
        "plain": "search_plain",
    }
    assert MADE == ["here", "there"]
    assert schemas["wiki 18"].description.endswith("Wikipedia.")
    assert list(schemas["web"].json["function"]["parameters"]["properties"]) == ["words"]
    renamed = {"web": dataclasses.replace(tool("Described", where="here"), description="The web.")}
    assert tool_schemas(renamed)["web"].description == "The web."
    with pytest.raises(ValueError, match=r"config\.knowledge\.web: its schema is a dict; give a"):
        tool_schemas({"web": tool("Wrong", where="x")})


class Silent(Described):
    closed = False

    @property
    def schema(self) -> ToolSchema:
        raise ConnectionError("nobody answered")

    def close(self) -> None:
        Silent.closed = True


def test_a_tool_that_can_not_be_asked_is_closed() -> None:
    with pytest.raises(ConnectionError, match="nobody answered"):
        tool_schemas({"web": tool("Silent", where="x")})
    assert Silent.closed


def test_the_schema_of_an_mcp_tool_is_its_servers() -> None:
    knowledge = schema.KnowledgeConfig(
        kind="tool",
        source="routerl_jax.extras.mcp_tools:McpTool",
        settings={"server": command("foreign"), "tool": "rows", "query_key": "question", "k_key": "limit"},
    )
    config = schema.TrainConfig(
        recipe="search_r1",
        model=schema.ModelConfig(path="x"),
        agent=schema.AgentConfig(grammar="tool_calls"),
        knowledge={"web": knowledge},
    )
    agent: Any = build_recipe(config).agent
    action = agent.grammar.parse('<tool_call>{"name": "rows", "arguments": {"question": "who"}}</tool_call>')
    assert (action.kind, action.tool, action.query) == ("search", "web", "who")
    prompt = templates.tokenizer(templates.QWEN25).decode(agent.opening(EXAMPLE, templates.tokenizer(templates.QWEN25)))
    assert '"name": "rows"' in prompt
    assert '"required": ["question"]' in prompt


def test_a_description_that_nobody_reads_is_refused() -> None:
    wiki = schema.KnowledgeConfig(source="corpus.jsonl", description="Wikipedia.")
    config = schema.TrainConfig(model=schema.ModelConfig(path="x"), knowledge={"wiki": wiki}, recipe="search_r1")
    with pytest.raises(ValueError, match=r"config\.knowledge\.wiki\.description: the policy is not shown it"):
        build_recipe(config)
    calls = dataclasses.replace(config, agent=schema.AgentConfig(grammar="tool_calls"))
    (function,) = build_recipe(calls).agent.functions
    assert json.dumps(function).count("Wikipedia.") == 1


def test_a_prompt_that_names_the_sources() -> None:
    """In the words of the protocol; a knowledge base without a description has its name alone."""
    knowledge = {
        "text": schema.KnowledgeConfig(source="corpus.jsonl", description="Wikipedia."),
        "minutes": schema.KnowledgeConfig(source="minutes.jsonl"),
    }
    prompt = "{sources}\nQuestion: {question}\n"
    for grammar, lines in (("search_r1", None), ("r1_router", "- text retriever: Wikipedia.\n- minutes retriever")):
        config = schema.TrainConfig(
            recipe="search",
            model=schema.ModelConfig(path="x"),
            agent=schema.AgentConfig(grammar=grammar, prompt=prompt),
            knowledge=knowledge if lines else {"text": knowledge["text"]},
        )
        tokens = build_recipe(config).agent.opening(EXAMPLE, tiny.tokenizer())
        shown = tiny.tokenizer().decode(tokens)
        assert (lines or "- text: Wikipedia.") + f"\nQuestion: {EXAMPLE.question}\n" in shown
    with pytest.raises(ValueError, match=r"config\.agent\.prompt.*leave out \{sources\}"):
        build_recipe(dataclasses.replace(config, agent=schema.AgentConfig(grammar="tool_calls", prompt=prompt)))


def test_the_chat_template_of_a_run(tmp_path: pathlib.Path) -> None:
    """It takes the place of the model's own, in the policy that others load, too."""
    model = tiny.model(vocab_size=len(templates.tokenizer(None)))
    model.tokenizer = templates.tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
    save_pretrained(model, tmp_path / "policy", model.tokenizer)
    shipped = from_config_dict(schema.TrainConfig, smollm2_search.get_config("tool_calls-cpu"))
    config = dataclasses.replace(shipped, model=dataclasses.replace(shipped.model, path=str(tmp_path / "policy")))
    policy = build_policy(config, build_mesh(config.mesh))
    assert policy.tokenizer is not None
    assert form_of(policy.tokenizer).name == "hermes"
    save_pretrained(policy, tmp_path / "trained", policy.tokenizer)
    assert form_of(Tokenizer.load(tmp_path / "trained")).name == "hermes"
    prompt = policy.tokenizer.decode(build_recipe(config).agent.opening(EXAMPLE, policy.tokenizer))
    assert prompt.endswith("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    assert "search_text" in prompt
    wrong = dataclasses.replace(config, model=dataclasses.replace(config.model, chat_template="qwen"))
    with pytest.raises(ValueError, match=r"config\.model\.chat_template: 'qwen' is neither one of hermes"):
        build_policy(wrong, build_mesh(config.mesh))
