"""Golden trajectories of Atlas with documents that knowledge bases really return, as a file and as a data set."""

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
from routerl_jax.core.cache_directory import cache_directory
from routerl_jax.core.types import Example, Query
from routerl_jax.data import trajectories
from routerl_jax.data.atlas import golden
from routerl_jax.data.atlas.builder import AtlasExamples
from routerl_jax.data.atlas.visual import PICTURES
from routerl_jax.data.atlas.world import Split
from routerl_jax.data.trajectories import StepExamples, write_trajectories
from routerl_jax.knowledge.query import with_picture
from routerl_jax.training.knowledge import cache_place, open_knowledge_bases
from routerl_jax.training.sections import KnowledgeConfig

_FILE = "golden.jsonl"


def atlas_golden(
    split: Split, counts: Mapping[str, int], knowledge: Mapping[str, KnowledgeConfig], k: int = 2
) -> StepExamples:
    """The steps of golden trajectories about Atlas's questions, made on first use and kept in the cache.

    A function without arguments that returns this is a data set: `config.data.train="package.module:function"`.

    Args:
      split: whose questions.
      counts: how many questions of each kind (data.atlas.builder.ALL_KINDS), the first ones.
      knowledge: the knowledge bases that are asked, by the names that gold paths have for them.
      k: passages per search.

    Raises:
      ValueError: a kind has fewer questions, or a path leads through a knowledge base that is not there.
    """
    examples = atlas_questions(split, counts)
    places = [str(cache_place(name, spec)) for name, spec in knowledge.items()]
    known = [
        (one.id, one.question, one.answers, str(one.metadata), [hashlib.sha256(i).hexdigest() for i in one.images])
        for one in examples
    ]
    writers = [inspect.getsource(module) for module in (golden, trajectories, sys.modules[__name__])]
    digest = hashlib.sha256(json.dumps([places, k, known, writers]).encode()).hexdigest()[:12]
    directory = cache_directory() / "golden" / f"atlas-{split}-{digest}"
    if not (directory / _FILE).is_file():
        scratch = directory.with_name(f".{directory.name}.{uuid.uuid4().hex}")  # other processes may be at it, too
        write_atlas_golden(scratch / _FILE, examples, open_knowledge_bases(knowledge), k)
        try:
            scratch.rename(directory)
        except OSError:  # another one was first
            shutil.rmtree(scratch)
    return StepExamples(directory / _FILE)


def write_atlas_golden(
    path: str | pathlib.Path, examples: Sequence[Example], tools: Mapping[str, SearchTool], k: int
) -> int:
    """Writes the golden trajectories of questions of Atlas, their pictures in `images` beside the file.

    Left out are questions of whose gold passages some knowledge base does not find one among the first k.

    Returns:
      How many were written.

    Raises:
      ValueError: a path leads through a knowledge base that is not among the tools.
    """
    path = pathlib.Path(path)
    found = _searched(examples, tools, k)
    (path.parent / "images").mkdir(parents=True, exist_ok=True)
    written = []
    for number, (example, passages) in enumerate(zip(examples, found)):
        names = [f"{number:05d}-{i}.jpg" for i in range(len(example.images))]
        trajectory = golden.golden_trajectory(example, passages, names)
        if trajectory is not None:
            written.append(trajectory)
            for name, image in zip(names, example.images):
                (path.parent / "images" / name).write_bytes(image)
    write_trajectories(path, written)
    return len(written)


def _searched(examples: Sequence[Example], tools: Mapping[str, SearchTool], k: int) -> list[list[list]]:
    """What each hop of each example finds; one call per knowledge base."""
    asked: dict[str, list[tuple[int, int, Query]]] = {}
    for row, example in enumerate(examples):
        for place, hop in enumerate(example.metadata["path"]):
            if hop["kb"] not in tools:
                raise ValueError(
                    f"question {example.id!r} leads through the knowledge base {hop['kb']!r}, which is not among "
                    f"{', '.join(tools)}"
                )
            query = with_picture(hop["query"], example.images) if hop["kb"] == PICTURES else hop["query"]
            asked.setdefault(hop["kb"], []).append((row, place, query))
    found = [[[] for _ in example.metadata["path"]] for example in examples]
    for kb, queries in asked.items():
        results = tools[kb].search([query for _, _, query in queries], k)
        for (row, place, _), passages in zip(queries, results):
            found[row][place] = passages
    return found


def atlas_questions(split: Split, counts: Mapping[str, int], mixed: bool = False) -> list[Example]:
    """So many questions of each kind, the first ones.

    Args:
      mixed: kinds alternate in proportion to their counts, so that the first few stand for all; else one comes after the other.

    Raises:
      ValueError: a kind has fewer.
    """
    found: list[tuple[float, Example]] = []
    for kind, count in counts.items():
        source = AtlasExamples(split, [kind])
        if len(source) < count:
            raise ValueError(f"atlas/{split} has {len(source)} questions of kind {kind!r}, fewer than {count}")
        found += [((i + 0.5) / count, source[i]) for i in range(count)]
    if mixed:
        found.sort(key=lambda pair: pair[0])
    return [example for _, example in found]
