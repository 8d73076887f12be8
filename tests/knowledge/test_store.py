"""The store on disk: what is written comes back, little is read, and every kind of damage is an error with the remedy."""

import json
import pathlib
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import tensorstore as ts

from routerl_jax.knowledge.build import BuildConfig, build_from_passages, build_kb
from routerl_jax.knowledge.store import Manifest, Store
from tests.knowledge.helpers import HashEncoder, make_passages, write_jsonl

N = 100


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    directory = tmp_path_factory.mktemp("store") / "kb"
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in make_passages(N)]
    corpus = write_jsonl(directory.with_name("corpus.jsonl"), rows)
    config = BuildConfig(corpus=str(corpus), name="test", index="exact", shard_size=16)
    build_kb(config, directory, progress=False, encoder=HashEncoder())
    return directory


@pytest.mark.parametrize("memory_limit", [0, 2**30])
def test_what_was_written_comes_back(built: pathlib.Path, memory_limit: int) -> None:
    store = Store(built, memory_limit=memory_limit)
    passages = make_passages(N)
    assert len(store) == N
    assert store.passages.take(range(N)) == passages
    assert store.passages.read(0, N) == passages
    rows = np.asarray([99, 0, 17, 17, 16])
    assert store.passages.take(rows) == [passages[i] for i in rows]
    assert store.passages.read(15, 18) == passages[15:18]
    assert store.passages.take([]) == []
    texts = [f"{p.title}\n{p.text}" for p in passages]
    expected = HashEncoder().embed(texts)
    np.testing.assert_array_equal(store.embeddings.read(0, N), expected)
    np.testing.assert_array_equal(store.embeddings.take(rows[:, None]), expected[rows][:, None])


def test_manifest(built: pathlib.Path) -> None:
    fields = json.loads((built / "kb.json").read_text())
    assert fields["format"] == 1
    assert (fields["kind"], fields["name"], fields["count"]) == ("dense_text", "test", N)
    assert fields["embedding"] == {
        "encoder": "all-MiniLM-L6-v2",
        "digest": "",
        "query_encoder": "",
        "query_digest": "",
        "dim": 8,
        "dtype": "float32",
        "query_prefix": "",
        "passage_prefix": "",
    }
    assert fields["index"] == {"backend": "exact", "dtype": "float32", "recall_target": 1.0, "device_bytes": 0}
    assert fields["config"] == {"name": "test", "index": "exact", "shard_size": 16}
    assert len(fields["corpus_sha256"]) == 64
    assert Manifest.read(built).count == N


def test_one_passage_is_read_without_the_others(tmp_path: pathlib.Path) -> None:
    rng = np.random.default_rng(0)
    passages = [
        p.__class__(id=p.id, title=p.title, text=bytes(rng.integers(97, 123, 2000).astype(np.uint8)).decode())
        for p in make_passages(2000)
    ]
    config = BuildConfig(index="exact", check_queries=0)
    build_from_passages(passages, config, tmp_path / "kb", progress=False, encoder=HashEncoder(dim=256))
    total = sum(file.stat().st_size for file in (tmp_path / "kb").rglob("*"))
    store = Store(tmp_path / "kb", memory_limit=0)

    def bytes_read() -> int:
        (metric,) = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
        return sum(value["value"] for value in metric["values"])

    before = bytes_read()
    assert store.passages.take([1234])[0] == passages[1234]
    store.embeddings.take(np.asarray([77]))
    assert bytes_read() - before < 0.1 * total


def without(name: str) -> Callable[[pathlib.Path], None]:
    def damage(kb: pathlib.Path) -> None:
        path = kb / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def with_manifest(**changes: object) -> Callable[[pathlib.Path], None]:
    def damage(kb: pathlib.Path) -> None:
        fields = json.loads((kb / "kb.json").read_text())
        (kb / "kb.json").write_text(json.dumps({**fields, **changes}))

    return damage


