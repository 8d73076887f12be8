"""Tool calls for a policy that sees: searches show pictures, and one more function shows a region of the latest one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.agents.grammar import unshown
from routerl_jax.agents.tool_calls import ToolCalls, line_of, tagless
from routerl_jax.agents.tool_forms import ReadCall, quoted
from routerl_jax.core.types import Action, Call, Observation, Passage, Shown
from routerl_jax.models.regions import RefusedRegion, read_box

LOOK = "look_closer"
_BOX = "box"
_FUNCTION: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": LOOK,
        "description": "Shows a region of the picture that was shown last, enlarged.",
        "parameters": {
            "type": "object",
            "properties": {
                _BOX: {
                    "type": "array",
                    "items": {"type": "number"},
                    "description": "The region's left, top, right and bottom in that picture.",
                }
            },
            "required": [_BOX],
        },
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LookingCalls(ToolCalls):
    """`ToolCalls` with pictures. A search shows passages that have a picture by title and picture, others by their text. A call
    of `look_closer(box)` shows a region of the latest picture, the question's own too.

    The agent's `regions` (config.agent.settings={"regions": ..}) says in which coordinates boxes are.

    Raises:
      ValueError: two functions have the same name.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if tool := next((tool for tool, schema in self._all_schemas.items() if schema.name == LOOK), ""):
            raise ValueError(f"the knowledge base {tool!r} is the function {LOOK!r} to the model, as closer looks are")

    @property
    def functions(self) -> tuple[dict[str, Any], ...]:
        return (*super().functions, dict(_FUNCTION))

    def _action(self, call: ReadCall, thought: str) -> Action:
        if call.name != LOOK:
            return super()._action(call, thought)
        if _BOX not in call.arguments:
            return Action(kind="invalid", thought=thought, error=f"the argument {_BOX!r} of {LOOK} is missing")
        if unknown := sorted(set(call.arguments) - {_BOX}):
            error = f"{LOOK} has no argument {quoted(unknown[0])}; it has {_BOX!r} alone"
            return Action(kind="invalid", thought=thought, error=error)
        try:
            return Action(kind="region", box=read_box(json.dumps(call.arguments[_BOX])), thought=thought)
        except RefusedRegion as error:
            return Action(kind="invalid", thought=thought, error=str(error))

    def write_look(self, thought: str, box: Sequence[float]) -> str:
        whole = [int(value) if float(value).is_integer() else value for value in box]
        return self._form.write(thought, LOOK, {_BOX: whole})

    def observation(self, call: Call, passages: Sequence[Passage]) -> Observation:
        """The passages, one a line; marks of calls and answers in titles and texts are broken up."""
        if message := unshown(call, passages):
            return message
        pieces: list[str | Shown] = []
        for i, passage in enumerate(passages, 1):
            begins = f"{'' if i == 1 else chr(10)}({i}) "
            if passage.image:
                title = f"{tagless(passage.title)} " if passage.title else ""
                pieces += [begins + title, Shown(passage=passage.id, image=passage.image)]
            else:
                pieces.append(begins + line_of(passage))
        return pieces

    def closer(self, crop: Shown) -> Observation:
        return [crop]

    def instructions(self) -> str:
        return (
            f"{super().instructions()} If something in the picture shown last is too small to be read, call {LOOK} with a box "
            "around it."
        )
