"""Dense knowledge bases: against numpy, with real MiniLM, with a cache that changes nothing, and `load_kb`'s errors."""

import dataclasses
import json
import pathlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from routerl_jax.core.types import Passage
from routerl_jax.knowledge import encoders
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.dense import DenseKB
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.store import Store
from routerl_jax.models.families.bert import Encoder
from routerl_jax.parallel.mesh import make_mesh
from tests.knowledge.helpers import HashEncoder, make_passages

FACTS = {
    "Photosynthesis": "Plants turn sunlight, water and carbon dioxide into sugar and oxygen.",
    "Mount Everest": "The highest mountain on Earth rises 8,849 metres above the sea, between Nepal and Tibet.",
    "Ludwig van Beethoven": "The composer wrote nine symphonies, the last of them when he was deaf.",
    "Penicillin": "Alexander Fleming found the first antibiotic in a mould in 1928.",
    "Amazon River": "The river carries more water than any other and flows through Brazil to the Atlantic.",
    "Python": "A programming language by Guido van Rossum, known for its readable syntax.",
}
QUESTIONS = {
    "What is the tallest peak in the world?": "Mount Everest",
    "Who discovered the drug that kills bacteria?": "Penicillin",
    "Which German musician lost his hearing?": "Ludwig van Beethoven",
    "How do leaves make their food?": "Photosynthesis",
    "What should I learn to write software?": "Python",
}


@pytest.fixture(scope="module")
def minilm_kb(tmp_path_factory: pytest.TempPathFactory, minilm: Encoder) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("minilm") / "kb"
    passages = [Passage(id=f"f{i}", title=title, text=text) for i, (title, text) in enumerate(FACTS.items())]
    build_from_passages(passages, BuildConfig(name="facts"), directory, progress=False, encoder=minilm)
    return directory


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("hashed") / "kb"
    config = BuildConfig(name="hashed", index="exact", query_prefix="query: ", passage_prefix="passage: ")
    build_from_passages(make_passages(50), config, directory, progress=False, encoder=HashEncoder())
    return directory


def open_hashed(directory: pathlib.Path, **options: Any) -> DenseKB:
    kb = load_kb(directory, encoder=HashEncoder())
    assert isinstance(kb, DenseKB)
    return DenseKB(kb.store, kb.encoder, kb.index, **options)


@pytest.mark.parametrize("index", ["scann", "exact"])
def test_real_sentences(minilm_kb: pathlib.Path, minilm: Encoder, index: str) -> None:
    kb = load_kb(str(minilm_kb), index=index)  # finds the encoder by itself, on all eight devices
    assert (kb.name, len(kb)) == ("facts", 6)
    results = kb.search(list(QUESTIONS), k=3)
    assert [found[0].title for found in results] == list(QUESTIONS.values())
    assert all(found[0].text == FACTS[found[0].title] for found in results)
    texts = minilm.embed([f"{title}\n{text}" for title, text in FACTS.items()])
    expected = np.sort(minilm.embed(list(QUESTIONS)) @ texts.T, axis=1)[:, ::-1][:, :3]
    # the encoder's batches have another size here: float32 sums over 6 layers
    np.testing.assert_allclose([[p.score for p in found] for found in results], expected, atol=2e-6)


def test_both_indexes_give_the_same(minilm_kb: pathlib.Path) -> None:
    queries = [*QUESTIONS, "unrelated words"]
    assert load_kb(minilm_kb).search(queries, 6) == load_kb(minilm_kb, index="exact").search(queries, 6)


def test_search_against_numpy(hashed: pathlib.Path) -> None:
    encoder = HashEncoder()
    passages = make_passages(50)
    vectors = encoder.embed([f"passage: {p.title}\n{p.text}" for p in passages])
    queries = [f"q{i}" for i in range(20)]
    scores = (encoder.embed([f"query: {q}" for q in queries]).astype(np.float64) @ vectors.T).astype(np.float32)
    kb = open_hashed(hashed)
    for k in (1, 4, 50, 80):
        for found, row in zip(kb.search(queries, k), scores):
            best = np.argsort(-row, kind="stable")[:k]
            assert found == [dataclasses.replace(passages[i], score=float(row[i])) for i in best]


def test_prefixes_come_from_the_manifest(hashed: pathlib.Path) -> None:
    kb = open_hashed(hashed)
    kb.search(["who?"])
    assert kb.encoder.seen == ["query: who?"]


def test_blank_queries_find_nothing(hashed: pathlib.Path) -> None:
    kb = open_hashed(hashed)
    assert kb.search([]) == []
    assert kb.search(["", " \n\t"]) == [[], []]
    with_blanks = kb.search(["", "a", "  ", "b"], 2)
    assert with_blanks == [[], *kb.search(["a"], 2), [], *kb.search(["b"], 2)]
    assert [len(found) for found in kb.search(["a"])] == [5]


