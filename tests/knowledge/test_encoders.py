"""Which encoder a knowledge base was built with: found from any directory, and noticed when its files were replaced."""

import json
import pathlib
import shutil

import numpy as np
import pytest
import torch
import transformers

from routerl_jax.knowledge import encoders
from routerl_jax.knowledge.build import BuildConfig, build_from_passages
from routerl_jax.knowledge.builds import BuildReport
from routerl_jax.knowledge.dense import DenseKB
from routerl_jax.knowledge.encoders import shared_encoder
from routerl_jax.knowledge.load import load_kb
from routerl_jax.models.pretrained import resolve
from routerl_jax.parallel.mesh import single_device_mesh
from tests.knowledge.helpers import make_passages


def write_encoder(directory: pathlib.Path, seed: int, hidden_size: int = 16) -> None:
    """A tiny BERT with random weights and MiniLM's tokenizer."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        hidden_size=hidden_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        shutil.copy(resolve("all-MiniLM-L6-v2") / name, directory)


def build(directory: pathlib.Path, encoder: str, **changes: object) -> BuildReport:
    encoders._loaded.clear()  # as in a new process
    config = BuildConfig(encoder=encoder, index="exact", **changes)  # type: ignore[arg-type]
    return build_from_passages(make_passages(5), config, directory, progress=False)


@pytest.fixture
def home(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.setattr(encoders, "_loaded", {})
    monkeypatch.setattr(encoders, "local_mesh", lambda mesh: single_device_mesh())  # quicker than all eight
    monkeypatch.chdir(tmp_path)
    write_encoder(tmp_path / "enc", seed=0)
    return tmp_path


def test_a_relative_directory_is_found_from_anywhere(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build(home / "kb", "./enc").numbers["embedded"] == 5
    manifest = json.loads((home / "kb" / "kb.json").read_text())
    assert manifest["embedding"]["encoder"] == manifest["config"]["encoder"] == str(home / "enc")
    monkeypatch.chdir("/")
    encoders._loaded.clear()
    assert len(load_kb(home / "kb").search(["x"], 2)[0]) == 2
    assert build(home / "kb", str(home / "enc")).numbers["embedded"] == 0  # the same build, spelled otherwise


@pytest.mark.parametrize("replaced", ["weights", "tokenizer"])
def test_replaced_files_are_noticed(home: pathlib.Path, replaced: str) -> None:
    build(home / "kb", "enc")
    shutil.copytree(home / "enc", home / "old")
    before = load_kb(home / "kb").search(["x"], 3)
    if replaced == "weights":
        write_encoder(home / "enc", seed=1)
    else:
        (home / "enc" / "vocab.txt").write_text("other\n")

    encoders._loaded.clear()
    message = rf"'{home}/enc' is not what .*kb was built with: its weights or tokenizer .*delete .*kb"
    with pytest.raises(ValueError, match=message):
        load_kb(home / "kb")
    with pytest.raises(ValueError, match="is not what"):
        load_kb(home / "kb", encoder=shared_encoder("enc"))
    assert load_kb(home / "kb", encoder="old").search(["x"], 3) == before

    with pytest.raises(ValueError, match="of another corpus, encoder or configuration"):
        build(home / "kb", "enc")
    assert build(home / "kb", "enc", overwrite=True).numbers["embedded"] == 5
    kb = load_kb(home / "kb")
    assert (kb.search(["x"], 3) == before) == (replaced == "tokenizer")  # whose vocab.txt is not read beside the .json


def test_a_killed_build_is_not_continued_with_other_weights(
    home: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("routerl_jax.knowledge.writer.StoreWriter.commit", crash)
        with pytest.raises(KeyboardInterrupt):
            build(home / "kb", "enc")
    write_encoder(home / "enc", seed=1)
    assert build(home / "kb", "enc").numbers["embedded"] == 5
    found = load_kb(home / "kb").store.embeddings.read(0, 5)  # type: ignore[attr-defined]
    np.testing.assert_array_equal(found, shared_encoder("enc").embed(texts()))


def write_prompts(directory: pathlib.Path, **prompts: str) -> None:
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))


def texts() -> list[str]:
    return [f"{p.title}\n{p.text}" for p in make_passages(5)]


def open_kb(directory: pathlib.Path) -> DenseKB:
    kb = load_kb(directory)
    assert isinstance(kb, DenseKB)
    return kb


def assert_embedded(actual: np.ndarray, wanted: np.ndarray) -> None:
    """The same text's vectors, whatever batches they were computed in (another text's differ by some tenths)."""
    np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_queries_and_passages_get_the_encoder_s_own_prefixes(home: pathlib.Path) -> None:
    write_prompts(home / "enc", query="question: ", passage="answer: ")
    build(home / "kb", "enc")
    kb, encoder = open_kb(home / "kb"), shared_encoder("enc")
    assert kb.store.manifest.embedding is not None
    assert kb.store.manifest.embedding.query_prefix == "question: "
    np.testing.assert_array_equal(kb.store.embeddings.read(0, 5), encoder.embed([f"answer: {t}" for t in texts()]))
    assert_embedded(kb.embed_queries(["x"]), encoder.embed(["question: x"]))

    build(home / "plain", "enc", query_prefix="", passage_prefix="mine: ")
    kb = open_kb(home / "plain")
    np.testing.assert_array_equal(kb.store.embeddings.read(0, 5), encoder.embed([f"mine: {t}" for t in texts()]))
    assert_embedded(kb.embed_queries(["x"]), encoder.embed(["x"]))


def test_a_knowledge_base_keeps_the_prefixes_it_was_built_with(home: pathlib.Path) -> None:
    """A prompt that changes later changes neither what is there nor, unseen, what is built there again."""
    write_prompts(home / "enc", query="old: ")
    build(home / "kb", "enc")
    write_prompts(home / "enc", query="new: ")
    encoders._loaded.clear()
    assert_embedded(open_kb(home / "kb").embed_queries(["x"]), shared_encoder("enc").embed(["old: x"]))
    with pytest.raises(ValueError, match="of another corpus, encoder or configuration"):
        build(home / "kb", "enc")


def test_an_encoder_of_its_own_for_queries(home: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_encoder(home / "asks", seed=1)
    build(home / "kb", "enc", query_encoder="asks")
    manifest = json.loads((home / "kb" / "kb.json").read_text())["embedding"]
    assert (manifest["encoder"], manifest["query_encoder"]) == (str(home / "enc"), str(home / "asks"))
    assert manifest["digest"] != manifest["query_digest"] != ""
    monkeypatch.chdir("/")
    kb = open_kb(home / "kb")
    np.testing.assert_array_equal(kb.store.embeddings.read(0, 5), shared_encoder(f"{home}/enc").embed(texts()))
    assert_embedded(kb.embed_queries(["x"]), shared_encoder(f"{home}/asks").embed(["x"]))
    with pytest.raises(ValueError, match=r"enc' is not what .* than kb\.json says of '.*asks'"):
        load_kb(home / "kb", encoder=f"{home}/enc")


def test_encoders_that_do_not_belong_together(home: pathlib.Path) -> None:
    write_encoder(home / "wide", seed=0, hidden_size=24)
    message = r"query_encoder='.*wide' gives vectors of width 24, encoder='.*enc' of width 16"
    with pytest.raises(ValueError, match=message):
        build(home / "kb", "enc", query_encoder="wide")


def test_the_same_files_under_a_name_that_means_another_pooling(home: pathlib.Path) -> None:
    """Contriever's vectors are not brought to unit length, though none of its files says so."""
    build(home / "kb", "enc")
    shutil.copytree(home / "enc", home / "contriever")
    with pytest.raises(ValueError, match="contriever' is not what"):
        load_kb(home / "kb", encoder="contriever")
