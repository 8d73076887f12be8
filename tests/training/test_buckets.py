"""What a run reads and builds may lie in a bucket: knowledge bases, weights, questions."""

import json
import pathlib

import pytest
from flax import nnx

from routerl_jax.core import buckets
from routerl_jax.core.types import Passage
from routerl_jax.data.readers import open_dataset
from routerl_jax.knowledge.hybrid import HybridConfig, build_hybrid
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.store import built_at
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.parallel.mirrors import mirrored
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import open_knowledge_bases
from tests import tiny
from tests.buckets import bucket  # noqa: F401 (a fixture)
from tests.knowledge.helpers import build_words

TEXTS = ("Accra is the capital of Ghana.", "Lome is the capital of Togo.", "Bread needs flour and water.")


def rows() -> list[dict[str, str]]:
    return [{"id": str(i), "title": f"t{i}", "text": text} for i, text in enumerate(TEXTS)]


def found(kb, query: str) -> str:
    return kb.search([query], 1)[0][0].id


def test_a_knowledge_base_is_built_in_a_bucket_once_and_read_from_it(
    bucket: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
) -> None:
    pytest.importorskip("bm25s")
    buckets.write_object(f"{bucket}/corpus.jsonl", "".join(json.dumps(row) + "\n" for row in rows()).encode())
    spec = KnowledgeConfig(source=f"{bucket}/corpus.jsonl", kind="bm25", directory=f"{bucket}/kb/words", encoder="")
    assert built_at(spec.directory) is None
    kb = open_knowledge_bases({"text": spec}, progress=False)["text"]
    assert found(kb, "capital of Togo") == "1"
    manifest = json.loads(buckets.read_object(f"{bucket}/kb/words/kb.json") or b"")
    assert manifest["corpus"] == f"{bucket}/corpus.jsonl"
    built = set(buckets.listing(f"{bucket}/kb/words"))
    # on another machine, without what it was built from
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "other"))
    again = KnowledgeConfig(directory=f"{bucket}/kb/words", kind="bm25", encoder="")
    assert found(open_knowledge_bases({"text": again}, progress=False)["text"], "flour") == "2"
    assert set(buckets.listing(f"{bucket}/kb/words")) == built
    with pytest.raises(ValueError, match="was built with another: 'bm25'"):
        open_knowledge_bases({"text": KnowledgeConfig(directory=f"{bucket}/kb/words", kind="graph")}, progress=False)


def test_members_that_lie_beside_a_hybrid_are_found_beside_it(bucket: str, tmp_path: pathlib.Path) -> None:  # noqa: F811
    pytest.importorskip("bm25s")
    passages = [Passage(**row) for row in rows()]
    with mirrored(f"{bucket}/kbs") as path:
        build_words(passages[:2], path / "capitals")
        build_words(passages[2:], path / "bread")
        build_hybrid(HybridConfig(members=(str(path / "capitals"), str(path / "bread"))), path / "both")
    kb = load_kb(f"{bucket}/kbs/both")
    assert [found(kb, query) for query in ("capital of Togo", "flour")] == ["1", "2"]


def test_weights_and_questions(bucket: str) -> None:  # noqa: F811
    model = tiny.model()
    with mirrored(f"{bucket}/policy") as path:
        save_pretrained(model, path)
    loaded = load_pretrained(f"{bucket}/policy")
    leaves = [dict(nnx.to_flat_state(nnx.state(m, nnx.Param))) for m in (model, loaded)]
    assert leaves[0].keys() == leaves[1].keys()
    assert all((leaves[0][key].get_value() == leaves[1][key].get_value()).all() for key in leaves[0])
    with pytest.raises(ValueError, match=f"{bucket}/nothing: there is nothing there"):
        load_pretrained(f"{bucket}/nothing")
    question = {"id": "q", "question": "Capital of Ghana?", "golden_answers": ["Accra"]}
    buckets.write_object(f"{bucket}/test.jsonl", json.dumps(question).encode())
    examples = open_dataset(f"{bucket}/test.jsonl")
    assert [examples[0].question, *examples[0].answers] == ["Capital of Ghana?", "Accra"]
