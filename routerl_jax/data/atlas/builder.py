"""Atlas's questions as a data set of random access."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Iterator, Sequence

from routerl_jax.core.types import Example
from routerl_jax.data.atlas import flags, questions, world
from routerl_jax.data.prepared import PreparedQuestions

_SPLITS: tuple[world.Split, ...] = ("train", "validation", "test")
KINDS = ("none", "single", "multi")  # kinds of questions, by the searches that they need
ALL_KINDS = (*KINDS, "visual")  # visual questions show a flag; they are included only if they are named


class AtlasExamples(PreparedQuestions):
    """A split of Atlas as random-access Examples, in a fixed shuffled order.

    `metadata["path"]` lists the gold hops (kb, passage_id, query, value); `metadata["kind"]` is none, single, multi or
    visual. Visual questions have a picture (JPEG) of a flag. It differs from the knowledge base's picture of the same flag.

    Args:
      kinds: only questions of these kinds; default: all without a picture.
    """

    def __init__(self, split: world.Split, kinds: Sequence[str] = KINDS) -> None:
        # With the digest, a cache of another version of the world is not used.
        sources = (
            world.FACTS,
            pathlib.Path(world.__file__),
            pathlib.Path(questions.__file__),
            pathlib.Path(__file__),
        )
        key = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
        super().__init__(split, {name: functools.partial(_questions, name) for name in _SPLITS}, key)
        self._rows: Sequence[int] = range(super().__len__())
        if set(kinds) == set(KINDS):  # these come first: a few rows are decoded to find their end
            self._rows = range(bisect.bisect_left(self._rows, True, key=lambda row: self._kind(row) == "visual"))
        else:
            self._rows = [row for row in self._rows if self._kind(row) in kinds]

    def _kind(self, row: int) -> str:
        return super().__getitem__(row).metadata["kind"]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        example = super().__getitem__(self._rows[index])
        metadata = dict(example.metadata)
        picture = metadata.pop("picture")
        images = (flags.photographed(flags.flag(picture), example.id),) if picture else ()
        return dataclasses.replace(example, images=images, metadata=metadata)


def _questions(split: world.Split) -> Iterator[Example]:
    """The questions of a split, the visual ones last. `metadata["picture"]` is the country whose flag a question shows."""
    for question in (*questions.real_questions(split), *questions.real_visual_questions(split)):
        hops = [
            {"kb": hop.kb, "passage_id": hop.passage_id, "query": hop.query, "value": hop.value}
            for hop in question.hops
        ]
        metadata = {"kind": question.kind, "entities": list(question.entities), "path": hops}
        yield Example(
            id=question.id,
            question=question.text,
            answers=(question.answer,),
            metadata={**metadata, "picture": question.picture},
        )