def test_half_a_surrogate_pair_harms_no_query(minilm_kb: pathlib.Path) -> None:
    """JSON may hold one; no tokenizer reads it."""
    kb = load_kb(minilm_kb)
    assert kb.search(["a \ud800 b", "Tïtle"], 2) == kb.search(["a ? b", "Tïtle"], 2)


def test_bad_arguments(hashed: pathlib.Path) -> None:
    kb = open_hashed(hashed)
    for k in (0, -3, 2.0, True, "5", None):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            kb.search(["a"], k)
    with pytest.raises(ValueError, match=r"write search\(\['a'\]\)"):
        kb.search("a")
    with pytest.raises(ValueError, match="query 1 is of type NoneType"):
        kb.search(["a", None])


@pytest.mark.parametrize("cache_size", [0, 3, 1000])
def test_the_cache_changes_nothing(hashed: pathlib.Path, cache_size: int) -> None:
    kb, rng = open_hashed(hashed, cache_size=cache_size), np.random.default_rng(0)
    expected = {query: open_hashed(hashed).search([query], 3)[0] for query in ("q0", "q1", "q2", "q3", "q4", "q5")}
    for _ in range(40):
        queries = [f"q{i}" for i in rng.integers(6, size=rng.integers(1, 9))]
        assert kb.search(queries, 3) == [expected[query] for query in queries]
        assert len(kb.cache.cached([f"q{i}" for i in range(6)])) <= cache_size


def test_the_cache_forgets_the_oldest(hashed: pathlib.Path) -> None:
    kb = open_hashed(hashed, cache_size=2)
    kb.search(["a", "b", "a"])
    kb.search(["a"])
    kb.search(["c"])  # b is the oldest now
    kb.search(["a"])
    kb.search(["b"])
    assert kb.encoder.seen == ["query: a", "query: b", "query: c", "query: b"]


def test_the_cache_keeps_vectors_and_not_their_batches(hashed: pathlib.Path) -> None:
    kb = open_hashed(hashed)
    kb.search(["a", "b"])
    assert all(vector.base is None for vector in kb.cache.cached(["a", "b"]).values())


def test_a_query_vector_does_not_depend_on_its_company(minilm_kb: pathlib.Path, minilm: Encoder) -> None:
    queries = [*QUESTIONS, *(f"number {i} " * (1 + i % 9) for i in range(20))]
    together = load_kb(minilm_kb, encoder=minilm).search(queries, 2)
    alone = load_kb(minilm_kb, encoder=minilm)
    assert [alone.search([query], 2)[0] for query in queries[:8]] == together[:8]


def test_threads(minilm_kb: pathlib.Path) -> None:
    """Several knowledge bases share an encoder; the driver searches them from threads of their own."""
    kbs = [load_kb(minilm_kb), load_kb(minilm_kb, index="exact")]
    queries = [f"question {i} about {word}" for i, word in enumerate(["rivers", "music", "plants"] * 2)]
    expected = [kbs[0].search([query], 2)[0] for query in queries]
    kbs = [load_kb(minilm_kb), load_kb(minilm_kb, index="exact")]
    results: dict[int, list[list[Passage]]] = {}

    def work(i: int) -> None:
        results[i] = kbs[i % 2].search(queries[i % 3 :], 2)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(results[i] == expected[i % 3 :] for i in range(6))


