"""Gold paths of questions of all data sets: the facts to find, where they are, and the sub-questions that find them.

Where they are may be a page. Data sets number the pages of a file; corpora name them (`page_of`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from routerl_jax.core.text import folded
from routerl_jax.core.types import Example, Passage

_NAMES = ("query", "kb", "value", "passage_id", "title")
_ASIDE = re.compile(r"\s*\([^)]*\)$")  # the end of a title such as "Fair Game (1995 film)"
_REFERENCE = re.compile(r"#(\d+)")  # in a sub-question of MuSiQue: the answer of the sub-question with this number
_DOCUMENTS = (".pdf", ".tif", ".tiff")  # one file, many pages
_PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")  # one file, one page
_NUMBERED = re.compile(r"(.+)_(\d+)")  # the file of one page: DOCUMENT_PAGE
_SLIDE = re.compile(r".+-(\d+)-(?:320|638|728|1024|2048)")  # SlideShare, in the deck's folder: TITLE-PAGE-WIDTH


@dataclasses.dataclass(frozen=True, kw_only=True)
class GoldHop:
    """One step of a gold path. A field that the data set doesn't have is "".

    Attributes:
      query: the sub-question.
      kb: the knowledge base that answers it.
      value: the answer to it.
      passage_id, title: id and title of a passage that states the answer.
      needs: indices of the hops whose answers must be known before the sub-question can be asked.
    """

    query: str = ""
    kb: str = ""
    value: str = ""
    passage_id: str = ""
    title: str = ""
    needs: tuple[int, ...] = ()

    def named_in(self, names: Collection[str], titles: Collection[str], bare_titles: Collection[str]) -> bool:
        """Whether its passage is among those with these ids (of a table's rows also the table's) and titles, as `found_in` has
        it. True if neither its id nor its title is known.

        Args:
          bare_titles: the titles, without what stands in brackets at their end (`bare_title`).
        """
        if not self.passage_id:
            return not self.title or bare_title(self.title) in bare_titles
        return self.passage_id in names or bool(self.title and self.title in titles)

    def found_in(self, passages: tuple[Passage, ...]) -> bool:
        """Whether its passage is among these: by id (a table's rows are parts of it, `TABLE#..`; a page, `DOCUMENT.pdf#3`, may
        have another name, `page_of`) or title or, where neither is known, a passage that states the value. A title without an
        id may lack what stands in brackets at its end."""
        if not (self.passage_id or self.title):
            value = folded(self.value).lower()
            return bool(value) and any(value in folded(passage.text).lower() for passage in passages)
        if not self.passage_id:
            return any(bare_title(passage.title) == bare_title(self.title) for passage in passages)
        names = {name for passage in passages for name in (passage.id, passage.id.partition("#")[0])}
        if self.passage_id in names or any(self.title == passage.title for passage in passages if self.title):
            return True
        page = page_of(self.passage_id) if "#" in self.passage_id else None
        return page is not None and any(page_of(passage.id) == page for passage in passages)


def gold_path(example: Example) -> tuple[GoldHop, ...] | None:
    """The hops of an example, in order. () if it needs none; None if its data set has no information about them.

    The path is read from the first of these that the example has: Atlas's `path`; a `decomposition` (`sub_questions`);
    2WikiMultihopQA's `evidence_triples` (subject, relation, object; most subjects are titles of passages); the gold passages of
    any other data set, which have only an id and a title.

    A hop of Atlas needs the hop before it. Other hops need those that they refer to: by `#1`, or because the other triple's
    object is their subject.
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
    """Atlas's `path`: hops, each with the knowledge base `kb` that holds passage `passage_id`. None if there is none. (In other
    data sets `path` has another meaning, such as the path of a picture.)"""
    path = metadata.get("path")
    if not isinstance(path, list | tuple):
        return None
    return path if all(isinstance(hop, Mapping) and {"kb", "passage_id"} <= hop.keys() for hop in path) else None


