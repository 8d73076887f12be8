"""Worked steps for agents that work in independent chats (R1-Router). They teach its tags, reading, and decomposition.

As in demonstrations.py, the knowledge base of every search is drawn uniformly, and any of them may return the fact.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from routerl_jax.core.types import Example
from routerl_jax.data.atlas import flags, visual, world
from routerl_jax.data.atlas.demonstrations import UNKNOWN, Scene
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.atlas.questions import Question
from routerl_jax.data.trajectories import NONE, GoldenStep, document_of, label_of

_PER_WORLD = 64  # steps drawn from one invented world before the next is made


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSource:
    """A random-access, reproducible stream of worked steps as examples (item i is a function of seed and i).

    `metadata["step"]` is one step of an attempt at a question (`GoldenStep` of data.trajectories). A route names the path's
    next sub-question and a random knowledge base. An answer is the value in the documents, or `unknown`; after `unknown` the
    same sub-question is asked again, or the question is given up. Some questions show a flag if `text_image` is a knowledge
    base.

    Attributes:
      size: nominal length.
      seed: root of the randomness; use different seeds for training and validation.
      tools: the names of the knowledge bases in routes.
      invented: share of items from invented worlds; the rest is about real entities of the training split.
      k: passages per search.
      max_searches: largest budget of sub-questions.
      hit: probability that a search returns the right passage, for any knowledge base.
      persistence: probability of asking again after a miss, instead of giving up.
    """

    size: int
    tools: tuple[str, ...]
    seed: int = 0
    invented: float = 0.7
    k: int = 2
    max_searches: int = 3
    hit: float = 0.6
    persistence: float = 0.8

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        rng = np.random.default_rng([6, self.seed, index])
        made_up = rng.random() < self.invented
        pictures = visual.PICTURES in self.tools
        scene = _invented(self.seed * 1_000_003 + index // _PER_WORLD, pictures) if made_up else _real(pictures)
        question = scene.pick(rng)
        steps = self._walk(question, scene, rng)
        name = f"step-{self.seed}-{index}"
        return Example(
            id=name,
            question=question.text,
            answers=(question.answer,),
            images=(flags.photographed(scene.flag(question.picture), name),) if question.picture else (),
            metadata={"step": steps[int(rng.integers(len(steps)))]},
        )

    def _walk(self, question: Question, scene: PictureScene, rng: np.random.Generator) -> list[GoldenStep]:
        steps: list[GoldenStep] = []
        history: tuple[tuple[str, str], ...] = ()
        hops = list(question.hops)
        given_up = False
        while hops and not given_up and len(history) < self.max_searches:
            tool = str(rng.choice(self.tools))
            passages = scene.retrieve(hops[0], self.k, self.hit, rng)
            is_found = any(passage.id == hops[0].passage_id for passage in passages)
            sub_answer, query = hops[0].value if is_found else UNKNOWN, hops[0].query
            documents = tuple(document_of(tool, passage) for passage in passages)
            steps += [
                GoldenStep(kind="route", history=history, query=query, retrievers=(label_of(tool),)),
                GoldenStep(kind="answer", history=history, query=query, documents=documents, answers=(sub_answer,)),
            ]
            history = (*history, (query, sub_answer))
            if is_found:
                hops.pop(0)
            else:
                given_up = rng.random() > self.persistence
        if len(history) < self.max_searches:
            steps.append(GoldenStep(kind="route", history=history, query=NONE, retrievers=(NONE,)))
        answer = UNKNOWN if hops else question.answer
        return [*steps, GoldenStep(kind="final", history=history, answers=(answer,))]


class PictureScene(Scene):
    """A scene that, with `pictures`, also has questions about flags.

    Args:
      real: use the flags that ship with Atlas; otherwise made-up ones.
    """

    def __init__(self, entities: list[world.Entity], *, pictures: bool, real: bool) -> None:
        super().__init__(entities)
        self._real = real
        if pictures:
            captions = visual.captions(entities)
            self.records |= {record.passage.id: record for record in captions}
            self.by_kb[visual.PICTURES] = captions
            self.by_kind["visual"] = visual.visual_questions(entities)
            self.knowledge_bases = (*self.knowledge_bases, visual.PICTURES)

    def pick(self, rng: np.random.Generator) -> Question:
        """A question: one in ten holds its answer; single-hop, multi-hop and visual ones are equally frequent."""
        kinds = [kind for kind in ("single", "multi", "visual") if self.by_kind.get(kind)]
        kind = "none" if self.by_kind["none"] and rng.random() < 0.1 else str(rng.choice(kinds))
        pool = self.by_kind[kind]
        return pool[int(rng.integers(len(pool)))]

    def flag(self, country: str) -> bytes:
        """The PNG of a country's flag."""
        return flags.flag(country) if self._real else flags.invented_flag(country)


@functools.lru_cache(maxsize=4)
def _invented(seed: int, pictures: bool) -> PictureScene:
    return PictureScene(invented_world(seed), pictures=pictures, real=False)


@functools.cache
def _real(pictures: bool) -> PictureScene:
    entities = [entity for entity in world.real_entities() if entity.split == "train"]
    return PictureScene(entities, pictures=pictures, real=True)
