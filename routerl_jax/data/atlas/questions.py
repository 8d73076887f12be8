"""Questions about Atlas with gold paths: sub-questions in order, each with its knowledge base, passage and answer.

Some show a flag. Their paths begin in a fourth knowledge base, captions of flags. `AtlasExamples` has the questions about the
real world as a data set.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Literal

from routerl_jax.core.types import Example, Passage
from routerl_jax.data.atlas import flags
from routerl_jax.data.atlas.world import RELATIONS, Entity, Record, Relation, Split, real_entities, records

KINDS = ("none", "single", "multi")  # kinds of questions, by the searches that they need
ALL_KINDS = (*KINDS, "visual")  # visual questions show a flag; they are included only if they are named
PICTURES = "text_image"  # the knowledge base of captions and pictures
SHOWN = "Which country has this flag?"  # the sub-question about a picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hop:
    """One retrieval step of a gold path: the knowledge base, the passage, the sub-question and the value read there.

    `noun`: what the value is ("capital").
    """

    query: str
    kb: str
    passage_id: str
    value: str
    noun: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question with one short answer and its gold path (no hops: the question itself holds the answer).

    `picture` is the country whose flag the question shows; "" for none.
    """

    id: str
    text: str
    answer: str
    kind: Literal["none", "single", "multi", "visual"]
    hops: tuple[Hop, ...]
    entities: tuple[str, ...]
    picture: str = ""


def questions_about(entities: Sequence[Entity], among: Sequence[Entity] | None = None) -> list[Question]:
    """All questions about a set of entities. Every fact on a question's path is about an entity of the set.

    A question is kept only if its answer and path are unambiguous, and no knowledge base off its path states the answer for its
    entity. Unambiguous means that an identifying value belongs to one entity of `among` (the whole world; default: the set).
    """
    builder = QuestionBuilder(entities, among or entities)
    questions: list[Question] = []
    for entity in entities:
        questions += builder.single(entity)
        questions += builder.from_value(entity)
        if entity.kind == "element":
            questions += builder.from_element(entity)
    return questions


