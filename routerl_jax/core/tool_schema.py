"""How a search tool is shown to a model that calls it as a function."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

_QUERY = "query"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolSchema:
    """A function that searches.

    Attributes:
      name: of the function, as the model writes it.
      description: for the model.
      query: name of the argument that holds the query, a string. Every call must have it. "": the function has no arguments.
      about: the JSON schema of that argument.
    """

    name: str
    description: str
    query: str = _QUERY
    about: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"type": "string", "description": "What to search for."}, hash=False
    )

    @property
    def json(self) -> dict[str, Any]:
        """The JSON schema that chat templates take."""
        arguments = {self.query: dict(self.about)} if self.query else {}
        parameters = {"type": "object", "properties": arguments, "required": list(arguments)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": parameters},
        }


def kb_schema(name: str, description: str = "") -> ToolSchema:
    """A knowledge base as a function `search_NAME(query)`.

    Args:
      description: what it contains; "" if unknown.
    """
    purpose = f"Searches the knowledge base {name!r} and returns the best passages."
    return ToolSchema(name=function_name(name), description=f"{purpose} {description.strip()}".strip())


def function_name(name: str) -> str:
    """The function name of a knowledge base. It has only letters, digits, `_` and `-`, as the APIs of models require."""
    return "search_" + re.sub(r"[^0-9A-Za-z_-]", "_", name)