def gold_passages(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Titles of the gold passages by id; "" for an unknown title.

    They are read from `supporting_passages` (`{id, title}` each), or from `supporting` (ids, also of tables) with
    `supporting_titles`. `supporting_passages` may also be ids (OTT-QA).
    """
    passages = metadata.get("supporting_passages") or ()
    names, titles = metadata.get("supporting") or (), metadata.get("supporting_titles") or ()
    if not any(isinstance(passage, Mapping) for passage in passages):
        titles_by_id: dict[Any, Any] = dict(zip(names, titles)) if len(names) == len(titles) else {}
        return {name: str(titles_by_id.get(name, "")) for name in (*names, *passages) if isinstance(name, str)}
    return {str(passage["id"]): str(passage["title"]) for passage in passages}


def sub_questions(metadata: Mapping[str, Any]) -> tuple[GoldHop, ...]:
    """The `decomposition` of a question: its sub-questions, with the passages that answer them. () if there is none.

    MuSiQue's references such as `#1` are replaced by the answers of those sub-questions. Its `support` is the passage. In
    2WikiMultihopQA answers are whole sentences, so a triple for each sub-question gives the passage and the value. If the
    numbers of triples and sub-questions differ, the triples alone are the path.
    """
    steps = metadata.get("decomposition") or ()
    if not all(isinstance(step, Mapping) and step.get("question") for step in steps):
        return ()
    passages = gold_passages(metadata)
    aligned = _of_triples(metadata.get("evidence_triples") or (), passages) or (GoldHop(),) * len(steps)
    if len(aligned) != len(steps):
        return ()
    answers = [str(step.get("answer") or "") for step in steps]
    by_number = dict(enumerate(answers, 1))
    hops = []
    for index, (step, answer, triple_hop) in enumerate(zip(steps, answers, aligned)):
        references = {int(number) - 1 for number in _REFERENCE.findall(step["question"])}
        name = str(step.get("support") or triple_hop.passage_id)
        hops.append(
            GoldHop(
                query=_REFERENCE.sub(lambda match: by_number.get(int(match[1]), ""), step["question"]).replace(
                    " >> ", ", "
                ),
                value=triple_hop.value or answer,
                passage_id=name,
                title=passages.get(name, triple_hop.title),
                needs=tuple(
                    sorted({reference for reference in references if 0 <= reference < index} | set(triple_hop.needs))
                ),
            )
        )
    return tuple(hops)


def without_aside(title: str) -> str:
    """A title without the brackets at its end: "Fair Game (1995 film)" becomes "Fair Game"."""
    return _ASIDE.sub("", title)


def bare_title(title: str) -> str:
    """A title for comparisons: without the brackets at its end, and without case."""
    return without_aside(folded(title)).casefold()


def _of_triples(triples: Sequence[Sequence[str]], passages: Mapping[str, str]) -> tuple[GoldHop, ...]:
    """The hops of triples. A hop's passage is the gold passage whose title is the subject. If there is none, the hop has no
    title, and a passage is recognised by the value that it states."""
    objects = [bare_title(str(triple[2])) for triple in triples]
    hops = []
    for i, triple in enumerate(triples):
        subject, relation, value = map(str, triple)
        alike = [name for name, title in passages.items() if bare_title(title) == bare_title(subject)]
        name = next((name for name in alike if passages[name] == subject), alike[0] if alike else "")
        title = passages[name] if name else "" if passages else subject
        needs = tuple(j for j in range(i) if objects[j] == bare_title(subject))
        hops.append(GoldHop(query=f"{relation} of {subject}", value=value, passage_id=name, title=title, needs=needs))
    return tuple(hops)


class PageName(NamedTuple):
    """A document's name without folder and extension, and the page's number from 1."""

    document: str
    page: int


def page_id(document: str, page: int) -> str:
    """The id of a document's page in a knowledge base of documents (`knowledge.pages.reading`): `report.pdf#3`."""
    return f"{document}#{page}"


def page_of(name: str) -> PageName | None:
    """The page of an id; None if the id has no page number.

    Known forms: `report.pdf#3`, in any folder; the picture of a page, `report_3.jpg` or `report_003.jpg#1`; `report_3`, as in
    lists of pages; a slide as SlideVQA's script saves it, `deck/its-title-3-1024.jpg`.
    """
    file, mark, number = name.rpartition("#")
    file, number = (file, number) if mark and number.isdecimal() else (name, "")
    folder, _, last = file.rpartition("/")
    # Only known extensions count, because the names of documents have dots.
    suffix = next((suffix for suffix in (*_DOCUMENTS, *_PICTURES) if last.lower().endswith(suffix)), "")
    stem = last[: len(last) - len(suffix)]
    if number and suffix not in _PICTURES:
        return PageName(stem, int(number))
    if folder and suffix in _PICTURES and (slide := _SLIDE.fullmatch(stem)):
        return PageName(folder.rpartition("/")[2], int(slide[1]))
    match = None if suffix in _DOCUMENTS else _NUMBERED.fullmatch(stem)
    return PageName(match[1], int(match[2])) if match else None
