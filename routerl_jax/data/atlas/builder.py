"""Atlas questions as a tensorflow-datasets builder, read without TensorFlow through `tfds.data_source`."""

from __future__ import annotations

import bisect
import hashlib
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from filelock import FileLock

from routerl_jax.core.files import cache_directory
from routerl_jax.core.types import Example
from routerl_jax.data.atlas import extract, flags, visual, world
from routerl_jax.data.atlas.questions import real_questions

_SPLITS: tuple[world.Split, ...] = ("train", "validation", "test")
KINDS = ("none", "single", "multi")  # kinds of questions, by the searches that they need
ALL_KINDS = (*KINDS, "visual")  # visual questions show a flag; they are included only if they are named


class Atlas(tfds.core.GeneratorBasedBuilder):
    """Questions about real countries and chemical elements, split by entity, with gold retrieval paths."""

    VERSION = tfds.core.Version("1.1.0")
    RELEASE_NOTES = {  # noqa: RUF012 - tfds wants a plain dict
        "1.0.0": "Text, table and elements knowledge bases.",
        "1.1.0": "Visual questions after all others.",
    }

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description=__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "id": tfds.features.Text(),
                    "question": tfds.features.Text(),
                    "answer": tfds.features.Text(),
                    "kind": tfds.features.ClassLabel(names=list(ALL_KINDS)),
                    "entities": tfds.features.Sequence(tfds.features.Text()),
                    "picture": tfds.features.Text(),  # the country whose flag is shown
                    "path": tfds.features.Text(),  # JSON list of hops: kb, passage_id, query, value
                }
            ),
            disable_shuffling=True,  # real_questions has shuffled them, in the same order on every machine
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {split: self._generate_examples(split) for split in _SPLITS}

    def _generate_examples(self, split: world.Split) -> Iterator[tuple[int, dict[str, Any]]]:
        for key, question in enumerate([*real_questions(split), *visual.real_visual_questions(split)]):
            hops = [
                {"kb": hop.kb, "passage_id": hop.passage_id, "query": hop.query, "value": hop.value}
                for hop in question.hops
            ]
            yield (
                key,
                {
                    "id": question.id,
                    "question": question.text,
                    "answer": question.answer,
                    "kind": question.kind,
                    "entities": list(question.entities),
                    "picture": question.picture,
                    "path": json.dumps(hops),
                },
            )


class AtlasExamples:
    """A split of Atlas as random-access Examples, in a fixed shuffled order.

    `metadata["path"]` lists the gold hops (kb, passage_id, query, value); `metadata["kind"]` is none, single, multi or
    visual. Visual questions have a picture (JPEG) of a flag. It differs from the knowledge base's picture of the same flag.

    Args:
      kinds: only questions of these kinds; default: all without a picture.
    """

    def __init__(self, split: world.Split, kinds: Sequence[str] = KINDS) -> None:
        self._source = _prepared().as_data_source(split=split)  # type: ignore[call-arg]
        self._rows: Sequence[int] = range(len(self._source))
        if set(kinds) == set(KINDS):  # these come first: a few rows are decoded to find their end
            last = ALL_KINDS.index("visual")
            self._rows = range(bisect.bisect_left(self._rows, last, key=lambda i: int(self._source[i]["kind"])))
        else:
            kind_indices = [ALL_KINDS.index(kind) for kind in kinds]
            self._rows = [i for i in self._rows if int(self._source[i]["kind"]) in kind_indices]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Example:
        row = self._source[self._rows[index]]
        name, picture = self._text(row["id"]), self._text(row["picture"])
        return Example(
            id=name,
            question=self._text(row["question"]),
            answers=(self._text(row["answer"]),),
            images=(flags.photographed(flags.flag(picture), name),) if picture else (),
            metadata={
                "kind": ALL_KINDS[int(row["kind"])],
                "entities": [self._text(name) for name in np.atleast_1d(row["entities"])],
                "path": json.loads(self._text(row["path"])),
            },
        )

    @staticmethod
    def _text(value: Any) -> str:
        return value.decode() if isinstance(value, bytes) else str(value)


def _prepared() -> Atlas:
    """The builder. Its array_record files are written on first use."""
    # With the digest, a cache of another version of the world is not used.
    code = b"".join(
        path.read_bytes() for path in (extract.FACTS, pathlib.Path(world.__file__), pathlib.Path(visual.__file__))
    )
    directory = cache_directory() / "tensorflow_datasets" / hashlib.sha256(code).hexdigest()[:12]
    directory.mkdir(parents=True, exist_ok=True)
    tfds.display_progress_bar(False)
    with FileLock(directory / "atlas.lock"):
        builder = Atlas(data_dir=str(directory), file_format="array_record")
        builder.download_and_prepare()
    return builder
