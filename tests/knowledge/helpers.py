"""Vectors, passages and an encoder that cost nothing, for the tests of this package."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from routerl_jax.core.types import Passage
from routerl_jax.knowledge.bm25 import Bm25Config, build_bm25


class HashEncoder:
    """A text's vector follows from its hash: deterministic, different for different texts, unit length."""

    def __init__(self, dim: int = 8) -> None:
        self.dim = dim
        self.seen: list[str] = []

    def embed(self, texts: Sequence[str], *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
        texts = [(prefix or "") + text for text in texts]
        self.seen += texts
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(vectors, texts):
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
            row[:] = np.random.default_rng(seed).normal(size=self.dim)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class InMemory:
    """A plain matrix as a VectorSource."""

    matrix: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.matrix[start:stop]

    def take(self, rows: np.ndarray) -> np.ndarray:
        return self.matrix[rows]


def make_passages(n: int) -> list[Passage]:
    """n short passages with distinct ids, titles and texts, not only ASCII."""
    return [Passage(id=f"p{i}", title=f"Tïtle {i}", text=f"Text № {i} — {'word ' * (i % 7)}end") for i in range(n)]


def clustered(n: int, dim: int, seed: int = 0, noise: float = 0.3) -> np.ndarray:
    """Unit vectors around about sqrt(n) centres, as embeddings of texts are (uniform random ones have no neighbours)."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(4, round(n**0.5)), dim))
    vectors = centres[rng.integers(len(centres), size=n)] + noise * rng.normal(size=(n, dim))
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def write_jsonl(path: pathlib.Path, rows: Sequence[dict[str, Any]]) -> pathlib.Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def build_words(passages: Sequence[Passage], directory: pathlib.Path, config: Bm25Config | None = None) -> None:
    """A BM25 knowledge base of passages; their file stays beside it."""
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in passages]
    directory.parent.mkdir(parents=True, exist_ok=True)
    corpus = write_jsonl(directory.with_name(f"{directory.name}.jsonl"), rows)
    build_bm25(dataclasses.replace(config or Bm25Config(), corpus=str(corpus)), directory, progress=False)


def files_of(directory: pathlib.Path) -> dict[str, bytes]:
    """All files of a directory by relative path; the time of the build is taken out of kb.json."""
    files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    manifest = json.loads(files["kb.json"])
    manifest.pop("created")
    return {**files, "kb.json": json.dumps(manifest).encode()}
