"""Pictures by their colours: real flags are found again whatever was done to them; words decide where there is no picture."""

import io

import numpy as np
import pytest
from PIL import Image

from routerl_jax.core.types import TextAndImage
from routerl_jax.data.atlas import flags, world
from routerl_jax.knowledge.encoders import encoder_digest, resolved_encoder, shared_encoder
from routerl_jax.knowledge.load import load_kb
from routerl_jax.knowledge.pictures import PicturesConfig, build_pictures
from routerl_jax.models.colours import Colours, colour_layout
from tests.knowledge.helpers import write_jsonl
from tests.training.small_run import make_encoder


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("colours") / "encoder"
    make_encoder(directory)
    return f"colours+{directory}"


def test_flags_are_found_again() -> None:
    """Atlas's own distortion is another size, another proportion, cut margins and JPEG: 3 x 191 pictures."""
    names = [entity.name for entity in world.real_entities() if entity.kind == "country"]
    kept = np.stack([colour_layout(opened(flags.flag(name))) for name in names])
    np.testing.assert_allclose(np.linalg.norm(kept, axis=1), 1, atol=1e-6)
    ranks = []
    for i, name in enumerate(names):
        for attempt in range(3):
            scores = kept @ colour_layout(opened(flags.photographed(flags.flag(name), f"{name}/{attempt}")))
            ranks.append(int((scores > scores[i]).sum()))
    assert np.mean(np.asarray(ranks) == 0) > 0.99  # Indonesia's and Monaco's flags differ in proportion alone
    assert max(ranks) <= 2


def opened(encoded: bytes) -> Image.Image:
    with Image.open(io.BytesIO(encoded)) as picture:
        return picture.convert("RGB")


def test_a_knowledge_base_of_them(tmp_path, encoder: str) -> None:
    rows = [
        {"id": name, "title": name, "text": f"The flag of {name}.", "image": flags.data_uri(flags.flag(name))}
        for name in ("Ghana", "Mali", "Chad", "Romania", "Japan")
    ]
    corpus = write_jsonl(tmp_path / "corpus.jsonl", rows)
    config = PicturesConfig(corpus=str(corpus), encoder=encoder, index="exact", side=64, picture_format="png")
    build_pictures(config, tmp_path / "kb", progress=False)
    kb = load_kb(tmp_path / "kb")
    shown = {name: flags.photographed(flags.flag(name), "test") for name in ("Ghana", "Chad", "Romania")}
    for name, picture in shown.items():
        alone, both = kb.search(
            [TextAndImage(image=picture), TextAndImage(text="Which country has this flag? Japan?", image=picture)], 2
        )
        assert alone[0].id == both[0].id == name  # words beside a picture don't overrule it
        assert alone[0].image
    with pytest.raises(ValueError, match=r"reads no pictures; give a CLIP model, or colours\+all-MiniLM-L6-v2"):
        build_pictures(
            PicturesConfig(corpus=str(corpus), encoder=encoder.removeprefix("colours+")), tmp_path / "x", progress=False
        )


def test_vectors_of_texts_are_the_text_encoder_s(encoder: str) -> None:
    model = shared_encoder(encoder)
    assert isinstance(model, Colours)
    texts = shared_encoder(encoder.removeprefix("colours+"))
    vectors = model.embed(["a red flag", "green"])
    np.testing.assert_allclose(vectors[:, : texts.dim], texts.embed(["a red flag", "green"]), atol=1e-6)
    assert not vectors[:, texts.dim :].any()
    assert shared_encoder(encoder) is model
    assert encoder_digest(model) == f"colours+1+{encoder_digest(texts)}"
    assert resolved_encoder("colours+all-MiniLM-L6-v2") == "colours+all-MiniLM-L6-v2"
    blank = model.embed([TextAndImage(image=Image.new("RGB", (30, 20), "white"))])[0]
    assert not blank[: texts.dim].any()
    assert np.linalg.norm(blank) == pytest.approx(1)
