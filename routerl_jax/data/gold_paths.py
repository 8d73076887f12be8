"""The gold path of a question, whichever data set it is from: which facts are to be found, where, and by what question."""

from __future__ import annotations

import dataclasses
from typing import Any

from routerl_jax.core.types import Example, Passage


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldHop:
    """One step of a gold path; what a data set does not say is "".

    Attributes:
      query: the sub-question.
      kb: the knowledge base that answers it.
      value: the fact that it asks for.
      passage_id, title: of a passage that states it.
    """

    query: str = ""
    kb: str = ""
    value: str = ""
    passage_id: str = ""
    title: str = ""

    def found_in(self, passages: tuple[Passage, ...]) -> bool:
        """Whether its passage is among these: by id or title or, where neither is known, a passage that states the value."""
        if not (self.passage_id or self.title):
            return bool(self.value) and any(self.value.lower() in passage.text.lower() for passage in passages)
        named = {("id", self.passage_id), ("title", self.title)} - {("id", ""), ("title", "")}
        return any(named & {("id", passage.id), ("title", passage.title)} for passage in passages)


def gold_path(example: Example) -> tuple[GoldHop, ...] | None:
    """The hops of an example in their order; () if it needs none, None if its data set says nothing of them.

    Read are Atlas's `path`, 2WikiMultihopQA's `evidence_triples` (subject, relation, object: where a subject is the title of a
    passage) and, of any other data set, its `supporting_passages` (docs/data.md), of which only id and title are known.
    """
    metadata = example.metadata
    if (path := metadata.get("path")) is not None:
        return tuple(GoldHop(**{name: str(hop.get(name, "")) for name in _NAMES}) for hop in path)
    if triples := metadata.get("evidence_triples"):
        return tuple(GoldHop(query=f"{what} of {of}", value=value, title=of) for of, what, value in triples)
    if passages := metadata.get("supporting_passages"):
        return tuple(map(_supporting, passages))
    return None


_NAMES = ("query", "kb", "value", "passage_id", "title")


def _supporting(passage: Any) -> GoldHop:
    return GoldHop(passage_id=str(passage["id"]), title=str(passage["title"]))
