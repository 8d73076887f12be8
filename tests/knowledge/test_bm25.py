"""BM25 against the formula by hand, and against independent figures on real corpora."""

import dataclasses
import json
import math
import pathlib
import re
from collections import Counter

import numpy as np
import pytest

from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.bm25 import Bm25Config, Bm25KB, Words, build_bm25
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.update import update
from tests.knowledge.helpers import build_words, make_passages, write_jsonl

PLAIN = Words(split="latin", stemmer="", stopwords="", k1=0.9, b=0.4)
TEXTS = ["the cat sat", "the cat and the other cat", "dogs bark", "a dog barks at the cat", "nothing here to see"]


def passages() -> list[Passage]:
    return [Passage(id=f"d{i}", title="", text=text) for i, text in enumerate(TEXTS)]


def by_hand(query: str, words: Words) -> dict[str, float]:
    """Lucene's BM25 (Kamphuis et al. 2020, table 1), in float64."""
    split = [re.findall(r"\b\w\w+\b", text) for text in TEXTS]
    average = sum(map(len, split)) / len(split)
    scores: dict[str, float] = {}
    for term in re.findall(r"\b\w\w+\b", query.lower()):
        holders = sum(term in text for text in split)
        idf = math.log(1 + (len(split) - holders + 0.5) / (holders + 0.5))
        for i, text in enumerate(split):
            count = Counter(text)[term]
            if count:
                norm = words.k1 * (1 - words.b + words.b * len(text) / average)
                scores[f"d{i}"] = scores.get(f"d{i}", 0.0) + idf * count / (count + norm)
    return scores


@pytest.mark.parametrize("query", ["cat", "The cat barks, the CAT!", "bark dogs", "zebra", "!"])
def test_formula(tmp_path: pathlib.Path, query: str) -> None:
    build_words(passages(), tmp_path / "kb", Bm25Config(words=PLAIN))
    kb = load_kb(tmp_path / "kb")
    expected = by_hand(query, PLAIN)
    found = kb.search([query], 10)[0]
    assert {p.id for p in found} == set(expected)
    np.testing.assert_allclose([p.score for p in found], [expected[p.id] for p in found], rtol=1e-5)  # float32
    assert [p.score for p in found] == sorted((p.score for p in found), reverse=True)
    assert kb.search([query], 1)[0] == found[:1]