def test_an_encoder_is_loaded_once(minilm_kb: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = []

    def counted(*arguments: Any, **options: Any) -> Any:
        loads.append(arguments)
        return load(*arguments, **options)

    load = encoders.load_pretrained
    monkeypatch.setattr(encoders, "load_pretrained", counted)
    monkeypatch.setattr(encoders, "_loaded", {})
    mesh = make_mesh(devices=jax.devices()[:2])
    kbs = [load_kb(minilm_kb, mesh=mesh) for _ in range(3)]
    assert len(loads) == 1
    assert kbs[0].encoder is kbs[2].encoder
    assert kbs[0].search(["How high is Everest?"], 1)[0][0].title == "Mount Everest"
    load_kb(minilm_kb, mesh=make_mesh(devices=jax.devices()[2:4]))
    assert len(loads) == 2  # other devices: another copy of the weights


def test_another_encoder_must_fit(minilm_kb: pathlib.Path) -> None:
    kb = load_kb(minilm_kb, encoder=HashEncoder(dim=8))
    with pytest.raises(ValueError, match=r"vectors of width 8, but .* was built with 384.*kb\.json names"):
        kb.search(["a"])
    with pytest.raises(ValueError, match="no model at 'nonsense'"):
        load_kb(minilm_kb, encoder="nonsense")


def test_load_kb_errors(minilm_kb: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"http://localhost:9/kb.*no answer after .* attempts.*connection failed"):
        load_kb("http://localhost:9/kb")
    with pytest.raises(ValueError, match=r"no such directory.*launch\.build_kb"):
        load_kb(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"unknown index 'exakt'.*did you mean 'exact'"):
        load_kb(minilm_kb, index="exakt")
    (tmp_path / "kb.json").write_text(
        json.dumps({**json.loads((minilm_kb / "kb.json").read_text()), "kind": "dense_txt"})
    )
    for part in ("passages", "embeddings", "index"):
        (tmp_path / part).symlink_to(minilm_kb / part)
    with pytest.raises(
        ValueError, match=r"kb\.json: unknown kind of knowledge base 'dense_txt'; did you mean 'dense_text'"
    ):
        load_kb(tmp_path)
    (tmp_path / "index").unlink()
    (tmp_path / "kb.json").write_text((minilm_kb / "kb.json").read_text())
    with pytest.raises(ValueError, match=r"scann_assets\.pbtxt is missing.* built from passages in memory"):
        load_kb(tmp_path)
    assert len(load_kb(tmp_path, index="exact")) == 6  # the embeddings are enough for that


class ReversedKB(KnowledgeBase):
    """A kind from elsewhere: finds the last passages."""

    def __init__(self, store: Store) -> None:
        self.name, self._store = store.manifest.name, store

    @classmethod
    def open(cls, store: Store, **_: Any) -> "ReversedKB":
        return cls(store)

    def __len__(self) -> int:
        return len(self._store)

    def _search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        return [self._store.passages.take(range(len(self) - 1, max(-1, len(self) - 1 - k), -1)) for _ in queries]


def open_reversed(store: Store, **options: Any) -> ReversedKB:
    return ReversedKB.open(store, **options)


def test_a_kind_from_another_package(hashed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    fields = json.loads((hashed / "kb.json").read_text())
    fields |= {"kind": "tests.knowledge.test_dense:open_reversed", "embedding": None, "index": {}}
    (tmp_path / "kb.json").write_text(json.dumps(fields))
    (tmp_path / "passages").symlink_to(hashed / "passages")
    kb = load_kb(tmp_path)
    assert [p.id for p in kb.search(["x"], 3)[0]] == ["p49", "p48", "p47"]
    with pytest.raises(ValueError, match="k=0"):
        kb.search(["x"], 0)


def test_a_kind_that_gives_too_few_results(hashed: pathlib.Path) -> None:
    class Forgetful(ReversedKB):
        def _search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            return super()._search(queries, k)[:1]

    kb = Forgetful(Store(hashed))
    assert len(kb.search(["x"])) == 1
    message = r"'hashed' gave 1 results for 2 queries: Forgetful\._search must give one list"
    with pytest.raises(ValueError, match=message):
        kb.search(["x", "", "y"])


def test_knowledge_bases_of_one_encoder_embed_a_query_once(hashed: pathlib.Path) -> None:
    """Also when they are asked at the same time; another encoder has a cache of its own."""
    encoder = HashEncoder()
    first, second = (load_kb(hashed, encoder=encoder) for _ in range(2))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: (first, second)[i % 2].search([f"q{i // 8}", "same"], 3), range(32)))
    assert sorted(text.removeprefix("query: ") for text in encoder.seen) == ["q0", "q1", "q2", "q3", "same"]
    assert all(found[i] == found[i - i % 8] for i in range(32))
    other = load_kb(hashed, encoder=HashEncoder())
    assert isinstance(other, DenseKB)
    assert isinstance(first, DenseKB)
    assert other.cache is not first.cache


class RefusingEncoder(HashEncoder):
    """Refuses a text, and with it the call that it is in."""

    def embed(self, inputs: Sequence[str], /, *, prefix: str | None = None, batch_size: int = 32) -> np.ndarray:
        if any("refused" in text for text in inputs):
            raise ValueError("refused")
        return super().embed(inputs, prefix=prefix, batch_size=batch_size)


def test_a_text_that_cannot_be_embedded_harms_no_other_knowledge_base(hashed: pathlib.Path) -> None:
    """What several ask at once is embedded in one call."""
    encoder = RefusingEncoder()
    kbs = [load_kb(hashed, encoder=encoder) for _ in range(4)]

    def ask(i: int) -> str:
        try:
            return str(len(kbs[i % 4].search([f"text {i}" if i % 4 else "refused"], 3)[0]))
        except ValueError as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        for start in range(0, 32, 4):
            assert list(pool.map(ask, range(start, start + 4))) == ["refused", "3", "3", "3"]