class QuestionBuilder:
    """Makes questions about a set of entities, and their paths; see `questions_about`."""

    def __init__(self, entities: Sequence[Entity], among: Sequence[Entity]) -> None:
        self.entities = {entity.name: entity for entity in entities}
        self.records: dict[tuple[str, str], Record] = {}
        self.by_entity: dict[str, list[Record]] = {}
        for record in records(entities):
            self.by_entity.setdefault(record.entity, []).append(record)
            for key in record.relations:
                self.records[record.entity, key] = record
        counts: dict[tuple[str, str], int] = {}
        for entity in among:
            for key, value in entity.facts.items():
                counts[key, value] = counts.get((key, value), 0) + 1
        self.counts = counts

    def single(self, entity: Entity) -> list[Question]:
        """One-hop questions in two phrasings, and some whose text already holds the answer."""
        result = []
        for relation in self.relations(entity):
            hop = self.forward(entity, relation)
            if hop is None:
                continue
            wordings = (f"What is the {relation.noun} of {entity.name}?", *relation.phrasings)
            for i, wording in enumerate(wordings):
                text = wording.format(e=entity.name)
                result.append(_question(f"{entity.name}/{relation.key}/{i}", text, (hop,), (entity,)))
            if zlib.crc32(f"note/{entity.name}/{relation.key}".encode()) % 3 == 0:
                note = f"The {relation.noun} of {entity.name} is {hop.value}. What is the {relation.noun} of {entity.name}?"
                result.append(
                    Question(
                        id=f"{entity.name}/{relation.key}/note",
                        text=note,
                        answer=hop.value,
                        kind="none",
                        hops=(),
                        entities=(entity.name,),
                    )
                )
        return result

    def from_value(self, entity: Entity) -> list[Question]:
        """Two-hop questions that name the entity by one of its facts: "the anthem of the country whose capital is ..."."""
        result = []
        for relation_known in self.relations(entity):
            value = entity.facts[relation_known.key]
            if not relation_known.identifies or self.counts[relation_known.key, value] > 1 or entity.name in value:
                continue
            record = self.records[entity.name, relation_known.key]
            kind, noun = entity.kind, relation_known.noun
            first = Hop(
                query=f"Which {kind} has the {noun} {value}?",
                kb=record.kb,
                passage_id=record.passage.id,
                value=entity.name,
                noun=kind,
            )
            for relation in self.relations(entity):
                second = self.forward(entity, relation)
                if second is None or relation.key in record.relations:
                    continue  # one passage answers it, so it is no two-hop question
                draw = zlib.crc32(f"value/{entity.name}/{relation_known.key}/{relation.key}".encode())
                if relation.kb == relation_known.kb and draw % 4:
                    continue  # most multi-hop questions need two knowledge bases
                if relation.kb != relation_known.kb and draw % 2:
                    continue
                text = (
                    f"What is the {relation.noun} of the {kind} whose {noun} is {value}?"
                    if draw % 8 < 4
                    else f"Take the {kind} with the {noun} {value}. What is its {relation.noun}?"
                )
                key = f"{entity.name}/{relation_known.key}>{relation.key}"
                result.append(_question(key, text, (first, second), (entity,)))
        return result

    def from_element(self, element: Entity) -> list[Question]:
        """Two-hop questions from an element to the country that produces most of it, or where it was discovered."""
        result = []
        for bridge, phrase in (("producer", "that produces the most"), ("place", "of the discovery of")):
            country = self.entities.get(element.facts.get(bridge, ""))
            first = self.forward(element, RELATIONS[bridge])
            if country is None or first is None:
                continue
            for relation in self.relations(country):
                second = self.forward(country, relation)
                if second is not None:
                    text = f"What is the {relation.noun} of the country {phrase} {element.name}?"
                    path = (first, second)
                    result.append(_question(f"{element.name}/{bridge}>{relation.key}", text, path, (element, country)))
        return result

    def relations(self, entity: Entity) -> list[Relation]:
        """The relations of an entity that some passage states."""
        return [relation for relation in RELATIONS.values() if (entity.name, relation.key) in self.records]

    def forward(self, entity: Entity, relation: Relation) -> Hop | None:
        """The step that reads a fact of an entity; None if another knowledge base gives it away."""
        record = self.records.get((entity.name, relation.key))
        if record is None:
            return None
        value = entity.facts[relation.key]
        if value == entity.name or any(
            value in r.passage.text for r in self.by_entity[entity.name] if r.kb != record.kb
        ):
            return None
        return Hop(
            query=f"What is the {relation.noun} of {entity.name}?",
            kb=record.kb,
            passage_id=record.passage.id,
            value=value,
            noun=relation.noun,
        )


def _question(
    key: str, text: str, hops: tuple[Hop, ...], entities: tuple[Entity, ...], *, picture: str = ""
) -> Question:
    return Question(
        id=key,
        text=text,
        answer=hops[-1].value,
        kind="visual" if picture else "single" if len(hops) == 1 else "multi",
        hops=hops,
        entities=tuple(entity.name for entity in entities),
        picture=picture,
    )


@functools.cache
def real_questions(split: Split) -> tuple[Question, ...]:
    """The real world's questions of a split without pictures, in a fixed shuffled order.

    There are more facts about countries than about elements. So a third of the questions that are only about countries is left
    out. Then the three knowledge bases are needed about equally often.
    """
    entities = [entity for entity in real_entities() if entity.split == split]
    questions = [
        question
        for question in questions_about(entities, real_entities())
        if zlib.crc32(f"keep/{question.id}".encode()) % 3 != 0 or any(hop.kb == "elements" for hop in question.hops)
    ]
    return _shuffled(questions)


def _shuffled(questions: Sequence[Question]) -> tuple[Question, ...]:
    return tuple(sorted(questions, key=lambda question: zlib.crc32(f"order/{question.id}".encode())))


