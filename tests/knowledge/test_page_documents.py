"""Real pages from end to end: MMLongBench-Doc's 536 and the 62 of VRAG's and ViDoRAG's demos are built, found and cropped."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import page_documents
from benchmarks.page_documents import asked, listed, recalls
from routerl_jax.agents.observation import Viewer
from routerl_jax.core.rows import read_rows
from routerl_jax.core.types import Shown
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.pages.build import OcrConfig, PagesConfig, build_ocr, build_pages
from routerl_jax.knowledge.pages.kb import PageKB
from routerl_jax.knowledge.pages.reading import PageConfig
from routerl_jax.models.images import decode_image, image_size, smart_resize
from routerl_jax.models.regions import RegionRule
from tests import seeing
from tests.knowledge import late


@pytest.fixture
def corpus(tmp_path: pathlib.Path, shared_data: Any, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """The list of all 598."""
    directory = shared_data("mmlongbench_doc/pages.jsonl.gz").parents[1]
    monkeypatch.setattr(page_documents, "data_directory", lambda: directory)
    return listed(tmp_path / "pages.jsonl")


@pytest.mark.slow
def test_every_page_is_built_found_and_cropped(corpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """With a small random late-interaction model, whose ranking says nothing: k of all pages finds each of them once. A look at
    the middle ninth of each is pixel-exact beside a crop of the page's own file."""
    config = PagesConfig(corpus=str(corpus), encoder="late", precision="int8", index="maxsim")
    report = build_pages(config, tmp_path / "kb", progress=False, encoder=late.model())
    assert report.count == 598
    kb = load_kb(tmp_path / "kb", encoder=late.model())  # type: ignore[arg-type]
    assert isinstance(kb, PageKB)
    found = kb.search(["Which region grew fastest?"], 598)[0]
    files = {row["id"]: row["image"] for _, row in read_rows(corpus)}
    assert sorted(one.id for one in found) == sorted(files)
    assert kb.pictures([one.id for one in found]) == [one.image for one in found]
    images = seeing.image_tokens()
    for one in found:
        assert (
            pathlib.Path(one.image).read_bytes() == pathlib.Path(files[one.id]).read_bytes()
        )  # JPEGs stay as they are
        viewer = Viewer(images)
        viewer.see([Shown(passage=one.id, image=one.image)])
        wide, high = viewer.frame or (0, 0)
        size = image_size(one.image)
        assert smart_resize(size[1], size[0], 8, 64, 40 * 40) == (high, wide)
        crop = viewer.region((wide / 3, high / 3, 2 * wide / 3, 2 * high / 3), RegionRule(least=4))
        left, top, right, bottom = (int(side) for side in crop.box)
        outer = [size[0] / 3, size[1] / 3, 2 * size[0] / 3, 2 * size[1] / 3]
        np.testing.assert_allclose(crop.box, outer, atol=1.001)
        raw = np.asarray(Image.open(files[one.id]).convert("RGB"))[top:bottom, left:right]
        np.testing.assert_array_equal(np.asarray(decode_image(crop.image)), raw)


@pytest.mark.slow
def test_gold_pages_are_found_by_their_text(corpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """What the PDFs carry, in BM25: 210 pages have text. A random page would be right once in 210."""
    config = OcrConfig(corpus=str(corpus), retriever="bm25", pages=PageConfig(text="layer"))
    report = build_ocr(config, tmp_path / "kb", progress=False)
    assert (report.count, report.numbers["blank"]) == (210, 598 - 210)
    known = {row["id"] for _, row in read_rows(corpus) if row["text"].strip()}
    questions = [row for row in asked() if set(row["supporting"]) <= known]
    assert len(questions) > 30
    results = load_kb(tmp_path / "kb").search([row["question"] for row in questions], 10)
    gold = [row["supporting"] for row in questions]
    assert recalls(results, gold, 10) > 0.6
    assert recalls(results, gold, 1) > 0.25
