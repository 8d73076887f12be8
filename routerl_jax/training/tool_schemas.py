"""The function schemas of a run's knowledge bases, for policies that call functions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import typing
from collections.abc import Callable, Mapping
from typing import Any

from routerl_jax.core.config import from_config_dict
from routerl_jax.core.types import ToolSchema, kb_schema
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import TOOL, make_tool, tool_factory


def tool_schemas(knowledge: Mapping[str, KnowledgeConfig]) -> dict[str, ToolSchema]:
    """A schema for each knowledge base, from its name and config.knowledge.NAME.description.

    A tool with an attribute `schema` has its own; McpTool asks its server for it. A function that makes tools must name their
    class in its return annotation.

    Raises:
      ValueError: a tool with a schema of its own can't be made, or its schema is no ToolSchema.
    """
    schemas: dict[str, ToolSchema] = {}
    for name, spec in knowledge.items():
        schema = kb_schema(name, spec.description)
        if spec.kind == TOOL and _has_schema(tool_factory(name, spec)):
            own = _own_schema(name, json.dumps(dataclasses.asdict(spec), sort_keys=True))
            schema = dataclasses.replace(own, description=spec.description or own.description)
        if schema.name in {
            existing.name for existing in schemas.values()
        }:  # two servers may have tools of the same name
            schema = dataclasses.replace(schema, name=f"{kb_schema(name).name}_{schema.name}")
        schemas[name] = schema
    return schemas


def _has_schema(factory: Callable[..., Any]) -> bool:
    """True if the objects that a class or function makes have a schema, according to its annotation."""
    if inspect.isclass(factory):
        return hasattr(factory, "schema")
    try:
        return hasattr(typing.get_type_hints(factory).get("return"), "schema")
    except (NameError, TypeError):  # annotations that only a type checker can resolve
        return False


@functools.lru_cache(64)
def _own_schema(name: str, spec: str) -> ToolSchema:
    """The schema of a tool with this configuration (JSON). Each tool is made once per process."""
    tool: Any = make_tool(name, from_config_dict(KnowledgeConfig, json.loads(spec), f"config.knowledge.{name}"))
    try:
        schema = tool.schema
    finally:
        if close := getattr(tool, "close", None):
            close()
    if not isinstance(schema, ToolSchema):
        raise ValueError(
            f"config.knowledge.{name}: its schema is a {type(schema).__name__}; give a core.types.ToolSchema"
        )
    return schema
