"""Documents to pages, OCR, and knowledge bases of both kinds from end to end, on documents made here and real ones."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routerl_jax.core.types import TextAndImage
from routerl_jax.knowledge.builds import KB_BUILDERS, build, changes, check_kb
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.pages import build as pages_build
from routerl_jax.knowledge.pages.build import OcrConfig, PagesConfig, build_ocr, build_pages
from routerl_jax.knowledge.pages.kb import OcrKB, PageKB
from routerl_jax.knowledge.pages.reading import (
    Ocr,
    Page,
    PageConfig,
    PageWriter,
    Problems,
    Reader,
    documents,
    read_pages,
)
from routerl_jax.knowledge.picture_files import PictureFiles, PictureJournal
from routerl_jax.knowledge.writer import StoreWriter
from tests.knowledge import killed_pages, late
from tests.knowledge.helpers import files_of, write_jsonl
from tests.programs import finish, start

pdf = pytest.importorskip("pypdfium2", reason="pypdfium2 is not installed (the extra pages)")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROUTERL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A PDF of three pages and twelve pictures, with files among them that are no documents."""
    root = tmp_path_factory.mktemp("documents")
    late.write_pdf(root / "deck.pdf", ["Hello world", "Second page", "Third one"])
    for i in range(12):
        late.write_picture(root / "slides" / f"slide{i}.png", i)
    (root / "notes.txt").write_text("not a page")
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x.png").write_bytes(b"")
    return root


def test_pages_of_a_directory(corpus: pathlib.Path) -> None:
    reader = Reader(dpi=72)
    pages = list(read_pages(corpus, reader, Problems("raise")))
    slides = [f"slides/slide{i}.png#1" for i in range(12)]
    assert [page.id for page in pages] == ["deck.pdf#1", "deck.pdf#2", "deck.pdf#3", *slides]
    assert [page.title for page in pages[2:4]] == ["deck, page 3", "slide0"]
    assert reader.text(pages[1]) == "Second page"
    assert reader.picture(pages[0]).size == (200, 100)
    assert Reader(dpi=144).picture(pages[0]).size == (400, 200)
    drawn = np.asarray(Reader(dpi=144).picture(pages[0]))
    assert drawn.min() < 50  # letters
    assert drawn[0, 0].tolist() == [255, 255, 255]
    single = list(read_pages(corpus / "slides" / "slide3.png", reader, Problems("raise")))
    assert [page.id for page in single] == ["slide3.png#1"]


def test_frames_of_a_scan_are_pages(tmp_path: pathlib.Path) -> None:
    frames = [Image.new("L", (30, 20), 60 * i) for i in range(3)]
    frames[0].save(tmp_path / "scan.tif", save_all=True, append_images=frames[1:])
    reader = Reader(dpi=144)
    pages = list(read_pages(tmp_path, reader, Problems("raise")))
    assert [page.id for page in pages] == ["scan.tif#1", "scan.tif#2", "scan.tif#3"]
    assert [reader.picture(page).getpixel((0, 0)) for page in pages] == [(60 * i,) * 3 for i in range(3)]


def test_a_list_of_pages(tmp_path: pathlib.Path) -> None:
    late.write_picture(tmp_path / "a.png", 1)
    rows = [{"id": "a", "image": "a.png", "title": "A", "text": "what it says"}]
    listed = write_jsonl(tmp_path / "pages.jsonl", rows)
    (page,) = read_pages(listed, Reader(dpi=144), Problems("raise"))
    assert page == Page(id="a", title="A", path=tmp_path / "a.png", text="what it says")
    for row, message in (
        ({"id": "a", "image": "b.png"}, "b.png does not exist. Paths are relative to the list"),
        ({"id": "a", "image": "https://example.com/b.png"}, "is not a file; save the pictures"),
        ({"id": "a"}, "key 'image' is missing"),
    ):
        listed = write_jsonl(tmp_path / "pages.jsonl", [row])
        with pytest.raises(ValueError, match=rf"pages\.jsonl, line 1: .*{re.escape(message)}"):
            list(read_pages(listed, Reader(dpi=144), Problems("raise")))


