"""Atlas as a world: entities with facts, the passages and table rows that hold them, and questions with gold paths.

Three knowledge bases hold different facts, so that where one looks decides whether one can answer:

    text      prose about countries: independence, holidays, anthems, symbols, highest points, exports, crops
    table     rows about countries: capital, area, currency, population, life expectancy, ...
    elements  prose about chemical elements: symbols, numbers, discoverers, producers

A fourth one, `text_image`, holds flags with captions (visual.py). The same code makes the real world from `facts.json` and
invented worlds from made-up names and shuffled values (invented.py), on which reading can be practised without learning any
real fact.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from routerl_jax.core.types import Passage
from routerl_jax.data.atlas.extract import FACTS

Kind = Literal["country", "element"]
Split = Literal["train", "validation", "test"]
KNOWLEDGE_BASES = ("text", "table", "elements")
ALL = "all"  # their passages together


@dataclasses.dataclass(frozen=True)
class Relation:
    """A kind of fact: the noun that questions use for it, whose fact it is, and the knowledge base that holds it.

    `identifies` says that the value names its entity, so that a question may go from the value to the entity. (Internet
    codes and atomic numbers do too, but dense retrieval finds one in five of them.)
    """

    key: str
    noun: str
    kind: Kind
    kb: str
    phrasings: tuple[str, ...] = ()
    identifies: bool = False


RELATIONS = {
    relation.key: relation
    for relation in (
        Relation("independence", "independence date", "country", "text", ("When did {e} become independent?",)),
        Relation("holiday", "national holiday", "country", "text", ("Which national holiday does {e} celebrate?",)),
        Relation(
            "anthem", "national anthem", "country", "text", ("What is the anthem of {e} called?",), identifies=True
        ),
        Relation("emblem", "national symbol", "country", "text", ("Which symbol stands for {e}?",)),
        Relation("peak", "highest point", "country", "text", ("Where is {e} highest?",), identifies=True),
        Relation("export", "main export", "country", "text", ("What does {e} mainly sell abroad?",)),
        Relation("crop", "main crop", "country", "text", ("What do farms in {e} mainly grow?",)),
        Relation("capital", "capital", "country", "table", ("Which city is the capital of {e}?",), identifies=True),
        Relation("area", "area", "country", "table", ("How large is {e}?",)),
        Relation("code", "internet code", "country", "table", ("Which internet code does {e} use?",)),
        Relation("currency", "currency", "country", "table", ("How do people pay in {e}?",)),
        Relation("population", "population", "country", "table", ("How many people live in {e}?",)),
        Relation("median_age", "median age", "country", "table", ("How old are people in {e} on average?",)),
        Relation("life_expectancy", "life expectancy", "country", "table", ("How long do people live in {e}?",)),
        Relation("income", "income per person", "country", "table", ("How much do people in {e} earn?",)),
        Relation("partner", "largest export partner", "country", "table", ("Who buys the most from {e}?",)),
        Relation("symbol", "chemical symbol", "element", "elements", ("How is {e} abbreviated?",), identifies=True),
        Relation("number", "atomic number", "element", "elements", ("Which number does {e} have?",)),
        Relation("weight", "atomic weight", "element", "elements", ("How heavy is {e}?",)),
        Relation("discoverer", "discoverer", "element", "elements", ("Who discovered {e}?",)),
        Relation("year", "discovery year", "element", "elements", ("When was {e} discovered?",)),
        Relation("place", "place of discovery", "element", "elements", ("Where was {e} discovered?",)),
        Relation("producer", "largest producer", "element", "elements", ("Which country produces the most {e}?",)),
    )
}


@dataclasses.dataclass(frozen=True)
class Entity:
    """A country or an element and its facts, by relation key (plus details that only passages mention)."""

    name: str
    kind: Kind
    facts: Mapping[str, str]

    @property
    def split(self) -> Split:
        """Which questions may be about it: 60 % of the names train, 15 % validation, 25 % test, by a hash."""
        draw = zlib.crc32(f"atlas/{self.kind}/{self.name}".encode()) % 100
        return "train" if draw < 60 else "validation" if draw < 75 else "test"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One passage of the world: its knowledge base, its entity, and the relations that it states."""

    passage: Passage
    kb: str
    entity: str
    relations: frozenset[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hop:
    """One retrieval step of a gold path: the sub-question, where it is answered, by which passage, and the value read."""

    query: str
    kb: str
    passage_id: str
    value: str
    noun: str
    subject: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """A question with one short answer and its gold path (no hops: the question itself holds the answer).

    `picture` is the country whose flag it shows, "" for none.
    """

    id: str
    text: str
    answer: str
    kind: Literal["none", "single", "multi", "visual"]
    hops: tuple[Hop, ...]
    entities: tuple[str, ...]
    picture: str = ""


@functools.cache
def real_entities() -> tuple[Entity, ...]:
    """The real countries and elements."""
    rows = json.loads(FACTS.read_text(encoding="utf-8"))
    return tuple(Entity(row.pop("name"), row.pop("kind"), row) for row in rows)


# --- passages ----------------------------------------------------------------------------------------------------------

# Table columns, in order: (relation, header). A row is one passage.
TABLES = {
    "Places": (("capital", "capital"), ("code", "internet code")),
    "Size": (("area", "area"), ("population", "population")),
    "People": (("median_age", "median age"), ("life_expectancy", "life expectancy")),
    "Money": (("currency", "currency"), ("income", "income per person")),
    "Trade": (("partner", "largest export partner"),),
}

# Prose: for each passage of an entity, its sentences. A sentence is (facts it needs, wordings); it appears if they exist.
_PROSE: dict[Kind, dict[str, tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]]] = {
    "country": {
        "independence": (
            (
                ("independence",),
                ("{name} became independent on {independence}.", "{name}: independence on {independence}."),
            ),
        ),
        "holiday": (
            (
                ("holiday",),
                (
                    "The national holiday of {name} is {holiday}, on {holiday_date}.",
                    "{name} celebrates {holiday} on {holiday_date} as its national holiday.",
                ),
            ),
        ),
        "anthem": (
            (
                ("anthem",),
                ("The national anthem of {name} is {anthem}.", "{anthem} is sung as the national anthem of {name}."),
            ),
            (("emblem",), ("Its national symbol is the {emblem}.", "The {emblem} is the national symbol of {name}.")),
        ),
        "land": (
            (
                ("peak",),
                (
                    "The highest point of {name} is {peak}.",
                    "{name} is highest at {peak}.",
                ),
            ),
        ),
        "economy": (
            (("export",), ("The main export of {name} is {export}.", "{name} mainly exports {export}.")),
            (("crop",), ("Farms mainly grow {crop}.", "The main crop of its farms is {crop}.")),
        ),
    },
    "element": {
        "basics": (
            (
                ("symbol", "number"),
                (
                    "{name} has the chemical symbol {symbol} and the atomic number {number}.",
                    "{name} ({symbol}) is the element with atomic number {number}.",
                ),
            ),
        ),
        "weight": (
            (("weight",), ("The atomic weight of {name} is {weight}.", "{name} has an atomic weight of {weight}.")),
        ),
        "discovery": (
            (
                ("discoverer", "place"),
                (
                    "{name} was discovered in {year} by {discoverer} in {place}.",
                    "{discoverer} discovered {name} in {year}, in {place}.",
                ),
            ),
            (
                ("discoverer",),
                ("{name} was discovered in {year} by {discoverer}.", "{discoverer} discovered {name} in {year}."),
            ),
        ),
        "production": (
            (
                ("producer",),
                ("The largest producer of {name} is {producer}.", "Most {name} is produced in {producer}."),
            ),
        ),
    },
}


