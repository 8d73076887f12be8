"""MMSearch-R1's actions as tool calls: a function without arguments searches by the picture, another one in words."""

from __future__ import annotations

import dataclasses
import re

from routerl_jax.agents.tool_calls import END_OF_TURN, ToolCalls, has_tags, thought_of
from routerl_jax.core.text import split_thoughts
from routerl_jax.core.types import Action, ToolSchema
from routerl_jax.recipes.mmsearch_r1.protocol import REFUSAL, Words

_REFUSED = re.compile(rf"(.*?){re.escape(REFUSAL)}\W*", re.DOTALL)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MMSearchCalls(ToolCalls):
    """`ToolCalls` with a search by the question's picture, and with the protocol's words of refusal.

    Attributes:
      image_tool: the knowledge base that is searched by the picture.
    """

    image_tool: str

    @property
    def _all_schemas(self) -> dict[str, ToolSchema]:
        schemas = super()._all_schemas
        words = schemas[self.image_tool]
        about = f"{words.description} The query is the picture of the question."
        return {**schemas, self.image_tool: dataclasses.replace(words, description=about, query="")}

    def _words(self, text: str) -> Action:
        if (at := split_thoughts(text)[1].find(REFUSAL)) >= 0:
            return Action(kind="refusal", thought=thought_of(text[:at]))
        return super()._words(text)

    def well_formed(self, text: str) -> bool:
        """As for other tool calls; or thoughts and the words of refusal, with nothing behind them."""
        if self.parse(text).kind != "refusal":
            return super().well_formed(text)
        refused = _REFUSED.fullmatch(END_OF_TURN.sub("", text))
        return refused is not None and not has_tags(refused[1])

    def words(self) -> Words:
        """How the policy is told to write its actions."""
        by_picture, (in_words,) = (
            self._all_schemas[self.image_tool].name,
            [schema.name for tool, schema in self._all_schemas.items() if tool != self.image_tool],
        )
        return Words(
            inside="",
            by_picture=f"call {by_picture}",
            in_words=f"call {in_words} with a short search query",
            query=f"call {in_words} with a query",
            results="",
        )
