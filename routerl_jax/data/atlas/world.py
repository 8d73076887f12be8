"""Atlas as a world: entities with facts, and the passages and table rows that hold them.

Three knowledge bases hold different facts. So whether a question can be answered depends on where a policy searches:

    text      prose about countries: independence, holidays, anthems, symbols, highest points, exports, crops
    table     rows about countries: capital, area, currency, population, life expectancy, ...
    elements  prose about chemical elements: symbols, numbers, discoverers, producers

A fourth one, `text_image`, holds flags with captions (questions.py). The same code makes the real world from `facts.json`, and
invented worlds from made-up names and shuffled values (invented.py). On invented worlds a policy can practise reading without
learning real facts. Questions about a world are in questions.py.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from routerl_jax.core.types import Passage

Kind = Literal["country", "element"]
Split = Literal["train", "validation", "test"]
FACTS = pathlib.Path(__file__).with_name("facts.json")  # extras/atlas_facts.py makes it
KNOWLEDGE_BASES = ("text", "table", "elements")
ALL = "all"  # the passages of all knowledge bases together


@dataclasses.dataclass(frozen=True)
class Relation:
    """A kind of fact: its noun in questions, the kind of entity that has it, and the knowledge base that holds it.

    `identifies`: the value identifies its entity, so a question may lead from the value to the entity. (Internet codes and
    atomic numbers identify theirs too, but dense retrieval finds only one in five of them.)
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
        """The split whose questions may be about it. A hash assigns 60 % of the names to train, 15 % to validation, 25 %
        to test."""
        draw = zlib.crc32(f"atlas/{self.kind}/{self.name}".encode()) % 100
        return "train" if draw < 60 else "validation" if draw < 75 else "test"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """One passage of the world: its knowledge base, its entity, and the relations that it states."""

    passage: Passage
    kb: str
    entity: str
    relations: frozenset[str]


@functools.cache
def real_entities() -> tuple[Entity, ...]:
    """The real countries and elements."""
    rows = json.loads(FACTS.read_text(encoding="utf-8"))
    return tuple(Entity(row.pop("name"), row.pop("kind"), row) for row in rows)


# Table columns, in order: (relation, header). A row is one passage.
TABLES = {
    "Places": (("capital", "capital"), ("code", "internet code")),
    "Size": (("area", "area"), ("population", "population")),
    "People": (("median_age", "median age"), ("life_expectancy", "life expectancy")),
    "Money": (("currency", "currency"), ("income", "income per person")),
    "Trade": (("partner", "largest export partner"),),
}

# Sentences: (kind of entity, topic of the passage, facts that are needed), and wordings. Those of a topic are one passage.
_SENTENCES = {
    ("country", "independence", "independence"): (
        "{name} became independent on {independence}.",
        "{name}: independence on {independence}.",
    ),
    ("country", "holiday", "holiday"): (
        "The national holiday of {name} is {holiday}, on {holiday_date}.",
        "{name} celebrates {holiday} on {holiday_date} as its national holiday.",
    ),
    ("country", "anthem", "anthem"): (
        "The national anthem of {name} is {anthem}.",
        "{anthem} is sung as the national anthem of {name}.",
    ),
    ("country", "anthem", "emblem"): (
        "Its national symbol is the {emblem}.",
        "The {emblem} is the national symbol of {name}.",
    ),
    ("country", "land", "peak"): (
        "The highest point of {name} is {peak}.",
        "{name} is highest at {peak}.",
    ),
    ("country", "economy", "export"): (
        "The main export of {name} is {export}.",
        "{name} mainly exports {export}.",
    ),
    ("country", "economy", "crop"): (
        "Farms mainly grow {crop}.",
        "The main crop of its farms is {crop}.",
    ),
    ("element", "basics", "symbol", "number"): (
        "{name} has the chemical symbol {symbol} and the atomic number {number}.",
        "{name} ({symbol}) is the element with atomic number {number}.",
    ),
    ("element", "weight", "weight"): (
        "The atomic weight of {name} is {weight}.",
        "{name} has an atomic weight of {weight}.",
    ),
    ("element", "discovery", "discoverer", "place"): (
        "{name} was discovered in {year} by {discoverer} in {place}.",
        "{discoverer} discovered {name} in {year}, in {place}.",
    ),
    ("element", "discovery", "discoverer"): (
        "{name} was discovered in {year} by {discoverer}.",
        "{discoverer} discovered {name} in {year}.",
    ),
    ("element", "production", "producer"): (
        "The largest producer of {name} is {producer}.",
        "Most {name} is produced in {producer}.",
    ),
}


def records(entities: Iterable[Entity]) -> list[Record]:
    """All passages of a world, in a fixed order. A hash of the entity selects its wordings."""
    rows = []
    for entity in entities:
        rows += _prose_records(entity)
        if entity.kind == "country":
            rows += _table_records(entity)
    return rows


def _prose_records(entity: Entity) -> list[Record]:
    values = {"name": entity.name, **entity.facts}
    texts: dict[str, list[str]] = collections.defaultdict(list)  # by topic, and the facts that they state
    stated: dict[str, set[str]] = collections.defaultdict(set)
    for (kind, topic, *needed), wordings in _SENTENCES.items():
        if kind != entity.kind or not all(key in values for key in needed) or stated[topic] & set(needed):
            continue
        wording = wordings[zlib.crc32(f"{entity.name}/{topic}/{needed[0]}".encode()) % len(wordings)]
        texts[topic].append(wording.format(**values))
        stated[topic] |= {key for key in RELATIONS if f"{{{key}}}" in wording}
    result = []
    kb = "text" if entity.kind == "country" else "elements"
    for topic, sentences in texts.items():
        text = " ".join(sentences)
        if entity.name not in text:
            text = f"{entity.name}: {text}"
        passage = Passage(id=f"{kb}/{entity.name}/{topic}", title=entity.name, text=text)
        result.append(Record(passage=passage, kb=kb, entity=entity.name, relations=frozenset(stated[topic])))
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
    """All passages of one of the real world's knowledge bases; `all`: of all of them."""
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


def rounded(amount: float) -> str:
    """An amount in words: three digits, and thousand or million if it is large."""
    for unit, name in ((1_000_000, " million"), (1_000, " thousand")):
        if amount >= unit:
            return f"{float(f'{amount / unit:.3g}'):g}{name}"
    return f"{amount:.3g}"
