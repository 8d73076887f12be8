"""Atlas's pictures: captions of flags (a fourth knowledge base), and questions that show a flag."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from routerl_jax.core.types import Passage
from routerl_jax.data.atlas import flags, world
from routerl_jax.data.atlas.questions import Hop, Question, QuestionBuilder

PICTURES = "text_image"  # the knowledge base of captions and pictures
SHOWN = "Which country has this flag?"  # the sub-question about a picture


def captions(entities: Sequence[world.Entity]) -> list[world.Record]:
    """One passage for every country's flag: the country and, if a source describes it, the design."""
    return [_caption(entity) for entity in entities if entity.kind == "country"]


def picture_passages() -> list[Passage]:
    """The real countries' captions with their flags, as `data:` URIs."""
    return [
        Passage(
            id=record.passage.id,
            title=record.passage.title,
            text=record.passage.text,
            image=flags.data_uri(flags.flag(record.entity)),
        )
        for record in captions(world.real_entities())
    ]


def visual_questions(entities: Sequence[world.Entity], among: Sequence[world.Entity] | None = None) -> list[Question]:
    """Questions that show a country's flag: whose it is, or a fact about the country with this flag.

    Their paths begin in `text_image`. Everything else is as in `questions_about`.
    """
    builder = QuestionBuilder(entities, among or entities)
    questions: list[Question] = []
    for entity in entities:
        if entity.kind != "country":
            continue
        first = Hop(
            query=SHOWN,
            kb=PICTURES,
            passage_id=_caption_id(entity),
            value=entity.name,
            noun="country",
            subject="this flag",
        )
        for i, text in enumerate(("Which country's flag is this?", "Whose flag is this?")):
            questions.append(_question(f"{entity.name}/flag/{i}", text, entity, (first,)))
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
            questions.append(_question(f"{entity.name}/flag>{relation.key}", text, entity, (first, second)))
    return questions


def real_visual_questions(split: world.Split) -> list[Question]:
    """The real world's visual questions of a split, in a fixed shuffled order."""
    entities = [entity for entity in world.real_entities() if entity.split == split]
    questions = visual_questions(entities, world.real_entities())
    return sorted(questions, key=lambda question: zlib.crc32(f"order/{question.id}".encode()))


def _caption(entity: world.Entity) -> world.Record:
    description = f": {entity.facts['flag']}" if "flag" in entity.facts else ""
    wordings = ("The flag of {}{}.", "This is the flag of {}{}.")
    pick = zlib.crc32(f"{entity.name}/flag".encode()) % len(wordings)
    passage = Passage(id=_caption_id(entity), title=entity.name, text=wordings[pick].format(entity.name, description))
    return world.Record(passage=passage, kb=PICTURES, entity=entity.name, relations=frozenset())


def _caption_id(entity: world.Entity) -> str:
    return f"{PICTURES}/{entity.name}/flag"


def _question(key: str, text: str, entity: world.Entity, hops: tuple[Hop, ...]) -> Question:
    return Question(
        id=key,
        text=text,
        answer=hops[-1].value,
        kind="visual",
        hops=hops,
        entities=(entity.name,),
        picture=entity.name,
    )
