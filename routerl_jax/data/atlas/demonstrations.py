"""Worked examples, worked steps and reading drills for the supervised warm start. They teach grammar and reading, no routing.

The knowledge base of every search is drawn uniformly. It depends neither on the question nor on earlier results, and any
knowledge base may return the fact. So the warm start teaches no routing. The results of searches are simulated from the
world's records.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from routerl_jax.core.types import Demonstration, DemonstrationStep, Example, Passage
from routerl_jax.data.atlas import flags, questions, world
from routerl_jax.data.atlas.invented import invented_world
from routerl_jax.data.atlas.questions import Hop, Question, questions_about
from routerl_jax.data.trajectories import NONE, GoldenStep, document_of, label_of

_PER_WORLD = 64  # items drawn from one invented world before the next is made
_DRILLED = 4  # passages of a reading drill
UNKNOWN = "unknown"  # the answer of a demonstration that gives up
Drill = list[tuple[str, bool]]  # (text, is it learnt)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemonstrationSource:
    """A random-access, reproducible stream of demonstrations (item i is a function of seed and i).

    Attributes:
      size: nominal length.
      seed: root of the randomness; use different seeds for training and validation.
      invented: share of items from invented worlds; the rest is about real entities of the training split.
      k: passages per search.
      max_searches: largest budget of searches. Every demonstration has its own budget, drawn between the number of searches
        that its question needs (if that is less) and this. When the budget is used up, the answer is forced. So a policy
        learns to answer under any budget.
      persistence: probability of searching again after a miss, instead of giving up.
      hit: probability that a search returns the right passage, for any knowledge base.
      direct: share of items that answer at once, without a search, as from memory.
      tools: the names of the knowledge bases in searches.
    """

    size: int
    seed: int = 0
    invented: float = 0.7
    k: int = 2
    max_searches: int = 3
    persistence: float = 0.8
    hit: float = 0.6
    direct: float = 0.0
    tools: tuple[str, ...] = world.KNOWLEDGE_BASES

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Demonstration:
        rng = np.random.default_rng([1, self.seed, index])
        made_up = rng.random() < self.invented
        scene = invented_scene(self.seed * 1_000_003 + index // _PER_WORLD) if made_up else _real_scene()
        # One tenth of the questions hold their answer, the rest are single- and multi-hop in equal parts.
        kind = str(rng.choice(["none", "single", "multi"], p=[0.1, 0.45, 0.45]))
        pool = scene.by_kind[kind] or scene.by_kind["single"]
        question = pool[int(rng.integers(len(pool)))]
        example = Example(id=f"demo-{self.seed}-{index}", question=question.text, answers=(question.answer,))
        return self._demonstrate(example, question, scene, rng)

    def _demonstrate(
        self, example: Example, question: Question, scene: Scene, rng: np.random.Generator
    ) -> Demonstration:
        if self.direct and rng.random() < self.direct:
            return Demonstration(example=example, steps=(), thought="I remember it.", answer=question.answer)
        if not question.hops:
            return Demonstration(example=example, steps=(), thought="The question says it.", answer=question.answer)
        steps: list[DemonstrationStep] = []
        budget = int(rng.integers(min(len(question.hops), self.max_searches), self.max_searches, endpoint=True))
        thought = f"I need the {question.hops[0].noun}."
        for i, hop in enumerate(question.hops):
            is_found = False
            while not is_found:
                give_up = bool(steps) and thought.startswith("It is not") and rng.random() > self.persistence
                spent = len(steps) == budget
                if spent or give_up:
                    return Demonstration(
                        example=example,
                        steps=tuple(steps),
                        thought="I could not find it.",
                        answer=UNKNOWN,
                        forced=spent,
                    )
                kb = str(rng.choice(self.tools))
                passages = scene.retrieve(hop, self.k, self.hit, rng)
                steps.append(DemonstrationStep(thought=thought, query=hop.query, tool=kb, passages=passages))
                is_found = any(passage.id == hop.passage_id for passage in passages)
                thought = "It is not there."
            if i + 1 < len(question.hops):
                thought = f"It is {hop.value}. I need its {question.hops[i + 1].noun}."
        return Demonstration(
            example=example,
            steps=tuple(steps),
            thought="That is it.",
            answer=question.answer,
            forced=len(steps) == budget,
        )


class Scene:
    """The questions of a world by kind, and a simulated search of its knowledge bases.

    Args:
      pictures: it also has questions about flags, of kind `visual`, and the knowledge base that their paths begin in.
    """

    def __init__(self, entities: Sequence[world.Entity], pictures: bool = False) -> None:
        self.entities = {entity.name: entity for entity in entities}
        of_texts = questions_about(entities)
        self.by_kind = {
            kind: [question for question in of_texts if question.kind == kind] for kind in ("none", "single", "multi")
        }
        records = world.records(entities)
        self.by_kb = {kb: [record for record in records if record.kb == kb] for kb in world.KNOWLEDGE_BASES}
        if pictures:
            captions = questions.captions(entities)
            records += captions
            self.by_kb[questions.PICTURES] = captions
            self.by_kind["visual"] = questions.visual_questions(entities)
        self.records = {record.passage.id: record for record in records}

    def retrieve(self, hop: Hop, k: int, hit: float, rng: np.random.Generator) -> tuple[Passage, ...]:
        """A simulated result of a search: the right passage with probability `hit`, and near misses."""
        gold = self.records[hop.passage_id]
        pool = self.by_kb[gold.kb if rng.random() < 0.5 else str(rng.choice(list(self.by_kb)))]
        same_entity = [record for record in pool if record.entity == gold.entity and record is not gold]
        result = [gold] if rng.random() < hit else []
        while len(result) < k:
            near = same_entity if same_entity and rng.random() < 0.6 else pool
            record = near[int(rng.integers(len(near)))]
            if record not in result and (record is not gold):
                result.append(record)
            elif len(pool) <= k:
                break
        if rng.random() < 0.15:
            rng.shuffle(result)
        return tuple(record.passage for record in result)


@functools.lru_cache(maxsize=4)
def invented_scene(seed: int, pictures: bool = False) -> Scene:
    """An invented world's questions and records."""
    return Scene(invented_world(seed), pictures)