def records(entities: Iterable[Entity]) -> list[Record]:
    """All passages of a world, in a fixed order. Wordings vary from entity to entity, by a hash."""
    found = []
    for entity in entities:
        found += _prose_records(entity)
        if entity.kind == "country":
            found += _table_records(entity)
    return found


def _prose_records(entity: Entity) -> list[Record]:
    result = []
    values = {"name": entity.name, **entity.facts}
    kb = "text" if entity.kind == "country" else "elements"
    for topic, sentences in _PROSE[entity.kind].items():
        parts, stated = [], set()
        for needed, wordings in sentences:
            if not all(key in values for key in needed) or stated & set(needed):
                continue
            pick = zlib.crc32(f"{entity.name}/{topic}/{needed[0]}".encode()) % len(wordings)
            text = wordings[pick].format(**values)
            parts.append(text)
            stated |= {key for key in RELATIONS if f"{{{key}}}" in wordings[pick]}
        if stated:
            text = " ".join(parts)
            if entity.name not in text:
                text = f"{entity.name}: {text}"
            passage = Passage(id=f"{kb}/{entity.name}/{topic}", title=entity.name, text=text)
            result.append(Record(passage=passage, kb=kb, entity=entity.name, relations=frozenset(stated)))
    return result


def _table_records(entity: Entity) -> list[Record]:
    result = []
    for table, columns in TABLES.items():
        present = [(key, header) for key, header in columns if key in entity.facts]
        if present:
            cells = [f"{header}: {entity.facts[key]}" for key, header in present]
            passage = Passage(
                id=f"table/{entity.name}/{table}", title=entity.name, text=" | ".join([entity.name, *cells])
            )
            keys = frozenset(key for key, _ in present)
            result.append(Record(passage=passage, kb="table", entity=entity.name, relations=keys))
    return result


