"""One small row as each data set writes it, made for tests, with the file it would stand in."""

from __future__ import annotations

import csv
import io
import json
import pathlib
from typing import Any

import pyarrow
import pyarrow.parquet
from PIL import Image

from routerl_jax.core.types import Example
from routerl_jax.data.readers import FileExamples

HOTPOT = {
    "_id": "5a8b57f2",
    "question": "In which country is the birthplace of Ada Pell?",
    "answer": "Norway",
    "supporting_facts": [["Ada Pell", 0], ["Moss Town", 1]],
    "context": [
        ["Ada Pell", ["Ada Pell was born in Moss Town.", " She sails."]],
        ["Elsewhere", ["Elsewhere is a hamlet."]],
        ["Moss Town", ["Moss Town lies on a fjord.", " It is in Norway."]],
    ],
    "type": "bridge",
    "level": "hard",
}
TWO_WIKI = {
    "_id": "0ab1",
    "question": "Who is the mother of the director of film Grey Gate?",
    "answer": "Jane Roe",
    "answer_id": "Q77",
    "type": "compositional",
    "supporting_facts": [["Grey Gate", 0], ["John Roe", 0]],
    "context": [
        ["Grey Gate", ["Grey Gate is a film by John Roe.", "It was made in 1931."]],
        ["John Roe", ["John Roe was the son of Jane Roe."]],
        ["Green Gate", ["Green Gate is a farm."]],
    ],
    "evidences": [["Grey Gate", "director", "John Roe"], ["John Roe", "mother", "Jane Roe"]],
    "entity_ids": "Q1_Q2",
}
ALIASES = [
    {"Q_id": "Q5", "aliases": ["nobody"], "demonyms": []},
    {"Q_id": "Q77", "aliases": ["Jane R. Roe", "Jane Roe"], "demonyms": ["Roean"]},
]
MUSIQUE = {
    "id": "2hop__12_34",
    "question": "Who governs the town where the Blue Mill stands?",
    "answer": "Kim Ott",
    "answer_aliases": ["K. Ott"],
    "answerable": True,
    "paragraphs": [
        {"idx": 0, "title": "Mills", "paragraph_text": "Mills grind.", "is_supporting": False},
        {"idx": 1, "title": "Blue Mill", "paragraph_text": "The Blue Mill stands in Ems.", "is_supporting": True},
        {"idx": 2, "title": "Ems", "paragraph_text": "Ems is governed by Kim Ott.", "is_supporting": True},
    ],
    "question_decomposition": [
        {"id": 12, "question": "Blue Mill >> located in", "answer": "Ems", "paragraph_support_idx": 1},
        {"id": 34, "question": "Who governs #1 ?", "answer": "Kim Ott", "paragraph_support_idx": 2},
    ],
}
POPQA = {
    "id": 4222362,
    "subj": "Ann Doe",
    "prop": "occupation",
    "obj": "politician",
    "s_aliases": json.dumps(["Anna Doe"]),
    "o_aliases": json.dumps(["political leader", "polit."]),
    "s_pop": 142,
    "o_pop": 25692,
    "question": "What is Ann Doe's occupation?",
    "possible_answers": json.dumps(["politician", "political leader", "polit."]),
}
NQ_REAR = {
    "question": "who sings the last song",
    "reference": ["Bo Lee", "Bo"],
    "contexts": [
        {"title": "Songs", "text": "Bo Lee sings the last song.", "is_supporting": True},
        {"title": "Other", "text": "Nobody sings.", "is_supporting": False},
    ],
}
R1_SEARCHER = {"idx": "hotpot_17", "question": "Which is older?", "answer": "the oak", "pred_anses": ["oak", "elm"]}
PROMPT = "Think inside <think>. For example, Question: what? Then answer.\nQuestion: Who wrote Tin Boats?\n"
VERL = {
    "data_source": "nq",
    "prompt": [{"role": "user", "content": PROMPT}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["Lou Ash", "L. Ash"]}},
    "extra_info": {"index": 3, "split": "train", "supporting_facts": '[["Tin Boats", 0]]'},
}
FVQA = {  # as lmms-lab/FVQA; MMSearch-R1's mini_data.pq has neither of the last two
    "prompt": [{"content": "Which ship is shown?", "role": "user"}],
    "images": [{"bytes": b"", "path": None}],
    "reward_model": {"candidate_answers": '["Grey Gull", "the gull", 1931]', "ground_truth": "gull", "style": "rule"},
    "data_source": "mmsearch_r1/fvqa_train",
    "image_urls": None,
    "data_id": "fvqa_train_67",
    "category": "search_required",
}
MMSEARCH = {
    "sample_id": "news_001",
    "query": "When was this bridge closed?",
    "query_image": {"bytes": b"", "path": None},
    "image_search_result": {"bytes": b"", "path": None},
    "area": "news",
    "subfield": "paris",
    "timestamp": "2024-07-15",
    "gt_requery": "blue bridge closure date",
    "gt_answer": "4 July 2024",
    "alternative_gt_answers": ["July 4, 2024"],
}
SIMPLEVQA = {
    "data_id": 7,
    "image_description": "A flower.",
    "language": "EN",
    "question": "Which family is this flower of?",
    "answer": "Rosaceae",
    "original_category": "biology",
    "source": "CCSimpleQA",
    "atomic_question": "What is this flower?",
    "atomic_fact": "dog rose",
    "vqa_category": "object",
    "image": "",
}
LIVEVQA: dict[str, Any] = {
    "id": "0_20250507",
    "img_path": "cnn_1.jpg",
    "level1_qa": {
        "question": "Based on the provided image, what event is taking place?",
        "question_type": "event",
        "options": ["A. a regatta", "B. a fair"],
        "Ground_Truth": "A",
        "Ground_Truth_List": ["a regatta", "boat race"],
        "img_path": "cnn_1.jpg",
        "img_url": "https://example.org/1.jpg?c=16x9",
    },
    "level2_qa": {
        "question": "Who won it?",
        "options": ["A. Ann", "B. Bo"],
        "Ground_Truth": "B",
        "Ground_Truth_List": ["Bo"],
        "img_path": "cnn_1.jpg",
    },
    "source": "CNN World",
    "time": "2024-10-02T01:38:01.679Z",
}
DYNVQA = {
    "image_url": "https://example.org/image_1.jpeg",
    "question": "How many people have landed on this planet?",
    "question_id": "en34",
    "answer": [["nobody yet", 0], None, "zero"],
    "gloden_query": "How many people have landed on Mars?",
}

