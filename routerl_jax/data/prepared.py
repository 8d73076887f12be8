"""Files of questions as a tensorflow-datasets builder, read without TensorFlow: array_record files, written once."""

from __future__ import annotations

import hashlib
import inspect
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from filelock import FileLock

from routerl_jax.core.files import cache_directory
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Example
from routerl_jax.data.formats import format as shared
from routerl_jax.data.formats import known
from routerl_jax.data.formats.format import FORMATS

_BESIDE = ("id_aliases.json",)  # further files that a format reads, beside the file of questions
_SPLIT = "questions"


class Questions(tfds.core.GeneratorBasedBuilder):
    """Questions without pictures, in order.

    Args:
      questions: gives them.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Questions, answers and metadata."}  # noqa: RUF012 - tfds wants a plain dict

    def __init__(self, questions: Callable[[], Iterable[Example]], **options: Any) -> None:
        self._questions = questions
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        return self.dataset_info_from_configs(
            description=__doc__,
            features=tfds.features.FeaturesDict(
                {
                    "id": tfds.features.Text(),
                    "question": tfds.features.Text(),
                    "answers": tfds.features.Sequence(tfds.features.Text()),
                    "metadata": tfds.features.Text(),  # JSON object
                }
            ),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {_SPLIT: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for number, example in enumerate(self._questions()):
            row = {"id": example.id, "question": example.question, "answers": list(example.answers)}
            yield number, {**row, "metadata": json.dumps(example.metadata)}


class PreparedExamples:
    """The questions of one file, read one by one from array_record files in the cache. These are written on first use. The
    cache's key is a digest of the file's content, the format, and the code that reads it.

    For the order, and for the errors on first use, see `FileExamples`.

    Args:
      form: a format of data.formats; "": the keys of the rows decide.
    """

    def __init__(self, path: str | pathlib.Path, form: str = "") -> None:
        path = pathlib.Path(path).expanduser()
        if not path.is_file():
            raise ValueError(f"{path}: No such file or directory")
        digest = hashlib.sha256(form.encode() + pathlib.Path(__file__).read_bytes())
        for module in (known, shared, *(inspect.getmodule(type(FORMATS.get(name))) for name in FORMATS)):
            digest.update(inspect.getsource(module).encode() if module else b"")
        for file in (path, *(path.parent / name for name in _BESIDE)):
            if file.is_file():
                with file.open("rb") as content:
                    digest.update(hashlib.file_digest(content, "sha256").digest())

        def questions() -> Iterator[Example]:
            rows = known.distinct_examples(path, form)
            for example in Bar(rows, desc=f"preparing {path.name}", unit="question"):
                if example.images:
                    raise ValueError(f"{path}: question {example.id!r} has pictures; name the file without tfds/")
                yield example

        directory = cache_directory() / "tensorflow_datasets" / digest.hexdigest()[:12]
        directory.mkdir(parents=True, exist_ok=True)
        tfds.display_progress_bar(False)  # there is a progress bar of our own, and nothing is downloaded
        with FileLock(directory / "questions.lock"):
            builder = Questions(questions, data_dir=str(directory), file_format="array_record")
            builder.download_and_prepare()
        self._source = builder.as_data_source(split=_SPLIT)  # type: ignore[call-arg]

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self._source):
            raise IndexError(index)
        row = self._source[index]
        return Example(
            id=_text(row["id"]),
            question=_text(row["question"]),
            answers=tuple(_text(answer) for answer in np.atleast_1d(row["answers"])),
            metadata=json.loads(_text(row["metadata"])),
        )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
