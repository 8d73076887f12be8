"""Demonstrations of searches by picture and by text, from randomly drawn plans (data.atlas.sight), with real search results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.types import Demonstration, Passage, TextAndImage
from routerl_jax.data.atlas.sight import Planned


def searched(
    examples: Sequence[Planned], tools: Mapping[str, SearchTool], names: tuple[str, str], k: int, image_k: int
) -> list[Demonstration]:
    """Carries out the plans, with one call of each knowledge base for all of them.

    Args:
      names: names of the knowledge bases for pictures and for text.
      k, image_k: passages per search by text and by picture.
    """
    pictured = [plan for plan in examples if "image" in plan.plan]
    worded = [plan for plan in examples if "text" in plan.plan]
    pictures = tools[names[0]].search([TextAndImage(image=plan.example.images[0]) for plan in pictured], image_k)
    by_picture: dict[int, Sequence[Passage]] = {id(plan): passages for plan, passages in zip(pictured, pictures)}
    queries = [plan.query(plan.named(by_picture.get(id(plan)))) for plan in worded]
    in_words = {id(plan): passages for plan, passages in zip(worded, tools[names[1]].search(queries, k))}
    return [plan.demonstration(names, by_picture.get(id(plan)), in_words.get(id(plan))) for plan in examples]