def captions(entities: Sequence[Entity]) -> list[Record]:
    """One passage for every country's flag: the country and, if a source describes it, the design."""
    result = []
    for entity in entities:
        if entity.kind == "country":
            description = f": {entity.facts['flag']}" if "flag" in entity.facts else ""
            wordings = ("The flag of {}{}.", "This is the flag of {}{}.")
            pick = zlib.crc32(f"{entity.name}/flag".encode()) % len(wordings)
            text = wordings[pick].format(entity.name, description)
            passage = Passage(id=_caption_id(entity), title=entity.name, text=text)
            result.append(Record(passage=passage, kb=PICTURES, entity=entity.name, relations=frozenset()))
    return result


def picture_passages() -> list[Passage]:
    """The real countries' captions with their flags, as `data:` URIs."""
    return [
        Passage(
            id=record.passage.id,
            title=record.passage.title,
            text=record.passage.text,
            image=flags.data_uri(flags.flag(record.entity)),
        )
        for record in captions(real_entities())
    ]


def visual_questions(entities: Sequence[Entity], among: Sequence[Entity] | None = None) -> list[Question]:
    """Questions that show a country's flag: whose it is, or a fact about the country with this flag.

    Their paths begin in `text_image`. Everything else is as in `questions_about`.
    """
    builder = QuestionBuilder(entities, among or entities)
    questions: list[Question] = []
    for entity in entities:
        if entity.kind != "country":
            continue
        first = Hop(query=SHOWN, kb=PICTURES, passage_id=_caption_id(entity), value=entity.name, noun="country")
        for i, text in enumerate(("Which country's flag is this?", "Whose flag is this?")):
            questions.append(_question(f"{entity.name}/flag/{i}", text, (first,), (entity,), picture=entity.name))
        for relation in builder.relations(entity):
            draw = zlib.crc32(f"flag/{entity.name}/{relation.key}".encode())
            second = builder.forward(entity, relation)
            if second is None or draw % 4:
                continue  # otherwise this kind would be much more frequent than the others
            text = (
                f"What is the {relation.noun} of the country with this flag?"
                if draw % 8 < 4
                else f"This is the flag of a country. What is its {relation.noun}?"
            )
            key = f"{entity.name}/flag>{relation.key}"
            questions.append(_question(key, text, (first, second), (entity,), picture=entity.name))
    return questions


@functools.cache
def real_visual_questions(split: Split) -> tuple[Question, ...]:
    """The real world's visual questions of a split, in a fixed shuffled order."""
    return _shuffled(visual_questions([entity for entity in real_entities() if entity.split == split], real_entities()))


def _caption_id(entity: Entity) -> str:
    return f"{PICTURES}/{entity.name}/flag"


class AtlasExamples:
    """A split of Atlas as random-access Examples, in a fixed shuffled order, with the visual questions last.

    `metadata["path"]` lists the gold hops (kb, passage_id, query, value); `metadata["kind"]` is none, single, multi or
    visual. Visual questions have a picture (JPEG) of a flag. It differs from the knowledge base's picture of the same flag.

    Args:
      kinds: only questions of these kinds; default: all without a picture.
    """

    def __init__(self, split: Split, kinds: Sequence[str] = KINDS) -> None:
        visual = real_visual_questions(split) if "visual" in kinds else ()
        self._questions = [question for question in (*real_questions(split), *visual) if question.kind in kinds]

    def __len__(self) -> int:
        return len(self._questions)

    def __getitem__(self, index: int) -> Example:
        question = self._questions[index]
        hops = [
            {"kb": hop.kb, "passage_id": hop.passage_id, "query": hop.query, "value": hop.value}
            for hop in question.hops
        ]
        picture = question.picture
        return Example(
            id=question.id,
            question=question.text,
            answers=(question.answer,),
            images=(flags.photographed(flags.flag(picture), question.id),) if picture else (),
            metadata={"kind": question.kind, "entities": list(question.entities), "path": hops},
        )