def test_bad_documents(tmp_path: pathlib.Path) -> None:
    whole = late.write_pdf(tmp_path / "whole.pdf", ["fine"])
    (tmp_path / "corrupt.pdf").write_bytes(b"%PDF-1.4 and nothing that follows")
    (tmp_path / "empty.pdf").write_bytes(b"")
    (tmp_path / "half.png").write_bytes(late.write_picture(tmp_path / "x.png", 0).read_bytes()[:90])
    (tmp_path / "x.png").unlink()
    config = PagesConfig(corpus=str(tmp_path), encoder="late")
    with pytest.raises(ValueError, match=r"corrupt\.pdf: not a PDF that can be read.*repair or remove it"):
        build_pages(config, tmp_path.parent / "kb1", progress=False, encoder=late.model())
    config = dataclasses.replace(config, pages=PageConfig(on_error="skip"))
    report = build_pages(config, tmp_path.parent / "kb1", progress=False, encoder=late.model())
    assert (report.count, report.numbers["damaged"]) == (1, 3)
    assert "3 damaged" in str(report)
    skipped = json.loads((tmp_path.parent / "kb1" / "skipped.json").read_text())["damaged"]
    assert [re.search(r"(\w+)\.(pdf|png)", one)[1] for one in skipped] == ["corrupt", "empty", "half"]  # type: ignore[index]
    whole.unlink()
    with pytest.raises(ValueError, match=r"none of its pages can be used|holds no pages that can be read"):
        build_pages(config, tmp_path.parent / "kb2", progress=False, encoder=late.model())
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="none holds no documents"):
        documents(tmp_path / "none")
    with pytest.raises(ValueError, match="absent does not exist"):
        documents(tmp_path / "absent")
    with pytest.raises(ValueError, match="unknown type of document"):
        documents(write_jsonl(tmp_path / "a.txt", []))


@pytest.mark.parametrize(
    ("name", "why"), [("locked.pdf", "needs a password; save it without one"), ("strip.png", "20000x20 pixels")]
)
def test_a_document_that_nobody_can_look_at(tmp_path: pathlib.Path, name: str, why: str) -> None:
    """It is named, or left out and counted: one for which a password is asked, one too narrow for any model."""
    bad, out = tmp_path / "in" / name, tmp_path / "kb"
    late.write_pdf(tmp_path / "in" / "whole.pdf", ["fine"])
    if bad.suffix == ".pdf":
        late.write_pdf(bad, ["secret"], locked=True)
    else:
        Image.new("RGB", (20_000, 20)).save(bad)
    config = PagesConfig(corpus=str(bad.parent), encoder="late")
    with pytest.raises(ValueError, match=rf"/in/{re.escape(name)}.*{why}"):
        build_pages(config, out, progress=False, encoder=late.model())
    lenient = dataclasses.replace(config, pages=PageConfig(on_error="skip"))
    report = build_pages(lenient, out, progress=False, encoder=late.model())
    assert (report.count, report.numbers["damaged"]) == (1, 1)
    (said,) = json.loads((out / "skipped.json").read_text())["damaged"]
    assert f"/in/{name}" in said
    assert why in said


def test_five_thousand_pages_are_listed_without_being_read(tmp_path: pathlib.Path) -> None:
    late.write_pdf(tmp_path / "long.pdf", [f"This is page {i}" for i in range(1, 5001)])
    reader = Reader(dpi=72)
    pages = list(read_pages(tmp_path, reader, Problems("raise")))
    assert len(pages) == 5000
    assert (pages[-1].id, pages[-1].title) == ("long.pdf#5000", "long, page 5000")
    assert reader.text(pages[4320]) == "This is page 4321"
    assert reader.picture(pages[-1]).size == (200, 100)


@pytest.mark.slow
def test_five_thousand_pages_are_built_and_found(tmp_path: pathlib.Path) -> None:
    late.write_pdf(tmp_path / "in" / "long.pdf", [f"This is page {i}" for i in range(1, 5001)])
    config = OcrConfig(corpus=str(tmp_path / "in"), retriever="bm25", pages=PageConfig(text="layer", dpi=36))
    assert build_ocr(config, tmp_path / "kb", progress=False).count == 5000
    ((found,),) = load_kb(tmp_path / "kb").search(["page 4321"], 1)
    assert (found.id, found.text) == ("long.pdf#4321", "This is page 4321")
    assert pathlib.Path(found.image).is_file()


