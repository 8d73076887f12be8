"""Text-image search and reverse image search, with a small random CLIP and real pictures."""

from __future__ import annotations

import base64
import io
import json
import pathlib
import re
import types
from typing import Any

import numpy as np
import pytest
from PIL import Image

from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Passage, TextAndImage
from routerl_jax.knowledge.builds import KB_BUILDERS
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.picture_files import PictureFiles
from routerl_jax.knowledge.pictures import (
    PicturesConfig,
    ReverseImageKB,
    TextImageKB,
    _Build,
    build_pictures,
    difference_hash,
    near_duplicates,
)
from routerl_jax.models.families.clip import Clip, uniir_text
from tests.knowledge.helpers import write_jsonl
from tests.models import test_clip


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Clip:
    directory = tmp_path_factory.mktemp("clip")
    test_clip.write(directory)
    return test_clip.load(directory)


@pytest.fixture(scope="module")
def photos(request: pytest.FixtureRequest) -> list[pathlib.Path]:
    found = sorted(request.getfixturevalue("shared_data")("fvqa50/images").glob("*.jpg"))
    assert len(found) == 50
    return found


def rows_of(photos: list[pathlib.Path]) -> list[dict[str, Any]]:
    return [{"id": f"p{i}", "title": f"Title {i}", "image": str(path)} for i, path in enumerate(photos)]


