"""How the knowledge bases of a run are shown to a policy that calls functions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from routerl_jax.core.config import from_config_dict
from routerl_jax.core.tool_schema import ToolSchema, kb_schema
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import TOOL, make_tool, tool_factory


def tool_schemas(knowledge: Mapping[str, KnowledgeConfig]) -> dict[str, ToolSchema]:
    """By knowledge base: made of its name and config.knowledge.NAME.description, or the schema that a tool has of its own
    (`schema`, such as that of McpTool, whose server is asked). A function that makes tools must say of which class they are.

    Raises:
      ValueError: a tool with a schema of its own can't be made.
    """
    schemas: dict[str, ToolSchema] = {}
    for name, spec in knowledge.items():
        schema = kb_schema(name, spec.description)
        if spec.kind == TOOL and _has_schema(tool_factory(name, spec)):
            own = _own_schema(name, json.dumps(dataclasses.asdict(spec), sort_keys=True))
            schema = dataclasses.replace(own, description=spec.description or own.description)
        if schema.name in {one.name for one in schemas.values()}:  # two servers may call their tools alike
            schema = dataclasses.replace(schema, name=f"{kb_schema(name).name}_{schema.name}")
        schemas[name] = schema
    return schemas


def _has_schema(factory: Callable[..., Any]) -> bool:
    """Whether what a class or a function makes has a schema, as far as that is said."""
    if inspect.isclass(factory):
        return hasattr(factory, "schema")
    try:
        return hasattr(typing.get_type_hints(factory).get("return"), "schema")
    except (NameError, TypeError):  # annotations that only type checkers can read
        return False


@functools.lru_cache(64)
def _own_schema(name: str, spec: str) -> ToolSchema:
    """Of a tool of this configuration (JSON), asked once in a process."""
    tool: Any = make_tool(name, from_config_dict(KnowledgeConfig, json.loads(spec), f"config.knowledge.{name}"))
    schema = tool.schema
    if close := getattr(tool, "close", None):
        close()
    if not isinstance(schema, ToolSchema):
        raise ValueError(
            f"config.knowledge.{name}: its schema is a {type(schema).__name__}; give a core.tool_schema.ToolSchema"
        )
    return schema
