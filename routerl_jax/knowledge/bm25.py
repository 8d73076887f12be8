"""BM25 through bm25s: search by words instead of vectors, a cheap baseline. The index is mapped from disk, not loaded."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32, Int

from routerl_jax.core.config import Fraction, NonNegative, checked
from routerl_jax.core.packages import needs
from routerl_jax.core.progress import Bar
from routerl_jax.core.text import words as text_words
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.builds import (
    VERSIONS,
    Builder,
    BuildReport,
    Clock,
    SplitSettings,
    changes,
    corpus_source,
    digest_of,
    is_built,
    report,
    stamp,
)
from routerl_jax.knowledge.corpus import corpus_files, read_corpus
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.store import INDEX, Store, StoredPassages
from routerl_jax.knowledge.tables import holds_tables, read_tables, table_passages
from routerl_jax.knowledge.writer import StoreWriter, explained

# How texts are split: in any script (core.text), or words of two letters or more, as in bm25s's default.
_SPLITS: dict[str, Callable[[str], list[str]]] = {
    "any": functools.partial(text_words, pairs=True),
    "latin": re.compile(r"(?u)\b\w\w+\b").findall,
}
_COST = 0.1  # in units of a dense search; there is no encoder


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Words:
    """How a text is split into words, and how they are weighted."""

    # any: words of any script, of one letter too; latin: words of two letters or more between spaces
    split: str = "any"
    stemmer: str = "english"  # a language of PyStemmer (Snowball); "": no stemming
    stopwords: str = "english"  # bm25s's list of words that are left out; "": none
    method: str = "lucene"  # variant of BM25: lucene or atire
    k1: NonNegative = 1.2  # saturation of the weight of repeated words
    b: Fraction = 0.75  # penalty for long passages, 0 to 1

    def __post_init__(self) -> None:
        if self.method not in ("lucene", "atire"):  # other variants give scores to passages without any of the words
            raise ValueError(f"method={self.method!r} is not one of lucene, atire")
        if self.split not in _SPLITS:
            raise ValueError(f"split={self.split!r} is not one of {', '.join(_SPLITS)}")

    @classmethod
    def of(cls, index: Mapping[str, Any]) -> Words:
        """The words of a built index, by the manifest's settings. Those from before `split` was among them are latin."""
        return cls(**{"split": "latin", **{key: value for key, value in index.items() if key != "backend"}})

    def tokenizer(self) -> Any:
        """bm25s's tokenizer. Raises ValueError for an unknown language."""
        bm25s, stemmers = _libraries()
        if self.stemmer and self.stemmer not in stemmers.algorithms():
            raise ValueError(f"stemmer={self.stemmer!r} is not one of {', '.join(stemmers.algorithms())}")
        return bm25s.tokenization.Tokenizer(
            splitter=_SPLITS[self.split],
            stopwords=self.stopwords or None,
            stemmer=stemmers.Stemmer(self.stemmer) if self.stemmer else None,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Bm25Config(SplitSettings):
    """Configuration of `build_bm25`."""

    corpus: str = ""  # passages, in a file or a directory (knowledge.corpus), or tables, by rows (knowledge.tables)
    kind: str = "bm25"  # kind of the knowledge base
    words: Words = dataclasses.field(default_factory=Words)


class Bm25KB(KnowledgeBase):
    """Finds passages by the words that they share with the query, title included. Passages without a shared word are not found.

    Scores are BM25's; ties go to the passage that comes first. The time of a query is proportional to the corpus.
    """

    cost = _COST

    def __init__(self, store: Store, retriever: Any, words: Words) -> None:
        self.name = store.manifest.name
        self.store = store
        self._retriever = retriever
        self._words = words
        self._tokenizer = words.tokenizer()

    @classmethod
    def open(cls, store: Store, *, mesh: Mesh | None, index: str | None, encoder: str | TextEncoder | None) -> Bm25KB:
        """Opens a built store. It has one index and no encoder, so neither can be replaced."""
        if index is not None or encoder is not None:
            raise ValueError(f"{store.directory} is of kind bm25, which has no vectors: leave out index and encoder")
        bm25s, _ = _libraries()
        try:
            retriever = bm25s.BM25.load(str(store.index_directory), mmap=True)
            sizes = len(retriever.scores["indptr"]) - 1, retriever.scores["num_docs"]
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise ValueError(f"{store.index_directory} is damaged or missing ({error}). {store.hint}") from error
        if sizes[1] != store.manifest.count:
            raise ValueError(
                f"{store.index_directory} holds {sizes[1]} passages, but kb.json speaks of {store.manifest.count}: they are "
                f"of different builds. {store.hint}"
            )
        return cls(store, retriever, Words.of(store.manifest.index))

    def __len__(self) -> int:
        return len(self.store)

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        ids, scores = zip(*(self._best_rows(query, k) for query in queries))
        return self.store.scored(ids, scores)

    def _best_rows(self, query: str, k: int) -> tuple[Int[np.ndarray, " K"], Float32[np.ndarray, " K"]]:
        tokenizer = self._tokenizer
        words = [word for word in tokenizer.splitter(query.lower()) if word not in (tokenizer.stopwords or ())]
        terms = self._retriever.get_tokens_ids(list(map(tokenizer.stemmer, words)) if tokenizer.stemmer else words)
        scores = self._retriever.get_scores_from_ids(terms) if terms else np.zeros(0, np.float32)
        ids = np.flatnonzero(scores > 0)
        if len(ids) > k:
            ids = ids[scores[ids] >= np.partition(scores[ids], -k)[-k]]
        ids = ids[np.lexsort((ids, -scores[ids]))][:k]
        return ids, scores[ids]


def passages_or_rows(
    config: Bm25Config, path: pathlib.Path, left_out: dict[str, str] | None = None
) -> Iterable[Passage]:
    """The passages of a corpus (`read_corpus`), or the rows of tables."""
    if holds_tables(path):
        return (passage for table in read_tables(path) for passage in table_passages(table))
    return read_corpus(path, split=config.split, left_out=left_out)


def build_bm25(config: Bm25Config, directory: str | pathlib.Path, *, progress: bool = True) -> BuildReport:
    """Builds a BM25 knowledge base from `config.corpus`. `directory` appears only when it is complete.

    Raises:
      ValueError: a file, a row or a setting is wrong, or a package is missing; names it.
    """
    source = corpus_source(
        config.corpus,
        "the file or directory of passages",
        functools.partial(passages_or_rows, config),
        check=corpus_files,
    )
    config.words.tokenizer()  # raises if a package is missing, before anything is written
    clock = Clock()
    fingerprint = digest_of([*VERSIONS, source.digest, changes(config), config.words.split])
    with StoreWriter(directory, fingerprint, overwrite=config.overwrite) as writer:
        as_split = writer.existing is None or writer.existing.index.get("split", "latin") == config.words.split
        if not (as_split and is_built(writer, config, source)):
            count = source.write(writer, progress)
            clock.lap("read")
            index_words(writer.scratch, config.words, progress)
            clock.lap("index")
            index = {"backend": "bm25s", **dataclasses.asdict(config.words)}
            writer.commit(stamp(config, writer.directory, source, count=count, index=index))
    store = Store(writer.directory)
    terms = len(Bm25KB.open(store, mesh=None, index=None, encoder=None)._retriever.scores["indptr"]) - 1
    return report(store, clock, ("passages", INDEX), numbers={"different words": terms})


def index_words(directory: pathlib.Path, words: Words, progress: bool) -> None:
    """Makes DIRECTORY/index from DIRECTORY/passages. Needs memory of 8 bytes per word of the corpus, and about 20 per distinct
    word of each passage."""
    bm25s, _ = _libraries()
    tokenizer, passages = words.tokenizer(), StoredPassages(directory)
    texts = (f"{passage.title}\n{passage.text}" for passage in passages)
    bar = Bar(texts, desc="words", unit="passage", total=len(passages), disable=not progress)
    ids = list(tokenizer.streaming_tokenize(bar))
    retriever = bm25s.BM25(k1=words.k1, b=words.b, method=words.method)
    # its own bars are not ours to put in lines, or to hide
    retriever.index((ids, tokenizer.get_vocab_dict()), show_progress=False)
    with explained(directory / INDEX, f"All {len(passages):,} passages are kept"):
        retriever.save(str(directory / INDEX), show_progress=False)


def _libraries() -> tuple[Any, Any]:
    with needs("BM25", "bm25"):
        import bm25s
        import bm25s.tokenization
        import Stemmer
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # its own is DEBUG, whatever the program's is
    return bm25s, Stemmer


BUILDER = Builder(Bm25Config, build_bm25)
