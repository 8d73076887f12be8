"""Worked examples of searches by the picture and in words, planned by chance (data.atlas.plans), with what is really found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.types import Demonstration, Passage, TextAndImage
from routerl_jax.data.atlas.plans import Planned


def searched(
    examples: Sequence[Planned], tools: Mapping[str, SearchTool], names: tuple[str, str], k: int, image_k: int
) -> list[Demonstration]:
    """The plans carried out, one call of each knowledge base for all.

    Args:
      names: of the knowledge bases for pictures and for words.
      k, image_k: passages per search in words and by the picture.
    """
    pictured = [one for one in examples if "image" in one.plan]
    worded = [one for one in examples if "text" in one.plan]
    pictures = tools[names[0]].search([TextAndImage(image=one.example.images[0]) for one in pictured], image_k)
    by_picture: dict[int, Sequence[Passage]] = {id(one): found for one, found in zip(pictured, pictures)}
    queries = [one.query(one.named(by_picture.get(id(one)))) for one in worded]
    in_words = {id(one): found for one, found in zip(worded, tools[names[1]].search(queries, k))}
    return [one.demonstration(names, by_picture.get(id(one)), in_words.get(id(one))) for one in examples]