@functools.cache
def _real_scene(pictures: bool = False) -> Scene:
    return Scene([entity for entity in world.real_entities() if entity.split == "train"], pictures)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSource:
    """A random-access, reproducible stream of worked steps as examples (item i is a function of seed and i). They teach agents
    that work in independent chats (R1-Router) the tags, reading, and decomposition.

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
        pictures = questions.PICTURES in self.tools
        of_world = self.seed * 1_000_003 + index // _PER_WORLD
        scene = invented_scene(of_world, pictures) if made_up else _real_scene(pictures)
        # One in ten questions holds its answer; single-hop, multi-hop and visual ones are equally frequent.
        kinds = [kind for kind in ("single", "multi", "visual") if scene.by_kind.get(kind)]
        kind = "none" if scene.by_kind["none"] and rng.random() < 0.1 else str(rng.choice(kinds))
        question = scene.by_kind[kind][int(rng.integers(len(scene.by_kind[kind])))]
        flag = flags.invented_flag if made_up else flags.flag
        steps = self._walk(question, scene, rng)
        name = f"step-{self.seed}-{index}"
        return Example(
            id=name,
            question=question.text,
            answers=(question.answer,),
            images=(flags.photographed(flag(question.picture), name),) if question.picture else (),
            metadata={"step": steps[int(rng.integers(len(steps)))]},
        )

    def _walk(self, question: Question, scene: Scene, rng: np.random.Generator) -> list[GoldenStep]:
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


class ReadingDrills:
    """A random-access, reproducible stream of drills (item i is a function of seed and i): invented passages, then questions
    about them or the passages again.

    A demonstration asks for one value out of two hundred tokens, which teaches reading slowly. In a drill almost every learnt
    token must be read from the text. Drills have nothing to do with knowledge bases.

    Args:
      seed: root of the randomness.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def __getitem__(self, index: int) -> Drill:
        rng = np.random.default_rng([3, self.seed, index])
        scene = invented_scene(self.seed * 1_000_003 + index // _PER_WORLD)
        records = list(scene.records.values())
        shown = [records[i] for i in rng.choice(len(records), _DRILLED, replace=False)]
        if rng.random() < 0.5:  # two passages about one entity, as a search returns them
            near = [r for r in records if r.entity == shown[0].entity and r is not shown[0]]
            if near:
                shown[1] = near[int(rng.integers(len(near)))]
        text = "".join(f"{record.passage.text}\n" for record in shown)
        if rng.random() < 0.4:
            repeated = [shown[i].passage.text for i in rng.permutation(len(shown))]
            return [(text, False), *((f"{line}\n", True) for line in repeated)]
        facts = [(record.entity, world.RELATIONS[key]) for record in shown for key in sorted(record.relations)]
        drill: Drill = [(text, False)]
        for i in rng.permutation(len(facts)):
            name, relation = facts[i]
            value = scene.entities[name].facts[relation.key]
            if relation.identifies and rng.random() < 0.3:
                drill += [(f"Which {relation.kind} has the {relation.noun} {value}?", False), (f" {name}\n", True)]
            else:
                drill += [(f"What is the {relation.noun} of {name}?", False), (f" {value}\n", True)]
        return drill
