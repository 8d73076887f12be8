"""The gold path of a question, whichever data set it is from: which facts are to be found, where, and by what question."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.page_ids import page_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldHop:
    """One step of a gold path; what a data set does not say is "".

    Attributes:
      query: the sub-question.
      kb: the knowledge base that answers it.
      value: the fact that it asks for.
      passage_id, title: of a passage that states it.
      needs: the places in the path of hops whose facts must be known before it can be asked for.
    """

    query: str = ""
    kb: str = ""
    value: str = ""
    passage_id: str = ""
    title: str = ""
    needs: tuple[int, ...] = ()

    def found_in(self, passages: tuple[Passage, ...]) -> bool:
        """Whether its passage is among these: by id (a table's rows are parts of it, `TABLE#..`; a page, `DOCUMENT.pdf#3`, may
        have another name, `page_ids`) or title or, where neither is known, a passage that states the value. A title without an
        id may lack what stands in brackets at its end."""
        if not (self.passage_id or self.title):
            return bool(self.value) and any(self.value.lower() in passage.text.lower() for passage in passages)
        if not self.passage_id:
            return any(_bare(passage.title) == _bare(self.title) for passage in passages)
        names = {name for passage in passages for name in (passage.id, passage.id.partition("#")[0])}
        if self.passage_id in names or any(self.title == passage.title for passage in passages if self.title):
            return True
        page = page_of(self.passage_id) if "#" in self.passage_id else None
        return page is not None and any(page_of(passage.id) == page for passage in passages)


def gold_path(example: Example) -> tuple[GoldHop, ...] | None:
    """The hops of an example in their order; () if it needs none, None if its data set says nothing of them.

    Read are, of what there is the first: Atlas's `path`; a `decomposition` (`sub_questions`); 2WikiMultihopQA's
    `evidence_triples` (subject, relation, object: a subject is most often the title of a passage); the gold passages of any
    other data set, of which only id and title are known. Atlas's hops need the one before; others those that they name, by
    `#1` or as a triple whose object is their subject.
    """
    metadata = example.metadata
    if (path := known_path(metadata)) is not None:
        return tuple(
            GoldHop(**{name: str(hop.get(name, "")) for name in _NAMES}, needs=(i - 1,) if i else ())
            for i, hop in enumerate(path)
        )
    if hops := sub_questions(metadata):
        return hops
    if triples := metadata.get("evidence_triples"):
        return _of_triples(triples, gold_passages(metadata))
    if passages := gold_passages(metadata):
        return tuple(GoldHop(passage_id=name, title=title) for name, title in passages.items())
    return None


def known_path(metadata: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """Atlas's `path`: hops, each with the knowledge base `kb` that holds passage `passage_id`; None where there is none. (Other
    data sets call other things so, such as a picture's place.)"""
    path = metadata.get("path")
    if not isinstance(path, list | tuple):
        return None
    return path if all(isinstance(hop, Mapping) and {"kb", "passage_id"} <= hop.keys() for hop in path) else None


def gold_passages(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Titles of the gold passages by their ids, "" where they are not known.

    Read are `supporting_passages` (`{id, title}` each), or `supporting` (ids, of tables too) with `supporting_titles`, and
    `supporting_passages` that are ids themselves (OTT-QA).
    """
    passages = metadata.get("supporting_passages") or ()
    names, titles = metadata.get("supporting") or (), metadata.get("supporting_titles") or ()
    if not any(isinstance(passage, Mapping) for passage in passages):
        known: dict[Any, Any] = dict(zip(names, titles)) if len(names) == len(titles) else {}
        return {name: str(known.get(name, "")) for name in (*names, *passages) if isinstance(name, str)}
    return {str(passage["id"]): str(passage["title"]) for passage in passages}


def sub_questions(metadata: Mapping[str, Any]) -> tuple[GoldHop, ...]:
    """The `decomposition` of a question: sub-questions in which the answers before them stand for MuSiQue's `#1`, with the
    passages that answer them; () where there is none.

    What MuSiQue calls `support` is the passage. Of 2WikiMultihopQA a triple for each sub-question says the passage and, as the
    answers are whole sentences, the value; where there are more or fewer triples, the triples alone are the path.
    """
    steps = metadata.get("decomposition") or ()
    if not all(isinstance(step, Mapping) and step.get("question") for step in steps):
        return ()
    passages = gold_passages(metadata)
    aligned = _of_triples(metadata.get("evidence_triples") or (), passages) or (GoldHop(),) * len(steps)
    if len(aligned) != len(steps):
        return ()
    answers = [str(step.get("answer") or "") for step in steps]
    hops = []
    for place, (step, answer, known) in enumerate(zip(steps, answers, aligned)):
        named = {int(number) - 1 for number in _REFERENCE.findall(step["question"])}
        name = str(step.get("support") or known.passage_id)
        hops.append(
            GoldHop(
                query=_REFERENCE.sub(lambda found: _answer(answers, int(found[1])), step["question"]).replace(
                    " >> ", ", "
                ),
                value=known.value or answer,
                passage_id=name,
                title=passages.get(name, known.title),
                needs=tuple(sorted({one for one in named if 0 <= one < place} | set(known.needs))),
            )
        )
    return tuple(hops)


_NAMES = ("query", "kb", "value", "passage_id", "title")
_ASIDE = re.compile(r"\s*\([^)]*\)$")  # of a title: "Fair Game (1995 film)"
_REFERENCE = re.compile(r"#(\d+)")  # in a sub-question of MuSiQue: the answer of that one


def without_aside(title: str) -> str:
    """A title without what tells it from others of its name: "Fair Game" of "Fair Game (1995 film)"."""
    return _ASIDE.sub("", title)


def _bare(title: str) -> str:
    return without_aside(title).casefold()


def _of_triples(triples: Sequence[Sequence[str]], passages: Mapping[str, str]) -> tuple[GoldHop, ...]:
    objects = [_bare(str(triple[2])) for triple in triples]
    hops = []
    for i, triple in enumerate(triples):
        needs = tuple(j for j in range(i) if objects[j] == _bare(str(triple[0])))
        hops.append(dataclasses.replace(_of_triple(triple, passages), needs=needs))
    return tuple(hops)


def _of_triple(triple: Sequence[str], passages: Mapping[str, str]) -> GoldHop:
    """A triple's hop; its passage is the gold one whose title its subject is. Where none is, the subject is no title, and a
    passage is known by the value that it states."""
    subject, relation, value = map(str, triple)
    alike = [name for name, title in passages.items() if _bare(title) == _bare(subject)]
    name = next((name for name in alike if passages[name] == subject), alike[0] if alike else "")
    title = passages[name] if name else "" if passages else subject
    return GoldHop(query=f"{relation} of {subject}", value=value, passage_id=name, title=title)


def _answer(answers: Sequence[str], number: int) -> str:
    return answers[number - 1] if 0 < number <= len(answers) else ""