def passages_of(kb: str) -> list[Passage]:
    """All passages of one of the real world's knowledge bases, or of all of them (`all`)."""
    return [record.passage for record in _records_of(kb)]


def triples_of(kb: str) -> list[dict[str, Any]]:
    """The facts that these passages state, as rows of knowledge.graph.triples: (entity, relation, value)."""
    facts = {entity.name: entity.facts for entity in real_entities()}
    rows = []
    for record in _records_of(kb):
        triples = [
            [record.entity, relation.noun, facts[record.entity][key]]
            for key, relation in RELATIONS.items()
            if key in record.relations
        ]
        rows.append({"passage_id": record.passage.id, "entities": [record.entity], "triples": triples})
    return rows


def _records_of(kb: str) -> list[Record]:
    if kb not in (*KNOWLEDGE_BASES, ALL):
        raise ValueError(f"Atlas has no knowledge base {kb!r}; it has {', '.join(KNOWLEDGE_BASES)}, and {ALL!r}")
    return [record for record in records(real_entities()) if kb in (record.kb, ALL)]


# --- questions ---------------------------------------------------------------------------------------------------------


def questions(entities: Sequence[Entity], among: Sequence[Entity] | None = None) -> list[Question]:
    """All questions about a set of entities; every fact on a question's path is about an entity of the set.

    A question is kept only if its answer and its path are unambiguous (an identifying value belongs to one entity of
    `among`, the whole world; default: the set) and the knowledge bases that are not on its path do not state the answer
    for its entity.
    """
    builder = QuestionBuilder(entities, among or entities)
    found: list[Question] = []
    for entity in entities:
        found += builder.single(entity)
        found += builder.from_value(entity)
        if entity.kind == "element":
            found += builder.from_element(entity)
    return found


class QuestionBuilder:
    """Makes questions about a set of entities, and their paths; see `questions`."""

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
                result.append(self._question(f"{entity.name}/{relation.key}/{i}", text, (hop,), (entity,)))
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
        for given in self.relations(entity):
            value = entity.facts[given.key]
            if not given.identifies or self.counts[given.key, value] > 1 or entity.name in value:
                continue
            first = self._backward(entity, given)
            for relation in self.relations(entity):
                second = self.forward(entity, relation)
                if second is None or relation.key in self.records[entity.name, given.key].relations:
                    continue  # what one passage answers is no two-hop question
                draw = zlib.crc32(f"value/{entity.name}/{given.key}/{relation.key}".encode())
                if relation.kb == given.kb and draw % 4:
                    continue  # most multi-hop questions need two knowledge bases
                if relation.kb != given.kb and draw % 2:
                    continue
                kind = entity.kind
                text = (
                    f"What is the {relation.noun} of the {kind} whose {given.noun} is {first.value}?"
                    if draw % 8 < 4
                    else f"Take the {kind} with the {given.noun} {first.value}. What is its {relation.noun}?"
                )
                hop = dataclasses.replace(first, value=entity.name)
                result.append(
                    self._question(f"{entity.name}/{given.key}>{relation.key}", text, (hop, second), (entity,))
                )
        return [question for question in result if question.text]

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
                    result.append(
                        self._question(f"{element.name}/{bridge}>{relation.key}", text, path, (element, country))
                    )
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
            subject=entity.name,
        )

    def _backward(self, entity: Entity, given: Relation) -> Hop:
        """The step that finds an entity by one of its facts; its value is the given fact (the caller sets the entity)."""
        record = self.records[entity.name, given.key]
        value = entity.facts[given.key]
        return Hop(
            query=f"Which {entity.kind} has the {given.noun} {value}?",
            kb=record.kb,
            passage_id=record.passage.id,
            value=value,
            noun=entity.kind,
            subject=f"the {given.noun} {value}",
        )

    def _question(self, key: str, text: str, hops: tuple[Hop, ...], entities: tuple[Entity, ...]) -> Question:
        return Question(
            id=key,
            text=text,
            answer=hops[-1].value,
            kind="single" if len(hops) == 1 else "multi",
            hops=hops,
            entities=tuple(entity.name for entity in entities),
        )


def real_questions(split: Split) -> list[Question]:
    """The real world's questions of a split, in a fixed shuffled order.

    There are more facts about countries than about elements. A third of the questions about countries alone is left
    out, so that the three knowledge bases are needed about equally often and none can be ignored at little cost.
    """
    entities = [entity for entity in real_entities() if entity.split == split]
    found = [
        question
        for question in questions(entities, real_entities())
        if zlib.crc32(f"keep/{question.id}".encode()) % 3 != 0 or any(hop.kb == "elements" for hop in question.hops)
    ]
    return sorted(found, key=lambda question: zlib.crc32(f"order/{question.id}".encode()))