VIDOSEEK = {
    "uid": "04d8_2",
    "query": "Which mill grinds most?",
    "reference_answer": "The Blue Mill",
    "meta_info": {
        "file_name": "mills.pdf",
        "reference_page": [11, 3],
        "source_type": "2d_layout",
        "query_type": "logic_reasoning",
    },
}
VRAG = {  # what VRAG-RL's converter writes
    "data_source": "slidevqa_test",
    "prompt": [
        {"role": "user", "content": "Answer. For example, <answer> x </answer>. Question: Which mill grinds most?"}
    ],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "The Blue Mill"},
    "extra_info": {
        "split": "test",
        "index": 4,
        "answer": "The Blue Mill",
        "question": "Which mill grinds most?",
        "content_type": "SingleSpan",
        "reason_type": "MultiHop",
        "file_name": "mills_95.pdf",
        "reference_page": [5, 7],
    },
}
SLIDEVQA = {
    "deck_name": "mills-of-ems",
    "deck_url": "https://example.org/mills",
    "image_urls": [f"https://example.org/95/mills-{number}-1024.jpg" for number in range(1, 21)],
    "qa_id": 17,
    "question": "How many mills are left?",
    "answer": "4",
    "arithmetic_expression": "9-5",
    "evidence_pages": [2, 6],
    "reasoning_type": "Multi-Hop",
    "answer_type": "Non-Span",
}
MMLONGBENCH = {
    "doc_id": "mills.v2.pdf",
    "doc_type": "Tutorial/Workshop",
    "question": "Which mills are left? ",
    "answer": "['Blue Mill', 'Tin Mill']",
    "evidence_pages": "[8, 12, 8]",
    "evidence_sources": "['Chart', 'Generalized-text (Layout)', 'Pure-text (Plain-text)']",
    "answer_format": "List",
}
HYBRIDQA: dict[str, Any] = {  # dev.traced.json of HybridQA and OTT-QA; dev.json lacks the last
    "question_id": "2b6359ed",
    "question": "Who keeps the mill that grinds most ?",
    "table_id": "Mills_of_Ems_0",
    "answer-text": "Kim Ott",
    "question_postag": "WP VBZ DT NN",
    "answer-node": [
        ["Blue Mill", [0, 1], "/wiki/Blue_Mill", "passage"],
        ["Kim Ott", [1, 2], None, "table"],
        ["Blue Mill", [3, 1], "/wiki/Blue_Mill", "passage"],
    ],
}
OPEN_WIKITABLE: dict[str, Any] = {
    "question_id": "test_7",
    "original_table_id": "table_1_2_3",
    "question": "How many mills of Ems are blue?",
    "sql": "SELECT COUNT(mill) FROM table_1_2_3",
    "answer": [2],
    "hard_positive_idx": [41],
    "positive_idx": [42],
    "negative_idx": [7, 8],
    "dataset": "WikiSQL",
}
INFOSEEK: dict[str, Any] = {
    "data_id": "infoseek_val_00000001",
    "image_id": "oven_04951567",
    "question": "Where is this mill?",
    "answer": ["Ems"],
    "answer_eval": ["Ems", "Bad Ems"],
}
WEBQA: dict[str, Any] = {
    "question": "How many sails has the Blue Mill?",
    "answer": ["It has four sails."],
    "image_id": "30323912",
}


def png(colour: str = "red", size: int = 3) -> bytes:
    """A picture of one colour, encoded."""
    buffer = io.BytesIO()
    Image.new("RGB", (size, size), colour).save(buffer, format="PNG")
    return buffer.getvalue()


def as_fvqa(row: dict[str, Any], pictures: pathlib.Path, source: str) -> dict[str, Any]:
    """A row of `shared/data`, whose picture lies in a directory, in the columns in which FVQA was released."""
    return {
        "prompt": [{"content": row["question"], "role": "user"}],
        "images": [{"bytes": (pictures / row["image"]).read_bytes(), "path": None}],
        "reward_model": {
            "candidate_answers": json.dumps(row["golden_answers"][1:]),
            "ground_truth": row["golden_answers"][0],
            "style": "rule",
        },
        "data_source": source,
        "image_urls": None,
        "data_id": row["id"],
        "category": row["type"],
    }


def as_json(path: pathlib.Path, *rows: dict[str, Any]) -> pathlib.Path:
    """A list, or a row per line in a .jsonl file."""
    lines = path.suffix == ".jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if lines else json.dumps(rows))
    return path


def as_table(path: pathlib.Path, *rows: dict[str, Any]) -> pathlib.Path:
    """A .csv or .tsv file as pandas writes it."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    return path


def as_parquet(path: pathlib.Path, *rows: dict[str, Any]) -> pathlib.Path:
    """A .parquet file."""
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def only(path: pathlib.Path, form: str = "") -> Example:
    """The question of a file with one."""
    examples = FileExamples(path, form)
    assert len(examples) == 1
    return examples[0]
