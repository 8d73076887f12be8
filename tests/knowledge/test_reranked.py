"""Cross-encoders against transformers, and knowledge bases whose best passages they score anew."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

from routerl_jax.core.text import one_line
from routerl_jax.core.types import Passage, TextAndImage
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.hybrid import RerankedKB, shared_reranker
from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.families.bert import CrossEncoder
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.training import config as schema
from routerl_jax.training.knowledge import kb_cache_directory, open_knowledge_bases
from tests.models.families import randomize

WORDS = [
    "<s>",
    "<pad>",
    "</s>",
    "<unk>",
    *("who", "wrote", "the", "novel", "nineteen", "eighty", "four"),
    *("orwell", "a", "farm", "of", "animals", "is", "by"),
]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "num_labels": 1,
    "pad_token_id": 1,
}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bert": (transformers.BertForSequenceClassification, {"max_position_embeddings": 24, "type_vocab_size": 2}),
    "roberta": (transformers.RobertaForSequenceClassification, {"max_position_embeddings": 26, "type_vocab_size": 1}),
    "xlm-roberta": (
        transformers.XLMRobertaForSequenceClassification,
        {"max_position_embeddings": 26, "type_vocab_size": 1},
    ),
}
PAIRS = [
    ("who wrote nineteen eighty four", "nineteen eighty four is a novel by orwell"),
    ("who wrote nineteen eighty four", "the farm"),
    ("orwell", ""),
    ("who", "a novel of animals " * 12),
    ("the animals " * 12, "is cut, too"),
]


def tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    """Words of a list; two texts joined as the kind has it."""
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    pair = "<s>:0 $A:0 </s>:0 $B:1 </s>:1" if kind == "bert" else "<s>:0 $A:0 </s>:0 </s>:0 $B:0 </s>:0"
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair=pair, special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def made(kind: str, directory: pathlib.Path, **changes: Any) -> Any:
    """A random model of transformers, saved with its tokenizer."""
    torch.manual_seed(0)
    model_class, settings = KINDS[kind]
    model = model_class(model_class.config_class(**{**SIZES, **settings, **changes})).eval()
    randomize(model)
    model.save_pretrained(directory)
    tokenizer(kind).save_pretrained(directory)
    return model


def theirs(model: Any, kind: str, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """transformers' logits, one pair at a time: 24 tokens, cut at the passage's end, else at the query's."""
    hf, scores = tokenizer(kind), []
    room = 24 - (3 if kind == "bert" else 4)
    for query, passage in pairs:
        asked = query.split()[:room]
        read = hf(
            [" ".join(asked)],
            [" ".join(passage.split()[: room - len(asked)])],  # lists: alone, an empty text would be none
            return_tensors="pt",
            return_token_type_ids=True,
        )
        ids = {"input_ids": read["input_ids"], "attention_mask": read["attention_mask"]}
        types = {"token_type_ids": read["token_type_ids"]} if kind == "bert" else {}
        with torch.no_grad():
            scores.append(model(**ids, **types).logits[0, 0].item())
    return np.array(scores, np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers(kind: str, tmp_path: pathlib.Path) -> None:
    """In batches of other pairs, with padding, and pairs that are cut. float32: 1e-5, of logits of about 1 that differ by some
    hundredths."""
    peer = made(kind, tmp_path / "peer")
    model = load_pretrained(str(tmp_path / "peer"))
    assert isinstance(model, CrossEncoder)
    expected = theirs(peer, kind, PAIRS)
    assert np.ptp(expected) > 0.005  # hundreds of times the tolerance
    np.testing.assert_allclose(model.score(PAIRS, batch_size=2), expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(model.score(PAIRS[::-1]), expected[::-1], atol=1e-5, rtol=1e-5)
    save_pretrained(model, tmp_path / "ours", model.tokenizer)
    again = KINDS[kind][0].from_pretrained(tmp_path / "ours").eval()
    np.testing.assert_allclose(theirs(again, kind, PAIRS), expected, atol=1e-6)


def test_what_is_no_reranker_is_refused(tmp_path: pathlib.Path) -> None:
    made("bert", tmp_path / "two", num_labels=2)
    with pytest.raises(UnsupportedModelError, match="2 labels are not supported; a reranker has one"):
        load_pretrained(str(tmp_path / "two"))
    made("bert", tmp_path / "one")
    with pytest.raises(ValueError, match="scores pairs of texts and has no vector of one"):
        shared_reranker(str(tmp_path / "one")).embed(["x"])
    made("bert", tmp_path / "plain").bert.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="is no cross-encoder with a tokenizer"):
        shared_reranker(str(tmp_path / "plain"))


# --- knowledge bases ---


class Words:
    """Scores by the words that both texts have."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[str, str]]] = []

    def score(self, pairs: Sequence[tuple[str, str]], /, *, batch_size: int = 32) -> np.ndarray:
        self.calls.append(list(pairs))
        return np.array([len(set(query.split()) & set(text.split())) for query, text in pairs], np.float32)


class Listed(KnowledgeBase):
    """Finds the same for every query, best first."""

    name, reads, cost = "listed", frozenset({"text", "image"}), 2.0
    texts = ("one", "two a", "a b", "b a", "a b c")

    def __len__(self) -> int:
        return len(self.texts)

    def _search(self, queries: list[Any], k: int) -> list[list[Passage]]:
        found = [Passage(id=str(i), title="", text=text, score=-float(i)) for i, text in enumerate(self.texts)]
        return [found[:k] for _ in queries]


def test_the_best_of_those_found_come_first() -> None:
    """All pairs in one call; ties as they were found; what lies deeper is not seen; a picture alone is left as it is."""
    words = Words()
    kb = RerankedKB(Listed(), words, depth=4)
    picture = TextAndImage(image=np.zeros((2, 2, 3), np.uint8))
    first, second, blank, seen = kb.search(["a b c", "two", " ", picture], k=2)
    assert [(one.id, one.score) for one in first] == [("2", 2.0), ("3", 2.0)]
    assert [one.id for one in second] == ["1", "0"]
    assert (blank, [one.id for one in seen]) == ([], ["0", "1"])
    assert [len(call) for call in words.calls] == [8]
    assert words.calls[0][1] == ("a b c", "two a")
    assert [one.id for one in kb.search(["a b c"], k=5)[0]] == ["4", "2", "3", "1", "0"]
    assert (len(kb), kb.name, kb.cost, kb.reads) == (5, "listed", 2.0, Listed.reads)
    with pytest.raises(ValueError, match="depth=0 must be at least 1"):
        RerankedKB(Listed(), words, depth=0)


def unsearchable() -> Any:
    class Tool:
        def search(self, queries: Any, k: int) -> Any:
            return [[] for _ in queries]

    return Tool()


def test_a_knowledge_base_of_a_run_is_reranked(tmp_path: pathlib.Path) -> None:
    """Atlas's by words (BM25), scored anew: its passages are those of the score's order among the first `rerank_depth`."""
    made("bert", tmp_path / "reranker")
    plain = schema.KnowledgeConfig(source="atlas/text", kind="bm25")
    spec = dataclasses.replace(plain, reranker=str(tmp_path / "reranker"), rerank_depth=6)
    assert kb_cache_directory("text", plain) == kb_cache_directory("text", spec)
    before = open_knowledge_bases({"text": plain}, progress=False)["text"].search(["What is the capital of Ghana?"], 6)
    after = open_knowledge_bases({"text": spec}, progress=False)["text"].search(["What is the capital of Ghana?"], 3)
    reranker = shared_reranker(str(tmp_path / "reranker"))
    scores = reranker.score([("What is the capital of Ghana?", one_line(one)) for one in before[0]])
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[:3]
    assert [one.id for one in after[0]] == [before[0][i].id for i in order]
    np.testing.assert_allclose([one.score for one in after[0]], scores[order], atol=1e-5)
    with pytest.raises(ValueError, match="rerank_depth=6: there is no reranker"):
        dataclasses.replace(spec, reranker="")
    tool = schema.KnowledgeConfig(
        kind="tool", source="tests.knowledge.test_reranked:unsearchable", reranker=str(tmp_path / "reranker")
    )
    with pytest.raises(ValueError, match=r"config\.knowledge\.web\.reranker: a Tool is no KnowledgeBase"):
        open_knowledge_bases({"web": tool}, progress=False)
