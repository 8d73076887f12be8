"""Pages of real documents end to end: building, finding the gold pages, cropping, and the tokens that pages take.

    python -m benchmarks.page_documents [--text=layer|ocr|either] [--retrievers=bm25,dense_text] [--json]

ROUTERL_TEST_DATA names the real datasets: MMLongBench-Doc's 536 pages with 164 questions, and the 62 pages of VRAG's and
ViDoRAG's demos. Pages are found by their text: what the PDFs carry (210 pages have some), or what PP-OCR reads, some seconds
a page the first time. ColQwen's weights are not among the data; its scores are in benchmarks.maxsim.
"""

from __future__ import annotations

from routerl_jax.parallel.platform import tune_process

if __name__ == "__main__":
    tune_process()

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from benchmarks.passages import data_directory
from routerl_jax.core.files import write_json_lines
from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Passage
from routerl_jax.knowledge.base import KnowledgeBase
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.pages.build import OcrConfig, build_ocr
from routerl_jax.knowledge.pages.reading import PageConfig, Text
from routerl_jax.models.images import ImageProcessor, decode_image, encoded_image, image_size, smart_resize
from routerl_jax.models.regions import RegionRule, View, region

SETS = ("mmlongbench_doc", "vrag_demo_pages")
SIDE = 28  # pixels of an image token of Qwen2.5-VL
LIMITS = (256, 512, 768, 1024, 2048)  # image tokens that a page may take at most
_CROPPED = 60  # pages that are timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", choices=("layer", "ocr", "either"), default="layer")
    parser.add_argument("--retrievers", default="bm25,dense_text", help="kinds of the knowledge base of texts")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = pathlib.Path(scratch)
        corpus = listed(directory / "pages.jsonl")
        retrievers = [
            of_retriever(corpus, directory / name, name, arguments.text) for name in arguments.retrievers.split(",")
        ]
        result = {"retrievers": retrievers, "pages": of_pages([row["image"] for _, row in read_rows(corpus)])}
    print(json.dumps(result) if arguments.json else _table(result))


def listed(path: pathlib.Path) -> pathlib.Path:
    """All pages in one list, as knowledge bases of pages are built from; ids as the questions have them."""
    rows = []
    for name in SETS:
        directory = data_directory() / name
        for _, row in read_rows(directory / "pages.jsonl.gz"):
            image = str(directory / row["image"])
            rows.append({"id": row["id"], "image": image, "title": row["doc_id"], "text": row.get("text") or ""})
    write_json_lines(path, rows)
    return path


def asked() -> list[dict[str, Any]]:
    """The questions of both sets that have gold pages; ids without the set that some are written with."""
    rows = [row for name in SETS for _, row in read_rows(data_directory() / name / "questions_dev.jsonl.gz")]
    return [{**row, "supporting": [id.split(":")[-1] for id in row["supporting"]]} for row in rows if row["supporting"]]


def recalls(results: Sequence[Sequence[Passage]], gold: Iterable[Sequence[str]], k: int) -> float:
    """Mean share of the gold pages among the first k that were found."""
    shares = [
        len({passage.id for passage in passages[:k]} & set(ids)) / len(ids) for passages, ids in zip(results, gold)
    ]
    return float(np.mean(shares))


