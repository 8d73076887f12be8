"""The working directory of HippoRAG 2 (OSU-NLP-Group/HippoRAG): its passages, triples and vectors, read as they are.

    SAVE_DIR/openie_results_ner_LLM.json                    triples of every passage
    SAVE_DIR/LLM_ENCODER/chunk_embeddings/vdb_chunk.parquet      columns hash_id, content, embedding
    SAVE_DIR/LLM_ENCODER/entity_embeddings/vdb_entity.parquet    the same; content is a normalised phrase
    SAVE_DIR/LLM_ENCODER/fact_embeddings/vdb_fact.parquet        the same; content is Python's text of a tuple of three phrases

Its graph.pickle is not read: a pickle may run any code. The graph is made again from the triples and the phrases' vectors.
"""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from absl import logging
from jaxtyping import Float32

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.builds import digest_of
from routerl_jax.knowledge.corpus import file_sha256
from routerl_jax.knowledge.graph.kb import ENTITIES, FACTS

PASSAGES = "passages"
_STORES = {PASSAGES: "chunk", ENTITIES: "entity", FACTS: "fact"}
_COLUMNS = ("hash_id", "content", "embedding")


class HippoRAGDirectory:
    """What HippoRAG 2 left in a working directory.

    Args:
      directory: SAVE_DIR/LLM_ENCODER.
      triples: the file of triples; default: the only `openie_results_ner_*.json` beside it whose LLM is the directory's.

    Raises:
      ValueError: a file is missing or damaged; names it.
    """

    def __init__(self, directory: str | pathlib.Path, triples: str = "") -> None:
        self.directory = pathlib.Path(directory).expanduser().resolve()
        self._files = {part: _parquet(self.directory, store) for part, store in _STORES.items()}
        self.triples = pathlib.Path(triples).expanduser() if triples else _openie(self.directory)
        self._vectors: dict[str, _ByText] = {}

    @property
    def digest(self) -> str:
        """Digest of the passages and of the vectors."""
        return digest_of([file_sha256(file) for file in self._files.values()])

    @property
    def width(self) -> int:
        """Width of the vectors."""
        return self._table(PASSAGES).vectors.shape[1]

    def passages(self) -> Iterator[Passage]:
        """Its chunks. An id is HippoRAG's; the first line of a chunk of several lines is the title."""
        table = _read(self._files[PASSAGES], _COLUMNS[:2])
        for name, content in zip(table["hash_id"].to_pylist(), table["content"].to_pylist()):
            title, _, text = content.partition("\n")
            yield Passage(id=name, title=title, text=text) if text.strip() else Passage(id=name, title="", text=content)

    def of(
        self, texts: Sequence[str], embed: Callable[[list[str]], Float32[np.ndarray, "M D"]], part: str
    ) -> Float32[np.ndarray, "N D"]:
        """One vector per text of a part (PASSAGES, ENTITIES or FACTS): HippoRAG's, or from `embed` if it has none."""
        table = self._table(part)
        rows = [table.row(text) for text in texts]
        missing = [i for i, row in enumerate(rows) if row is None]
        result = table.vectors[[row or 0 for row in rows]]
        if missing:
            result[missing] = embed([texts[i] for i in missing])
            logging.warning(
                "%d of %d %s have no vector in %s and are embedded", len(missing), len(texts), part, self.directory
            )
        return result

    def _table(self, part: str) -> _ByText:
        if part not in self._vectors:
            self._vectors[part] = _ByText(self._files[part], _fact_text if part == FACTS else str)
        return self._vectors[part]


class _ByText:
    """The vectors of a store by their texts. A text that the store lacks has the vector of one with the same words."""

    def __init__(self, file: pathlib.Path, text: Callable[[str], str]) -> None:
        table = _read(file, _COLUMNS[1:])
        texts = [text(content) for content in table["content"].to_pylist()]
        lists = table["embedding"].combine_chunks()
        if len(texts) == 0 or lists.null_count or len(lists.flatten()) % len(texts):
            raise ValueError(f"{file}: its vectors have different widths, or there are none")
        self.vectors = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(texts), -1)
        self._rows: dict[str, int] = {}
        for spelled in (texts, (" ".join(spelling.split()) for spelling in texts)):
            for row, spelling in enumerate(spelled):
                self._rows.setdefault(spelling, row)

    def row(self, text: str) -> int | None:
        return self._rows.get(text, self._rows.get(" ".join(text.split())))


def _fact_text(content: str) -> str:
    """The words of a fact, as graph builds embed them, from `"('ada', 'was born in', 'london')"`."""
    try:
        return " ".join(ast.literal_eval(content))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return content  # a store of another version; such a fact is embedded


def _parquet(directory: pathlib.Path, store: str) -> pathlib.Path:
    file = directory / f"{store}_embeddings" / f"vdb_{store}.parquet"
    if not file.is_file():
        raise ValueError(
            f"{file} is missing: {directory} is no working directory of HippoRAG 2 (SAVE_DIR/LLM_ENCODER) that keeps its "
            "vectors in Parquet files"
        )
    return file


def _openie(directory: pathlib.Path) -> pathlib.Path:
    begins, ends = "openie_results_ner_", ".json"
    files = [
        file
        for file in sorted(directory.parent.glob(f"{begins}*{ends}"))
        if directory.name.startswith(f"{file.name.removeprefix(begins).removesuffix(ends)}_")
    ]
    if len(files) != 1:
        names = ", ".join(file.name for file in files) or "none"
        raise ValueError(
            f"{directory.parent} must have one {begins}LLM{ends} for {directory.name}; there is {names}. Name it: "
            "--config.triples=FILE"
        )
    return files[0]


def _read(file: pathlib.Path, columns: Sequence[str]) -> pa.Table:
    try:
        return pq.read_table(file, columns=list(columns))
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise ValueError(f"{file}: no Parquet file with the columns {', '.join(_COLUMNS)} ({error})") from error