def encoded(picture: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def build(directory: pathlib.Path, rows: list[dict[str, Any]], clip: Clip, **options: Any) -> Any:
    corpus = write_jsonl(directory / "corpus.jsonl", rows)
    config = PicturesConfig(corpus=str(corpus), encoder="clip", **{"index": "exact", "side": 128, **options})
    report = build_pictures(config, directory / "kb", progress=False, encoder=clip)
    return report, load_kb(directory / "kb", encoder=clip)  # type: ignore[arg-type]


def test_a_picture_is_found_again(tmp_path: pathlib.Path, photos: list[pathlib.Path], clip: Clip) -> None:
    """Re-encoded, at half the size, at a fifth: even a random CLIP finds nearly all; titles and thumbnails come along."""
    report, kb = build(tmp_path, rows_of(photos), clip, kind="reverse_image")
    assert (report.count, report.numbers["pictures"], report.numbers["damaged"], report.recall) == (50, 50, 0, 1)
    assert isinstance(kb, ReverseImageKB)
    pictures = [Image.open(path).convert("RGB") for path in photos]
    for change, least in (
        (lambda one: encoded(one, "JPEG", quality=60), 50),
        (lambda one: encoded(one.resize((one.width // 2, one.height // 2), Image.Resampling.LANCZOS), "WEBP"), 48),
        (lambda one: one.resize((max(20, one.width // 5), max(20, one.height // 5))), 45),
    ):
        results = kb.search([TextAndImage(image=change(picture)) for picture in pictures], 5)
        found = [[passage.id for passage in result] for result in results]
        assert all(len(result) == len(set(result)) == 5 for result in found)
        assert sum(result[0] == f"p{i}" for i, result in enumerate(found)) >= least
    first = results[7][0]
    assert first.title == "Title 7"
    with Image.open(first.image) as thumbnail:
        assert min(thumbnail.size) <= 128
    again = kb.search([TextAndImage(image=photos[7])], 5)[0]
    assert again == kb.search([TextAndImage(image=photos[7].read_bytes())], 5)[0]
    assert again[0].score == pytest.approx(1, abs=2e-2)
    with pytest.raises(ValueError, match="has a text, but knowledge base 'kb' is searched by pictures alone"):
        kb.search(["a cat"])
    with pytest.raises(ValueError, match="the query's picture"):
        kb.search([TextAndImage(image=b"no picture")])
    assert build(tmp_path, rows_of(photos), clip, kind="reverse_image")[0].numbers["embedded"] == 0


def test_the_same_picture_is_one_result(tmp_path: pathlib.Path, photos: list[pathlib.Path], clip: Clip) -> None:
    rows = rows_of(photos[:12])
    with Image.open(photos[3]) as picture:
        small = picture.convert("RGB").resize((picture.width // 2, picture.height // 2), Image.Resampling.LANCZOS)
    for i in range(9):
        data = base64.b64encode(encoded(small, "JPEG", quality=70 + i)).decode()
        rows.append({"id": f"copy{i}", "title": f"Copy {i // 2}", "image": f"data:image/jpeg;base64,{data}"})
    _, kb = build(tmp_path, rows, clip, kind="reverse_image")
    found = kb.search([TextAndImage(image=photos[3])], 2)[0]
    copies = {"p3", *(f"copy{i}" for i in range(9))}
    assert found[0].id in copies
    assert found[1].id not in copies
    titles = {"Title 3", *(f"Copy {i}" for i in range(5))}
    told = found[0].text.removeprefix("The same picture: ").split("\nThe same picture: ")
    assert {found[0].title, *told} == titles
    assert len(kb.search([TextAndImage(image=photos[3])], 50)[0]) == 12
    with pytest.raises(ValueError, match=r"'kb' compares pictures and opens no URLs: give the picture itself") as error:
        kb.search([TextAndImage(image="https://example.org/a.jpg")], 2)
    assert "https://example.org/a.jpg" in str(error.value)[:280]  # all of it reaches the policy's log
    addressed = TextAndImage(image=photos[3], url="https://example.org/a.jpg")
    assert kb.search([addressed], 2) == kb.search([TextAndImage(image=photos[3])], 2)


def test_a_row_without_picture_gets_no_other_rows(tmp_path: pathlib.Path) -> None:
    """A build is killed, a damaged picture mended: rows move down, and one with a text alone comes to stand where one was."""
    Image.new("RGB", (40, 40), (0, 200, 0)).save(tmp_path / "c.png")
    (tmp_path / "a.png").write_bytes(b"damaged")
    rows = [
        {"id": "a", "text": "a", "image": "a.png"},
        {"id": "b", "text": "b"},
        {"id": "c", "text": "c", "image": "c.png"},
    ]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", rows)
    (tmp_path / "progress").mkdir()
    place: Any = types.SimpleNamespace(scratch=tmp_path, progress=tmp_path / "progress")
    files = PictureFiles(tmp_path)

    def run() -> tuple[str, list[int]]:
        unused: Any = None
        made = _Build(PicturesConfig(corpus=str(corpus), on_error="skip"), place, unused, unused, progress=False)
        passages = list(made._passages(Bar(disable=True)))
        return "".join(one.id for one in passages), [i for i in range(len(passages)) if files.path(i).is_file()]

    assert run() == ("bc", [1])
    Image.new("RGB", (40, 40), (0, 0, 200)).save(tmp_path / "a.png")
    assert run() == ("abc", [0, 2])


def test_near_duplicates(photos: list[pathlib.Path]) -> None:
    """Real photos differ from each other and not from their copies; flat pictures differ by colour."""
    pictures = [Image.open(path).convert("RGB") for path in photos]
    prints = np.stack([difference_hash(picture) for picture in pictures])
    copies = [
        difference_hash(Image.open(io.BytesIO(encoded(one.resize((one.width // 2, one.height // 2)), "JPEG"))))
        for one in pictures
    ]
    same = np.stack([near_duplicates(one, prints) for one in prints])
    assert same.diagonal().all()
    assert same.sum() == 50
    assert sum(near_duplicates(copy, prints)[i] for i, copy in enumerate(copies)) == 50
    flat = [difference_hash(Image.new("RGB", (20, 20), colour)) for colour in ("red", "blue")]
    assert not near_duplicates(flat[0], np.stack(flat))[1]


def test_text_and_image(tmp_path: pathlib.Path, photos: list[pathlib.Path], clip: Clip) -> None:
    """Vectors are UniIR's score fusion: the towers' sum at unit length, of candidates and of queries."""
    rows: list[dict[str, Any]] = [
        {"id": "both", "title": "Cat", "text": "on a mat", "image": str(photos[0])},
        {"id": "text", "caption": "a cat that sits"},
        {"id": "image", "image": str(photos[1])},
        *({"id": f"t{i}", "text": f"number {i}"} for i in range(20)),
    ]
    report, kb = build(tmp_path, rows, clip, image_instruction="Find the caption.")
    assert (report.count, report.numbers["pictures"]) == (23, 2)
    assert isinstance(kb, TextImageKB)
    stored = kb.store.embeddings.read(0, 3)
    pictures = [pathlib.Path(kb._files.path(row)) for row in (0, 2)]
    inputs = [
        TextAndImage(text="Cat on a mat.", image=pictures[0]),
        TextAndImage(text="A cat that sits."),
        TextAndImage(image=pictures[1]),
    ]
    np.testing.assert_allclose(stored, clip.embed(inputs), atol=1e-5)
    queries = [TextAndImage(text="what is it", image=photos[0]), "a cat that sits", TextAndImage(image=photos[1])]
    vectors = clip.embed(
        [
            TextAndImage(text=uniir_text("what is it", "Find the caption."), image=photos[0]),
            TextAndImage(text="A cat that sits."),
            TextAndImage(text="Find the caption.", image=photos[1]),
        ]
    )
    np.testing.assert_allclose(kb.embed_queries(queries), vectors, atol=1e-5)
    results = kb.search(queries, 3)
    scores = vectors @ kb.store.embeddings.read(0, 23).T
    for found, row in zip(results, scores):
        np.testing.assert_allclose([one.score for one in found], np.sort(row)[::-1][:3], atol=1e-5)
    assert results[1][0].id == "text"
    shown = {one.id: one.image for result in kb.search(queries, 23) for one in result}
    assert {name for name, image in shown.items() if image} == {"both", "image"}


def test_odd_and_bad_pictures(tmp_path: pathlib.Path, photos: list[pathlib.Path], clip: Clip) -> None:
    Image.new("RGBA", (3, 900), (0, 0, 0, 0)).save(tmp_path / "strip.png")
    Image.new("L", (1, 1)).save(tmp_path / "dot.gif")
    (tmp_path / "half.jpg").write_bytes(photos[0].read_bytes()[:2000])
    rows = [{"id": name, "title": name, "image": name} for name in ("strip.png", "dot.gif", "half.jpg", "gone.jpg")]
    with pytest.raises(ValueError, match=r"line 3: .*half\.jpg: damaged or incomplete"):
        build(tmp_path, rows, clip, kind="reverse_image")
    report, kb = build(tmp_path, rows, clip, kind="reverse_image", on_error="skip")
    assert (report.count, report.numbers["pictures"], report.numbers["damaged"]) == (2, 2, 2)
    skipped = json.loads((tmp_path / "kb" / "skipped.json").read_text())
    assert "gone.jpg does not exist" in skipped[1]
    assert kb.search([TextAndImage(image=tmp_path / "strip.png")], 1)[0][0].id == "strip.png"
    other = tmp_path / "other"
    other.mkdir()
    for row, message in (
        ({"id": "x", "image": "https://example.com/a.jpg"}, "is not on this machine"),
        ({"id": "x", "title": ""}, "neither text nor picture"),
        ({"id": "x", "title": "no picture"}, "which a reverse image search is about"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            build(other, [row], clip, kind="reverse_image")


def test_a_directory_of_pictures(tmp_path: pathlib.Path, photos: list[pathlib.Path], clip: Clip) -> None:
    for path in photos[:3]:
        (tmp_path / "pictures").mkdir(exist_ok=True)
        (tmp_path / "pictures" / path.name).write_bytes(path.read_bytes())
    config = PicturesConfig(corpus=str(tmp_path / "pictures"), kind="reverse_image", encoder="clip", index="exact")
    build_pictures(config, tmp_path / "kb", progress=False, encoder=clip)
    kb = load_kb(tmp_path / "kb", encoder=clip)  # type: ignore[arg-type]
    found = kb.search([TextAndImage(image=photos[1])], 1)[0][0]
    assert (found.id, found.title) == (photos[1].name, photos[1].stem.replace("_", " "))


def test_configurations() -> None:
    for kind in ("text_image", "reverse_image"):
        assert KB_BUILDERS.get(kind).config(kind=kind).kind == kind
    with pytest.raises(ValueError, match="a reverse image search has none"):
        PicturesConfig(kind="reverse_image", instruction="Find it.")
    with pytest.raises(ValueError, match="side=5 must be at least 32"):
        PicturesConfig(side=5)
    with pytest.raises(ValueError, match="corpus must be set"):
        build_pictures(PicturesConfig(), "kb")


def test_rows_that_are_embedded_again_get_their_own_pictures(tmp_path: pathlib.Path) -> None:
    """Of a shard in the middle, in batches."""
    asked: list[TextAndImage] = []

    def embed(inputs: list[TextAndImage], **_: Any) -> np.ndarray:
        asked.extend(inputs)
        return np.zeros((len(inputs), 2), np.float32)

    encoder: Any = types.SimpleNamespace(embed=embed, mesh=None)
    place: Any = types.SimpleNamespace(scratch=tmp_path)
    clock: Any = None
    made = _Build(PicturesConfig(kind="reverse_image", embed_batch=1), place, encoder, clock, progress=False)
    made._bar = Bar(disable=True)
    files = PictureFiles(tmp_path)
    for row in range(50):
        files.write(row, b"")
    made._embed([Passage(id=str(row), title="", text="") for row in range(20, 40)], 20)
    assert [one.image for one in asked] == [files.path(row) for row in range(20, 40)]
