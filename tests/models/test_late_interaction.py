"""ColQwen2 and ColQwen2.5 beside transformers: vectors of queries and pages, names of tensors, scores.

The reference is given M-RoPE positions, as the authors' package (colpali-engine) computes them; transformers' port leaves
them out when it is not told. 1e-4: float32 in another order.
"""

import functools
import json
import pathlib
import weakref
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from flax import nnx

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.data.vocabulary import train_tokenizer
from routerl_jax.models.families.colqwen import LateInteraction
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.parallel.mesh import make_mesh
from tests.knowledge.late import max_similarity
from tests.models.families import randomize
from tests.models.test_vision_language import _CLASSES, _TEXT, _TOWERS, hf_inputs

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
KINDS = ("qwen2_vl", "qwen2_5_vl")
QUERIES = ["What is on page three?", "a much longer query about the total revenue of the year 2019 in Ghana", "x"]


@functools.cache
def tokenizer() -> Tokenizer:
    made = train_tokenizer(["user Describe the image. Query: what?"] * 3, 320, SPECIAL, context=512)
    made.hf.pad_token = "<|endoftext|>"
    return made


def pages() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (*size, 3)).astype(np.uint8) for size in [(60, 90), (130, 60), (30, 30), (90, 60)]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(kind: str) -> tuple[Any, pathlib.Path]:
        directory = tmp_path_factory.mktemp(kind)
        ids = {mark: tokenizer().encode(mark)[0] for mark in SPECIAL}
        vlm = _CLASSES[kind][0](
            text_config=_TEXT | {"vocab_size": 320},
            vision_config=dict(_TOWERS[kind]),
            image_token_id=ids["<|image_pad|>"],
            video_token_id=319,
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
        )
        torch.manual_seed(0)
        model = transformers.ColQwen2ForRetrieval(transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=24)).eval()
        randomize(model)
        model.save_pretrained(directory)
        tokenizer().save(directory)
        (directory / "preprocessor_config.json").write_text(
            json.dumps({"min_pixels": 28 * 28, "max_pixels": 200 * 200})
        )
        return model, directory

    return make


def load(directory: pathlib.Path, **options: Any) -> LateInteraction:
    model = load_pretrained(str(directory), **options)
    assert isinstance(model, LateInteraction)
    return model


def hf_vectors(hf: Any, ids: list[int], images: list[np.ndarray], image_id: int) -> np.ndarray:
    kind = hf.config.vlm_config.model_type
    inputs = hf_inputs(kind, [121 if token == image_id else -1 for token in ids], images)  # whose image id is 121
    inputs["input_ids"] = torch.as_tensor([ids])
    if images:
        positions, _ = hf.vlm.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
        )
        inputs["position_ids"] = positions
        inputs["pixel_values"] = inputs["pixel_values"][None]
    del inputs["mm_token_type_ids"]
    with torch.no_grad():
        return hf(**inputs, attention_mask=torch.ones(1, len(ids), dtype=int)).embeddings[0].numpy()