def cut(name: str) -> Callable[[pathlib.Path], None]:
    def damage(kb: pathlib.Path) -> None:
        data = (kb / name).read_bytes()
        (kb / name).write_bytes(data[: len(data) // 2])

    return damage


DAMAGE = {
    "no embeddings": (without("embeddings"), ["embeddings is missing or damaged"]),
    "no shard": (without("embeddings/c/3/0"), ["embeddings/c/3/0 is missing"]),
    "no passages": (without("passages/bytes"), ["passages/bytes is missing or damaged"]),
    "no text": (without("passages/bytes/c/0"), ["passages/bytes/c/0 is missing"]),
    "torn shard": (cut("embeddings/c/3/0"), ["embeddings/c/3/0 has ", " bytes of "]),
    "torn text": (cut("passages/bytes/c/0"), ["passages/bytes/c/0 has ", " bytes of "]),
    "no manifest": (without("kb.json"), ["kb.json is missing", "not a knowledge base"]),
    "torn manifest": (cut("kb.json"), ["kb.json is not JSON", "Rebuild it: "]),
    "another format": (with_manifest(format=2), ["kb.json has format 2, this version reads 1"]),
    "no format": (with_manifest(format=None), ["kb.json has format None"]),
    "unknown key": (with_manifest(colour="red"), ["kb.json.colour"]),
    "wrong type": (with_manifest(count="many"), ["kb.json.count='many'", "int"]),
    "count too high": (
        with_manifest(count=N + 1),
        [f"passages/offsets holds {N}", f"calls for {N + 1}", "different builds"],
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage(built: pathlib.Path, tmp_path: pathlib.Path, case: str) -> None:
    damage, expected = DAMAGE[case]
    kb = tmp_path / "my kb"
    shutil.copytree(built, kb)
    damage(kb)
    with pytest.raises(ValueError) as caught:
        Store(kb)
    # where no knowledge base is, none is advised to be built over what there is
    where = "--workdir=DIR" if case == "no manifest" else f"'--workdir={kb}'"
    for part in [*expected, str(kb), f"python -m launch.build_kb --config=configs/build_kb.py {where}"]:
        assert part in str(caught.value)


def test_embeddings_of_another_build(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    kb = tmp_path / "kb"
    shutil.copytree(built, kb)
    fields = json.loads((kb / "kb.json").read_text())
    with_manifest(embedding={**fields["embedding"], "dim": 16})(kb)
    with pytest.raises(ValueError, match=r"embeddings holds 100 x 8, but .*kb\.json calls for 100 x 16"):
        Store(kb)


def test_a_torn_shard_of_an_earlier_version_is_noticed_when_it_is_read(
    built: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    kb = tmp_path / "kb"
    shutil.copytree(built, kb)
    (kb / "sizes.json").unlink()
    cut("embeddings/c/2/0")(kb)
    with pytest.raises(ValueError, match=r"embeddings is damaged .*launch\.build_kb"):
        Store(kb).embeddings.read(0, N)


def test_damage_of_a_knowledge_base_built_from_memory(tmp_path: pathlib.Path) -> None:
    build_from_passages(make_passages(9), BuildConfig(), tmp_path / "kb", progress=False, encoder=HashEncoder())
    without("embeddings")(tmp_path / "kb")
    with pytest.raises(ValueError, match=r"It was built from passages in memory: delete .*kb and let"):
        Store(tmp_path / "kb")


def test_nothing_there(tmp_path: pathlib.Path) -> None:
    command = r"python -m launch\.build_kb --config=configs/build_kb\.py --workdir="
    with pytest.raises(ValueError, match=rf"nowhere: no such directory\. .* build it here: {command}\S*nowhere"):
        Store(tmp_path / "nowhere")
    (tmp_path / "nowhere").mkdir()
    with pytest.raises(ValueError, match=rf"kb\.json is missing: .* build it here: {command}\S*nowhere"):
        Store(tmp_path / "nowhere")


def test_another_directory_is_not_to_be_built_over(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """A build would refuse it; a directory of knowledge bases names them."""
    (tmp_path / "thesis.txt").write_text("important")
    with pytest.raises(
        ValueError, match=r"is not a knowledge base\. Give .*, or build one elsewhere: .* --workdir=DIR "
    ):
        Store(tmp_path)
    shutil.copytree(built, tmp_path / "kb")
    with pytest.raises(ValueError, match=rf"is not a knowledge base\. Give one of those in it: {tmp_path / 'kb'}$"):
        Store(tmp_path)