def test_a_build_logs_nothing(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """bm25s logs its steps, which a program's users would see between the bars."""
    build_words(passages(), tmp_path / "kb")
    assert not [record for record in caplog.records if record.name == "bm25s"]


def test_stems_stopwords_and_ties(tmp_path: pathlib.Path) -> None:
    same = [Passage(id=str(i), title="Dogs", text="barking") for i in range(5)]
    build_words([*passages(), *same], tmp_path / "kb")
    kb = load_kb(tmp_path / "kb")
    assert isinstance(kb, Bm25KB)
    assert kb.cost < 1
    assert [p.id for p in kb.search(["the DOG barked"], 4)[0]] == ["d2", "0", "1", "2"]
    assert kb.search(["the"], 4) == [[]]
    with pytest.raises(ValueError, match="has no vectors: leave out index and encoder"):
        load_kb(tmp_path / "kb", index="exact")


def test_build_again_and_damage(tmp_path: pathlib.Path) -> None:
    rows = [{"id": p.id, "title": p.title, "text": p.text} for p in make_passages(40)]
    config = Bm25Config(corpus=str(write_jsonl(tmp_path / "c.jsonl", rows)))
    report = build_bm25(config, tmp_path / "kb", progress=False)
    assert (report.count, report.name) == (40, "kb")
    assert "40; " in str(report)
    stamp = (tmp_path / "kb" / "kb.json").stat().st_mtime_ns
    build_bm25(config, tmp_path / "kb", progress=False)
    assert (tmp_path / "kb" / "kb.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match=r"already holds a knowledge base"):
        build_bm25(Bm25Config(corpus=config.corpus, words=PLAIN), tmp_path / "kb", progress=False)
    manifest = json.loads((tmp_path / "kb" / "kb.json").read_text())
    assert manifest["config"] == {"kind": "bm25"}
    (tmp_path / "kb" / "index" / "data.csc.index.npy").unlink()
    with pytest.raises(ValueError, match=r"data\.csc\.index\.npy is missing\. Rebuild it: .*build_kb\.py:bm25"):
        load_kb(tmp_path / "kb")
    (tmp_path / "kb" / "sizes.json").unlink()  # an earlier version's
    with pytest.raises(ValueError, match=r"index is damaged or missing .*Rebuild it: .*build_kb\.py:bm25"):
        load_kb(tmp_path / "kb")


@pytest.mark.parametrize(
    ("query", "best"),
    [
        ("上海", ["shanghai"]),
        ("大阪の市長", ["osaka"]),
        ("กรุงเทพ", ["bangkok"]),
        ("தமிழ்", ["tamil"]),
        ("हिन्दी", ["hindi"]),
        ("서울", ["seoul"]),
        ("Group B", ["b", "a"]),
        ("C#", ["csharp"]),
        ("7", ["seven"]),
        ("Ｇｒｏｕｐ Ｂ", ["b", "a"]),
        ("Cafe\u0301 Noir", ["cafe"]),
    ],
)
def test_words_of_any_script_and_length_are_found(tmp_path: pathlib.Path, query: str, best: list[str]) -> None:
    texts = {
        "shanghai": "上海是中国的直辖市。",
        "osaka": "大阪の市長は誰ですか。",
        "bangkok": "กรุงเทพมหานครเป็นเมืองหลวง",
        "tamil": "தமிழ் ஒரு மொழி",
        "hindi": "हिन्दी एक भाषा है",
        "seoul": "서울 대한민국의 수도",
        "a": "Team Group A plays first.",
        "b": "Team Group B plays next.",
        "csharp": "C# is a language.",
        "seven": "7 is prime.",
        "cafe": "The Café Noir opened late.",
    }
    build_words([Passage(id=id, title="", text=text) for id, text in texts.items()], tmp_path / "kb")
    assert [p.id for p in load_kb(tmp_path / "kb").search([query], len(best))[0]] == best


def test_an_index_from_before_keeps_its_words_and_is_not_taken_for_a_new_one(tmp_path: pathlib.Path) -> None:
    """It knows no one-letter words: its manifest does not say how its texts were split."""
    rows = [{"id": name, "text": f"Group {name} plays."} for name in "ABC"]
    config = Bm25Config(corpus=str(write_jsonl(tmp_path / "c.jsonl", rows)))
    old = tmp_path / "old"
    build_bm25(dataclasses.replace(config, words=Words(split="latin")), old, progress=False)
    manifest = json.loads((old / "kb.json").read_text())
    del manifest["index"]["split"], manifest["config"]["words.split"]
    (old / "kb.json").write_text(json.dumps(manifest))
    assert [p.id for p in load_kb(old).search(["group C"], 1)[0]] == ["A"]
    update(old, add=[Passage(id="D", title="", text="Group C")])
    with pytest.raises(ValueError, match=r"already holds a knowledge base"):
        build_bm25(config, old, progress=False)
    build_bm25(dataclasses.replace(config, overwrite=True), old, progress=False)
    assert [p.id for p in load_kb(old).search(["group C"], 1)[0]] == ["C"]


def test_rows_of_tables(tmp_path: pathlib.Path) -> None:
    table = {
        "id": "r",
        "title": "Rivers",
        "header": ["River", "Length"],
        "rows": [["Volta", "1,500"], ["Niger", "4,180"]],
    }
    (tmp_path / "tables.jsonl").write_text(json.dumps(table) + "\n")
    build_bm25(Bm25Config(corpus=str(tmp_path / "tables.jsonl")), tmp_path / "kb", progress=False)
    kb = load_kb(str(tmp_path / "kb"))
    (found,) = kb.search(["length of the Niger"], 1)
    assert [(passage.id, passage.title) for passage in found] == [("r#1", "Rivers")]
    assert "4,180" in found[0].text


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"^b=1.5 must be in \[0, 1\]"):
        Words(b=1.5)
    with pytest.raises(ValueError, match="not one of lucene"):
        Words(method="tfidf")
    with pytest.raises(ValueError, match="split='spaces' is not one of any, latin"):
        Words(split="spaces")
    with pytest.raises(ValueError, match="stemmer='klingon' is not one of"):
        Words(stemmer="klingon").tokenizer()


# Recall@5 of the development questions, with stems and stop words, from the data's own manifest (bm25s alone).
REFERENCE = {"hotpotqa": 0.75, "2wikimultihopqa": 0.6639, "musique": 0.4848}


@pytest.mark.parametrize("name", ["musique"])
def test_real_questions(shared_data, tmp_path: pathlib.Path, name: str) -> None:
    corpus = str(shared_data(f"{name}/corpus.jsonl.gz"))
    build_bm25(Bm25Config(corpus=corpus, words=Words(split="latin")), tmp_path / "kb", progress=False)
    kb = load_kb(tmp_path / "kb")
    rows = [row for _, row in read_rows(shared_data(f"{name}/questions_dev.jsonl.gz")) if row["supporting"]]
    found = kb.search([row["question"] for row in rows], 5)
    shares = [
        len({p.id for p in passages} & set(row["supporting"])) / len(set(row["supporting"]))
        for row, passages in zip(rows, found)
    ]
    assert np.mean(shares) == pytest.approx(REFERENCE[name], abs=2e-3)  # ties at rank 5 may fall the other way
