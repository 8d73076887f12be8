"""Golden trajectories of Atlas, with the documents that knowledge bases really return: as a file and as a data set."""

from __future__ import annotations

import hashlib
import inspect
import json
import pathlib
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence

from routerl_jax.agents.agent import SearchTool
from routerl_jax.core.files import cache_directory
from routerl_jax.core.types import Example, Passage, Query
from routerl_jax.data import trajectories
from routerl_jax.data.atlas.questions import PICTURES, AtlasExamples
from routerl_jax.data.atlas.world import Split
from routerl_jax.data.trajectories import (
    NONE,
    AnswerStep,
    FinalStep,
    RouteStep,
    Step,
    StepExamples,
    Trajectory,
    document_of,
    label_of,
    write_trajectories,
)
from routerl_jax.knowledge.base import with_picture
from routerl_jax.training.knowledge import kb_cache_directory, open_knowledge_bases
from routerl_jax.training.sections import KnowledgeConfig

_FILE = "golden.jsonl"


def atlas_golden(
    split: Split, counts: Mapping[str, int], knowledge: Mapping[str, KnowledgeConfig], k: int = 2
) -> StepExamples:
    """The steps of golden trajectories for Atlas's questions. They are made on first use and cached.

    A function without arguments that returns this is a data set: `config.data.train="package.module:function"`.

    Args:
      split: the split with the questions.
      counts: number of questions of each kind (data.atlas.questions.ALL_KINDS); the first ones are taken.
      knowledge: the knowledge bases to search, by the names that gold paths use.
      k: passages per search.

    Raises:
      ValueError: a kind has fewer questions, or a path uses a knowledge base that is not given.
    """
    examples = atlas_questions(split, counts)
    kb_paths = [str(kb_cache_directory(name, spec)) for name, spec in knowledge.items()]
    fingerprints = [
        (
            example.id,
            example.question,
            example.answers,
            str(example.metadata),
            [hashlib.sha256(i).hexdigest() for i in example.images],
        )
        for example in examples
    ]
    writers = [inspect.getsource(module) for module in (trajectories, sys.modules[__name__])]
    digest = hashlib.sha256(json.dumps([kb_paths, k, fingerprints, writers]).encode()).hexdigest()[:12]
    directory = cache_directory() / "golden" / f"atlas-{split}-{digest}"
    if not (directory / _FILE).is_file():
        scratch = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")  # other processes may write it, too
        try:
            write_atlas_golden(scratch / _FILE, examples, open_knowledge_bases(knowledge), k)
            scratch.rename(directory)
        except OSError:
            if not (directory / _FILE).is_file():  # else another process was first
                raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return StepExamples(directory / _FILE)


def write_atlas_golden(
    path: str | pathlib.Path, examples: Sequence[Example], tools: Mapping[str, SearchTool], k: int
) -> int:
    """Writes the golden trajectories of questions of Atlas. Their pictures go to `images` beside the file.

    A question is left out if a search does not find its gold passage among the first k.

    Returns:
      The number of trajectories written.

    Raises:
      ValueError: a path uses a knowledge base that is not among the tools.
    """
    path = pathlib.Path(path)
    results = _searched(examples, tools, k)
    (path.parent / "images").mkdir(parents=True, exist_ok=True)
    written = []
    for number, (example, passages) in enumerate(zip(examples, results)):
        names = [f"{number:05d}-{i}.jpg" for i in range(len(example.images))]
        trajectory = golden_trajectory(example, passages, names)
        if trajectory is not None:
            written.append(trajectory)
            for name, image in zip(names, example.images):
                (path.parent / "images" / name).write_bytes(image)
    write_trajectories(path, written)
    return len(written)


def golden_trajectory(
    example: Example, results: Sequence[Sequence[Passage]], images: Sequence[str] = ()
) -> Trajectory | None:
    """The gold path of a question as a trajectory, without errors, because no model makes it. Each sub-question goes to the
    knowledge base that answers it.

    Args:
      example: a question of Atlas.
      results: for each hop of its path, the passages that the hop's knowledge base returns for the hop's query.
      images: names of the files with the question's pictures.

    Returns:
      The trajectory. None if a gold passage was not found, because the documents then don't state the answer.
    """
    steps: list[Step] = []
    for hop, passages in zip(example.metadata["path"], results, strict=True):
        if hop["passage_id"] not in [passage.id for passage in passages]:
            return None
        documents = tuple(document_of(hop["kb"], passage) for passage in passages)
        steps.append(RouteStep(query=hop["query"], retrievers=(label_of(hop["kb"]),)))
        steps.append(AnswerStep(answer=hop["value"], documents=documents))
    steps += [RouteStep(query=NONE, retrievers=(NONE,)), FinalStep(answers=example.answers)]
    return Trajectory(id=example.id, question=example.question, steps=tuple(steps), images=tuple(images))


def _searched(examples: Sequence[Example], tools: Mapping[str, SearchTool], k: int) -> list[list[list]]:
    """The passages that each hop of each example finds, with one call per knowledge base."""
    requests: dict[str, list[tuple[int, int, Query]]] = {}
    for row, example in enumerate(examples):
        for hop_index, hop in enumerate(example.metadata["path"]):
            if hop["kb"] not in tools:
                raise ValueError(
                    f"question {example.id!r} leads through the knowledge base {hop['kb']!r}, which is not among "
                    f"{', '.join(tools)}"
                )
            query = with_picture(hop["query"], example.images) if hop["kb"] == PICTURES else hop["query"]
            requests.setdefault(hop["kb"], []).append((row, hop_index, query))
    passages_of = [[[] for _ in example.metadata["path"]] for example in examples]
    for kb, queries in requests.items():
        results = tools[kb].search([query for _, _, query in queries], k)
        for (row, hop_index, _), passages in zip(queries, results):
            passages_of[row][hop_index] = passages
    return passages_of


def atlas_questions(split: Split, counts: Mapping[str, int], mixed: bool = False) -> list[Example]:
    """The first questions of each kind.

    Args:
      counts: number of questions of each kind.
      mixed: alternate the kinds in proportion to their counts, so that the first few represent all; else kind after kind.

    Raises:
      ValueError: a kind has fewer questions.
    """
    ranked: list[tuple[float, Example]] = []
    for kind, count in counts.items():
        source = AtlasExamples(split, [kind])
        if len(source) < count:
            raise ValueError(f"atlas/{split} has {len(source)} questions of kind {kind!r}, fewer than {count}")
        ranked += [((i + 0.5) / count, source[i]) for i in range(count)]
    if mixed:
        ranked.sort(key=lambda pair: pair[0])
    return [example for _, example in ranked]