def of_retriever(corpus: pathlib.Path, directory: pathlib.Path, name: str, text: Text) -> dict[str, Any]:
    """Builds, and searches for every question, one at a time."""
    questions = asked()
    started = time.perf_counter()
    build_ocr(OcrConfig(corpus=str(corpus), retriever=name, pages=PageConfig(text=text)), directory, progress=False)
    built = time.perf_counter() - started
    kb: KnowledgeBase = load_kb(directory)
    kb.search(["warm"], 10)
    results, seconds = [], []
    for row in questions:
        started = time.perf_counter()
        results += kb.search([row["question"]], 10)
        seconds.append(time.perf_counter() - started)
    gold = [row["supporting"] for row in questions]
    with_text = {row["id"] for _, row in read_rows(corpus) if text != "layer" or row["text"].strip()}
    answerable = [(passages, ids) for passages, ids in zip(results, gold) if set(ids) <= with_text]
    return {
        "retriever": name,
        "text": text,
        "pages": len(kb),
        "build_seconds": built,
        "questions": len(questions),
        "recall@1": recalls(results, gold, 1),
        "recall@10": recalls(results, gold, 10),
        "with_text": {
            "questions": len(answerable),
            **{
                f"recall@{k}": recalls([passages for passages, _ in answerable], [ids for _, ids in answerable], k)
                for k in (1, 10)
            },
        },
        "search_ms": 1000 * statistics.median(seconds),
    }


def of_pages(images: Sequence[str]) -> dict[str, Any]:
    """Tokens of a page at several limits, and what a closer look at a ninth of it takes at 512 tokens a picture."""
    sizes = [image_size(image) for image in images]
    tokens = {}
    for limit in LIMITS:
        of_each = [_tokens(size, limit) for size in sizes]
        tokens[limit] = {"mean": float(np.mean(of_each)), "most": max(of_each)}
    processor = ImageProcessor(min_pixels=4 * SIDE**2, max_pixels=512 * SIDE**2, window=112)
    times: dict[str, list[float]] = {"crop_ms": [], "crop_to_patches_ms": [], "page_to_patches_ms": []}
    for image, size in list(zip(images, sizes))[:: max(len(images) // _CROPPED, 1)]:
        height, width = smart_resize(size[1], size[0], SIDE, processor.min_pixels, processor.max_pixels)
        box = (width / 3, height / 3, 2 * width / 3, 2 * height / 3)
        marks = [time.perf_counter()]
        cut = region(box, View(page=size, part=(0, 0, *size), frame=(width, height)), RegionRule())
        content, _ = encoded_image(decode_image(image).crop(cut))
        marks.append(time.perf_counter())
        processor(content)
        marks.append(time.perf_counter())
        processor(image)
        marks.append(time.perf_counter())
        for key, milliseconds in zip(times, np.diff(marks)):
            times[key].append(1000 * milliseconds)
    return {
        "pages": len(images),
        "tokens": tokens,
        **{key: statistics.median(milliseconds) for key, milliseconds in times.items()},
    }


def _tokens(size: tuple[int, int], limit: int) -> int:
    height, width = smart_resize(size[1], size[0], SIDE, 4 * SIDE**2, limit * SIDE**2)
    return height * width // SIDE**2


def _table(result: dict[str, Any]) -> str:
    lines = [
        "| found by | text | pages | build, s | questions | recall@1 | recall@10 | .. gold pages with text | search, ms |",
        "|---|---|---:|---:|---:|---:|---:|---|---:|",
    ]
    for row in result["retrievers"]:
        with_text = row["with_text"]
        lines.append(
            f"| {row['retriever']} | {row['text']} | {row['pages']} | {row['build_seconds']:.1f} | {row['questions']} | "
            f"{row['recall@1']:.3f} | {row['recall@10']:.3f} | {with_text['questions']}: {with_text['recall@1']:.3f}, "
            f"{with_text['recall@10']:.3f} | {row['search_ms']:.1f} |"
        )
    pages = result["pages"]
    lines += ["", "| most tokens a picture | tokens a page, mean | most |", "|---:|---:|---:|"]
    lines += [f"| {limit} | {row['mean']:.0f} | {row['most']} |" for limit, row in pages["tokens"].items()]
    lines += [
        "",
        f"A closer look at a ninth of a page, median of {_CROPPED}: {pages['crop_ms']:.1f} ms to cut, "
        f"{pages['crop_to_patches_ms']:.1f} ms to patches; a page to patches {pages['page_to_patches_ms']:.1f} ms.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