@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_pages(saved: Any, kind: str) -> None:
    hf, directory = saved(kind)
    model = load(directory)
    inputs = [QUERIES[0], *pages()[:2], QUERIES[1], *pages()[2:], QUERIES[2]]  # mixed, in any order
    found = model.embed(inputs, batch_size=2)
    for one, vectors in zip(inputs, found):
        if isinstance(one, str):
            ids = tokenizer().encode(f"Query: {one}{'<|endoftext|>' * 10}\n")
            images = []
        else:
            ids, _ = model._page(one, 0)
            images = [one]
        expected = hf_vectors(hf, ids, images, model.config.backbone.image_id)
        assert vectors.shape == expected.shape == (len(ids), 24)
        np.testing.assert_allclose(vectors, expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_the_prefix_of_queries(saved: Any) -> None:
    """The authors' unless another one is given, which may be empty; what kind the inputs are called does not matter."""
    model = load(saved("qwen2_vl")[1])
    usual = model.embed(["x"])[0]
    for options in ({"kind": "query"}, {"kind": "passage"}, {"prefix": "Query: "}):
        np.testing.assert_array_equal(model.embed(["x"], **options)[0], usual)
    bare = model.embed(["x"], prefix="")[0]
    assert len(usual) - len(bare) == len(tokenizer().encode("Query: x")) - len(tokenizer().encode("x"))


@pytest.mark.slow
def test_pages_are_read_as_they_are_needed(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the host never holds the patches of a whole collection."""
    model = load(saved("qwen2_vl")[1])
    together = model.embed(pages())
    read, alive = LateInteraction._page, []

    def counted(self: LateInteraction, source: Any, number: int) -> Any:
        tokens, image = read(self, source, number)
        alive.append(weakref.ref(image))
        held.append(sum(one() is not None for one in alive))
        return tokens, image

    held: list[int] = []
    monkeypatch.setattr(LateInteraction, "_page", counted)
    for one, other in zip(model.embed(pages() * 3, batch_size=1), together * 3, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    assert len(held) == 12
    assert max(held) <= 4  # two that are read, and two that were


def test_scores(saved: Any) -> None:
    """As transformers' processor scores them, with pages of different lengths."""
    model = load(saved("qwen2_vl")[1])
    queries, shown = model.embed(QUERIES), model.embed(pages())
    score = transformers.ColQwen2Processor.score_retrieval
    theirs = score(None, *([torch.as_tensor(one) for one in some] for some in (queries, shown)))  # type: ignore[arg-type]
    expected = [[(q @ p.T).max(1).sum() for p in shown] for q in queries]
    np.testing.assert_allclose(max_similarity(queries, shown), expected, rtol=1e-5)
    # theirs pads pages with zeros, which only count where every real match is negative
    np.testing.assert_allclose(np.maximum(theirs, expected), theirs, rtol=1e-4)


@pytest.mark.slow
def test_a_page_alone_and_in_company(saved: Any) -> None:
    """And spread over eight devices."""
    model = load(saved("qwen2_5_vl")[1])
    alone = [model.embed([page])[0] for page in pages()]
    for one, together in zip(alone, model.embed(pages()), strict=True):
        np.testing.assert_allclose(one, together, rtol=0, atol=1e-5)
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    spread = load(saved("qwen2_5_vl")[1], mesh=mesh, layout="fsdp+tensor")
    for one, other in zip(alone, spread.embed(pages()), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(saved: Any, tmp_path: pathlib.Path, kind: str) -> None:
    hf, directory = saved(kind)
    model = load(directory)
    save_pretrained(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert again.backbone.image_processor == model.backbone.image_processor
    for one, other in zip(jax.tree.leaves(nnx.state(again, nnx.Param)), jax.tree.leaves(nnx.state(model, nnx.Param))):
        np.testing.assert_array_equal(one, other)
    exported, info = transformers.ColQwen2ForRetrieval.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids, image_id = model.encode(QUERIES[0]), model.config.backbone.image_id
    np.testing.assert_array_equal(hf_vectors(exported.eval(), ids, [], image_id), hf_vectors(hf, ids, [], image_id))


def test_directories_of_colpali_engine(saved: Any, tmp_path: pathlib.Path) -> None:
    """A Qwen2-VL config whose class is ColQwen2, tensors by the backbone's names, the projection as `custom_text_proj`."""
    _, directory = saved("qwen2_5_vl")
    model = load(directory)
    config = json.loads((directory / "config.json").read_text())["vlm_config"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["ColQwen2_5"]}))
    tensors = safetensors.torch.load_file(directory / "model.safetensors")
    spelled = {"vlm.language_model.": "model.", "vlm.visual.": "visual.", "embedding_proj_layer.": "custom_text_proj."}
    renamed = {}
    for name, tensor in tensors.items():
        old = next(old for old in spelled if name.startswith(old))
        renamed[spelled[old] + name[len(old) :]] = tensor[:, :].clone() if tensor.ndim > 1 else tensor.clone()
    pad = 128 - 24  # their projection has 128 dimensions, always
    for name in ("custom_text_proj.weight", "custom_text_proj.bias"):
        renamed[name] = torch.cat([renamed[name], torch.zeros(pad, *renamed[name].shape[1:])])
    renamed["lm_head.weight"] = torch.ones(320, 48)  # they keep it, and do not use it
    safetensors.torch.save_file(renamed, tmp_path / "model.safetensors")
    tokenizer().save(tmp_path)
    found = load(tmp_path).embed(QUERIES[:1])[0]
    np.testing.assert_allclose(found[:, :24], model.embed(QUERIES[:1])[0], rtol=0, atol=1e-5)
    assert not found[:, 24:].any()


def test_bad_inputs(saved: Any) -> None:
    model = load(saved("qwen2_vl")[1])
    with pytest.raises(ValueError, match="input 1: not an image that Pillow can open"):
        model.embed([pages()[0], b"no picture"])
    with pytest.raises(ValueError, match=r"a query of \d+ tokens; this model reads 512"):
        model.embed(["word " * 600])
    with pytest.raises(ValueError, match="unknown kind 'page'"):
        model.embed([], kind="page")