def test_a_knowledge_base_of_pages(corpus: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config = PagesConfig(corpus=str(corpus), encoder="late", shard_size=4, precision="float32")
    report = build_pages(config, tmp_path / "kb", progress=False, encoder=late.model())
    assert report.count == 15
    assert report.numbers.items() >= {"embedded": 15, "damaged": 0, "blank": 0}.items()
    assert report.index == "all pages in full"
    kb = load_kb(tmp_path / "kb", encoder=late.model())  # type: ignore[arg-type]
    assert isinstance(kb, PageKB)
    queries = ["which slide is red?", "what does the second page say?", " "]
    results = kb.search(queries, 4)
    assert results[2] == []
    embedded = late.model().embed(queries[:2], kind="query")
    pictures = [tmp_path / "kb" / "pictures" / "0000" / f"{row:08d}.jpg" for row in range(15)]
    expected = late.max_similarity(embedded, late.model().embed(pictures, batch_size=1))
    for found, scores in zip(results, expected):
        order = np.argsort(-scores)[:4]
        assert [passage.image for passage in found] == [str(pictures[row].resolve()) for row in order]
        np.testing.assert_allclose([passage.score for passage in found], scores[order], rtol=1e-4)
    assert {passage.text for passage in kb.search(queries[:1], 15)[0]} >= {
        "Hello world",
        "Second page",
        "Third one",
        "",
    }
    with pytest.raises(ValueError, match="has a picture, but knowledge base 'kb' is searched by text alone"):
        kb.search([TextAndImage(text="x", image=pictures[0])])
    assert build_pages(config, tmp_path / "kb", progress=False, encoder=late.model()).numbers["embedded"] == 0


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_first_stage(corpus: pathlib.Path, tmp_path: pathlib.Path, precision: Any) -> None:
    config = PagesConfig(corpus=str(corpus), encoder="late", index="exact", pooled=4, precision=precision)
    report = build_pages(config, tmp_path / "kb", progress=False, encoder=late.model())
    assert "exact over 4 pooled vectors of a page" in report.index
    assert report.recall == 1
    queries = ["which slide is red?", "what does the second page say?"]
    kb, full = (load_kb(tmp_path / "kb", encoder=late.model(), index=index) for index in (None, "maxsim"))  # type: ignore[arg-type]
    assert kb.search(queries, 3) == full.search(queries, 3)
    with pytest.raises(ValueError, match="is not a late-interaction model"):
        load_kb(tmp_path / "kb", encoder="all-MiniLM-L6-v2")


def test_a_corpus_that_is_mended_between_kills(tmp_path: pathlib.Path) -> None:
    """A page that can be read after all moves all others down; none keeps the picture that stood at its new row."""
    rows = [{"id": f"p{i}", "image": f"{i}.png"} for i in range(20)]
    corpus = write_jsonl(tmp_path / "pages.jsonl", rows)
    for i in range(1, 20):
        Image.new("RGB", (8, 8), (10 * i, 0, 0)).save(tmp_path / f"{i}.png")
    (tmp_path / "0.png").write_bytes(b"damaged")
    (tmp_path / "progress").mkdir()
    place: Any = types.SimpleNamespace(scratch=tmp_path, progress=tmp_path / "progress")

    def run() -> Any:
        config = PageConfig(picture_format="png", on_error="skip", text="none")
        return PageWriter(str(corpus), config, place, progress=False).passages()

    assert [passage.id for passage in run()] == [f"p{i}" for i in range(1, 20)]
    Image.new("RGB", (8, 8), (0, 0, 0)).save(tmp_path / "0.png")
    killed = run()
    assert [next(killed).id, next(killed).id] == ["p0", "p1"]
    killed.close()
    assert [passage.id for passage in run()] == [f"p{i}" for i in range(20)]
    files = PictureFiles(tmp_path, "png")
    assert [Image.open(files.path(i)).getpixel((0, 0)) for i in range(20)] == [(10 * i, 0, 0) for i in range(20)]


def test_a_journal_trusts_no_picture_that_was_written_over(tmp_path: pathlib.Path) -> None:
    class Dying(PictureFiles):
        def write(self, row: int, encoded: bytes) -> pathlib.Path:
            super().write(row, encoded)
            raise KeyboardInterrupt

    files, path = PictureFiles(tmp_path), tmp_path / "journal"
    with PictureJournal(path, files) as journal:
        for row, name in enumerate("abc"):
            journal.write(name, row, name.encode())
    with pytest.raises(KeyboardInterrupt), PictureJournal(path, Dying(tmp_path)) as journal:
        journal.write("new", 1, b"new")
    with PictureJournal(path, files) as journal:
        assert [journal.row(name) for name in ("a", "b", "c", "new")] == [0, None, 2, None]
        journal.write("b", 2, b"b")
    with PictureJournal(path, files) as journal:
        assert [journal.row(name) for name in ("a", "b", "c", "new")] == [0, 2, None, None]


@pytest.mark.parametrize("stage", ["draw", "embed", "pool"])
def test_a_killed_build_goes_on(corpus: pathlib.Path, tmp_path: pathlib.Path, stage: str) -> None:
    places = [str(corpus), str(tmp_path / "kb"), str(tmp_path / "log")]
    finish(start("tests.knowledge.killed_pages", *places, stage), -signal.SIGKILL)
    assert not (tmp_path / "kb").exists()
    before = (tmp_path / "log").read_text().splitlines()
    killed_pages.main(*places, "none")
    log = (tmp_path / "log").read_text().splitlines()
    drawn = [line for line in log if line.startswith("draw")]
    assert len(drawn) <= 15 + (8 if stage == "draw" else 0)  # those under way are not noted
    embedded = [line for line in log if line.startswith("embed")]
    assert len(embedded) == {"draw": 15, "embed": 15 + 1, "pool": 15}[stage]  # one of an unfinished shard, twice
    assert (len(log) == len(before)) == (stage == "pool")
    whole = tmp_path / "whole"
    config = PagesConfig(corpus=str(corpus), name="kb", shard_size=4, index="exact", pooled=3)
    build_pages(config, whole, progress=False, encoder=late.model())
    assert files_of(tmp_path / "kb") == files_of(whole)


def test_ocr_of_real_pages(tmp_path: pathlib.Path, shared_data: Any) -> None:
    """Words of a slide, by the engine and then from what it left; pages without text are no passages."""
    pytest.importorskip("rapidocr", reason="rapidocr is not installed (the extra pages)")
    slide = shared_data("vrag_demo_pages/pages/00a76e3a9a36255616e2dc14a6eb5dde598b321f_1.jpg")
    lines = Ocr().lines(slide.read_bytes())
    texts = [line.text for line in lines]
    assert "CHARM" in texts
    assert any("marine fisheries" in text for text in texts)
    charm = lines[texts.index("CHARM")]
    assert charm.confidence > 0.9
    assert 250 < charm.box[0] < 300 < 500 < charm.box[2] < 600
    cached = Ocr()
    cached._engine = None  # type: ignore[method-assign,assignment]
    assert cached.lines(slide.read_bytes()) == lines

    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "charm.jpg").write_bytes(slide.read_bytes())
    Image.new("RGB", (64, 64), "white").save(documents / "blank.png")
    late.write_pdf(documents / "deck.pdf", ["Revenue of Ghana in 1957"])
    config = OcrConfig(corpus=str(documents), pages=PageConfig(text="either"), index="exact")
    report = build_ocr(config, tmp_path / "kb", progress=False)
    assert (report.count, report.numbers["blank"]) == (2, 1)
    kb = load_kb(tmp_path / "kb")
    assert isinstance(kb, OcrKB)
    (found,) = kb.search(["coastal communities and marine fisheries"], 1)[0]
    assert (found.id, pathlib.Path(found.image).read_bytes()) == ("charm.jpg#1", slide.read_bytes())
    assert kb.search(["How much did Ghana earn?"], 1)[0][0].text == "Revenue of Ghana in 1957"


def test_configurations() -> None:
    for kind in ("pages", "ocr"):
        assert KB_BUILDERS.get(kind).config(kind=kind).kind == kind
    with pytest.raises(ValueError, match="leaves nothing to search"):
        OcrConfig(pages=PageConfig(text="none"))
    with pytest.raises(ValueError, match="unknown kind of knowledge base to build 'bm52'"):
        OcrConfig(retriever="bm52")
    with pytest.raises(ValueError, match=r"dpi=5 must be in \[18, 1200\]"):
        PageConfig(dpi=5)
    with pytest.raises(ValueError, match="corpus must be set"):
        build(PagesConfig(), "kb")
    with pytest.raises(ValueError, match="unknown index 'skann'"):
        PagesConfig(index="skann")
    config = PagesConfig(corpus="x", pages=PageConfig(dpi=200), pooled=4)
    assert changes(config) == {"kind": "pages", "pages.dpi": 200, "pooled": 4}


def test_a_damaged_shard_in_the_middle(
    corpus: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are made again, and no others; index="auto" finds its own work."""
    monkeypatch.setattr(pages_build, "_MEANS", 4)
    config = PagesConfig(corpus=str(corpus), name="kb", shard_size=4)

    def build(directory: pathlib.Path) -> None:
        build_pages(config, directory, progress=False, encoder=late.model())

    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "commit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "kb")
    [shard] = tmp_path.glob("kb.tmp-*/embeddings/c/1/0")
    os.truncate(shard, shard.stat().st_size - 100)
    build(tmp_path / "kb")
    build(tmp_path / "whole")
    assert files_of(tmp_path / "kb") == files_of(tmp_path / "whole")
    moved = str(shutil.copytree(corpus, tmp_path / "moved"))
    check_kb(tmp_path / "kb", {"kind": "pages", "index": "auto", "source": moved}, "kb")
    with pytest.raises(ValueError, match=r"index='scann', but .* another: 'maxsim'"):
        check_kb(tmp_path / "kb", {"index": "scann"}, "kb")
