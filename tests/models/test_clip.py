"""CLIP against transformers: towers, pictures and tokens; UniIR's fusion by hand; export."""

from __future__ import annotations

import copy
import io
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from PIL import Image
from tokenizers import pre_tokenizers
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from routerl_jax.core.types import TextAndImage
from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.families.clip import Clip, ClipImageProcessor, clip_from_hf, processor_from_hf, uniir_text
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.models.openai_clip import convert
from routerl_jax.parallel.mesh import make_mesh
from tests.models.families import parameters, randomize, same_tensors

# Sizes are distinct, so that a wrong transposition can't fit; 31 pixels make 7 whole patches of 4 a side, and a rest.
TEXT = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 31,
    "patch_size": 4,
}
RNG = np.random.default_rng(0)
CONFIGS = {
    "newer": {},
    "legacy": {"eos_token_id": 2},
    "gelu": {"hidden_act": "gelu", "layer_norm_eps": 1e-3},
}


def tokenizer() -> Any:
    """CLIP's own, over bytes and two merges."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, *(letter + "</w>" for letter in letters), "ca", "cat</w>", "<|startoftext|>", "<|endoftext|>"]
    return transformers.CLIPTokenizer(
        vocab={word: i for i, word in enumerate(words)}, merges=[("c", "a"), ("ca", "t</w>")]
    )


def write(directory: pathlib.Path, **changes: Any) -> Any:
    tok = tokenizer()
    special = {"vocab_size": len(tok), "bos_token_id": tok.bos_token_id, "eos_token_id": tok.eos_token_id}
    both = {key: changes[key] for key in ("hidden_act", "layer_norm_eps") if key in changes}
    torch.manual_seed(0)
    config = transformers.CLIPConfig(
        text_config=TEXT | special | changes, vision_config=VISION | both, projection_dim=56
    )
    model = transformers.CLIPModel(config).eval()
    randomize(model)
    model.save_pretrained(directory)
    tok.save_pretrained(directory)
    CLIPImageProcessorPil(size={"shortest_edge": 31}, crop_size=31).save_pretrained(directory)
    return model


def load(directory: pathlib.Path, **options: Any) -> Clip:
    model = load_pretrained(str(directory), **options)
    assert isinstance(model, Clip)
    return model


def hf_text(model: Any, tokens: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
    with torch.no_grad():
        mask = None if mask is None else torch.as_tensor(mask)
        return model.get_text_features(torch.as_tensor(tokens), attention_mask=mask).pooler_output.numpy()


def hf_image(model: Any, pixels: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model.get_image_features(torch.as_tensor(pixels)).pooler_output.numpy()


def picture(width: int, height: int) -> Image.Image:
    return Image.fromarray(RNG.integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, pathlib.Path, Clip]:
    directory = tmp_path_factory.mktemp("clip")
    model = write(directory)
    return model, directory, load(directory)


@pytest.mark.parametrize("case", CONFIGS)
def test_towers(tmp_path: pathlib.Path, case: str) -> None:
    """1e-4 on values of about 5: float32 sums in another order through two and three layers."""
    hf = write(tmp_path, **CONFIGS[case])
    model, size = load(tmp_path), hf.config.text_config.vocab_size
    tokens = RNG.integers(0, size - 2, (4, 24))
    for row, end in enumerate((23, 9, 1, 12)):
        tokens[row, end:] = size - 1  # eos is the padding too, as in OpenAI's files; the first one counts
    got = nnx.jit(Clip.encode_text)(model, tokens)
    np.testing.assert_allclose(got, hf_text(hf, tokens), rtol=0, atol=1e-4)
    tokens[:, -1] = np.maximum(tokens[:, -1], 3)
    pixels = RNG.normal(size=(3, 31, 31, 3)).astype(np.float32)
    got = nnx.jit(Clip.encode_image)(model, pixels)
    np.testing.assert_allclose(got, hf_image(hf, pixels.transpose(0, 3, 1, 2)), rtol=0, atol=1e-4)


def test_where_a_text_ends(tmp_path: pathlib.Path) -> None:
    """With added tokens, whose ids are larger than that of eos, the two rules part."""
    tokens = np.array([[5, 700, 6, 515, 515], [515, 3, 700, 515, 4]])
    found = {}
    for case in ("newer", "legacy"):
        hf = write(tmp_path / case, vocab_size=701, **CONFIGS[case])
        found[case] = np.asarray(load(tmp_path / case).encode_text(tokens))
        np.testing.assert_allclose(found[case], hf_text(hf, tokens), rtol=0, atol=1e-4)
    assert (np.abs(found["newer"] - found["legacy"]).max(1) > 0.1).all()


def test_pictures_as_transformers_reads_them() -> None:
    """Equal to the last bit, for any aspect and size, larger and smaller than the crop."""
    for size, crop in [(224, 224), (31, 31), (40, 31), (20, 32), (25, 32)]:
        hf = CLIPImageProcessorPil(size={"shortest_edge": size}, crop_size=crop)
        ours = ClipImageProcessor(size=size, crop=crop)
        for width, height in [(1, 1), (1, 90), (90, 1), (225, 224), (223, 225), (331, 517), (40, 31), (7, 5), (64, 64)]:
            image = picture(width, height)
            expected = hf(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
            np.testing.assert_array_equal(ours(image), expected)
    assert ours(picture(3, 2)).dtype == np.float32
    hf = CLIPImageProcessorPil(size={"height": 50, "width": 41}, crop_size=32, resample=2, image_std=[0.5, 0.25, 1])
    ours = processor_from_hf(json.loads(hf.to_json_string()))
    image = picture(70, 90)
    np.testing.assert_array_equal(ours(image), hf(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0))
    assert processor_from_hf(ours.to_hf()) == ours


def test_real_pictures(shared_data: Any) -> None:
    """Fifty photographs, to the last bit."""
    hf, ours = CLIPImageProcessorPil(), ClipImageProcessor()
    paths = sorted(shared_data("fvqa50/images").glob("*"))
    assert len(paths) == 50
    for path in paths:
        expected = hf(Image.open(path), return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
        np.testing.assert_array_equal(ours(path), expected, err_msg=path.name)


def test_sources_of_pictures(clip: tuple[Any, pathlib.Path, Clip], tmp_path: pathlib.Path) -> None:
    _, _, model = clip
    image = picture(40, 33)
    image.save(tmp_path / "a.png")
    sources = [image, np.asarray(image), tmp_path / "a.png", (tmp_path / "a.png").read_bytes()]
    vectors = model.embed(sources)
    for vector in vectors[1:]:
        np.testing.assert_array_equal(vector, vectors[0])
    with pytest.raises(ValueError, match="not an image that Pillow can open"):
        model.embed([b"GIF89a, not"])
    with pytest.raises(ValueError, match=r"9000x1 pixels would become 18446400|crop or pad it"):
        ClipImageProcessor(size=2048)(Image.new("RGB", (9000, 1)))


TEXTS = ["a photo of a cat", "", "Two CATS, 12 dogs; naïve Δ", "cat " * 40]


def by_hand(hf: Any, directory: pathlib.Path, text: str | None, image: Image.Image | None) -> np.ndarray:
    """UniIR's encode_multimodal_input with transformers' parts: each row times its mask, the sum, unit length last."""
    tok = transformers.AutoTokenizer.from_pretrained(directory)
    fused = np.zeros((1, 56), np.float32)
    if text:
        batch = tok([text], return_tensors="np", padding="max_length", truncation=True, max_length=24)
        fused = fused + hf_text(hf, batch["input_ids"], batch["attention_mask"])
    if image is not None:
        pixels = CLIPImageProcessorPil.from_pretrained(directory)(image, return_tensors="np")["pixel_values"]
        fused = fused + hf_image(hf, pixels)
    return torch.nn.functional.normalize(torch.as_tensor(fused), dim=-1).numpy()[0]


def test_embed_any_mix(clip: tuple[Any, pathlib.Path, Clip]) -> None:
    """Texts, pictures and both, in their places; 1e-5: unit vectors of float32 sums in another order."""
    hf, directory, model = clip
    images = [picture(60, 45), picture(31, 200)]
    inputs = [
        TEXTS[0],
        images[0],
        TextAndImage(text=TEXTS[2], image=images[1]),
        TEXTS[3],
        TextAndImage(text="", image=images[0]),
        TextAndImage(text=TEXTS[0]),
        "",
    ]
    pairs = [
        *((TEXTS[0], None), (None, images[0]), (TEXTS[2], images[1]), (TEXTS[3], None), (None, images[0])),
        *((TEXTS[0], None), (None, None)),
    ]
    got = model.embed(inputs, batch_size=2)
    np.testing.assert_allclose(got, [by_hand(hf, directory, *pair) for pair in pairs], rtol=0, atol=1e-5)
    assert not got[-1].any()  # nothing to embed
    # 2e-7: these widths are no multiples of a vector register, so that a row's place in its batch is felt in the last bit
    np.testing.assert_allclose(model.embed(inputs[::-1], batch_size=2), got[::-1], rtol=0, atol=2e-7)
    np.testing.assert_allclose(model.embed([inputs[2]], batch_size=2)[0], got[2], rtol=0, atol=2e-7)
    prefixed = model.embed(["cat", images[0]], prefix="a photo of a ")
    np.testing.assert_allclose(prefixed, got[[0, 1]], rtol=0, atol=1e-6)
    # normalised after the sum: the sum of normalised parts is another vector
    parts = model.embed([TEXTS[2], images[1]]).sum(0)
    assert np.abs(parts / np.linalg.norm(parts) - got[2]).max() > 2e-4


def test_on_a_mesh(clip: tuple[Any, pathlib.Path, Clip]) -> None:
    """2e-6: matrices of another height, summed otherwise."""
    _, directory, model = clip
    inputs = [TEXTS[0], picture(50, 40), TextAndImage(text=TEXTS[2], image=picture(31, 31))]
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    spread = load(directory, mesh=mesh, layout="fsdp+tensor")
    assert not spread.vision.blocks.up[...].sharding.is_fully_replicated
    np.testing.assert_allclose(spread.embed(inputs), model.embed(inputs), rtol=0, atol=2e-6)


def test_bfloat16(clip: tuple[Any, pathlib.Path, Clip]) -> None:
    """0.006 of unit vectors of width 56: roundings of 2^-9 in three layers. As near as transformers in bfloat16, or twice."""
    hf, directory, model = clip
    inputs = [TEXTS[0], picture(50, 40)]
    half = load(directory, dtype="bfloat16")
    assert half.text.word[...].dtype == jnp.bfloat16
    np.testing.assert_allclose(half.embed(inputs), model.embed(inputs), rtol=0, atol=0.006)
    tokens = np.asarray([model.encode(TEXTS[0])])
    exact = hf_text(hf, tokens)
    with torch.no_grad():
        theirs = copy.deepcopy(hf).bfloat16().get_text_features(torch.as_tensor(tokens)).pooler_output.float().numpy()
    assert np.abs(half.encode_text(tokens) - exact).max() < 2 * np.abs(theirs - exact).max()


def test_round_trip(clip: tuple[Any, pathlib.Path, Clip], tmp_path: pathlib.Path) -> None:
    """Bit for bit, and as transformers reads it: weights, config, tokens, pixels."""
    hf, directory, model = clip
    save_pretrained(model, tmp_path)
    same_tensors(tmp_path, directory)
    again = load(tmp_path)
    assert again.config == model.config
    for path, value in parameters(again).items():
        np.testing.assert_array_equal(value, parameters(model)[path])
    exported, info = transformers.CLIPModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    tok = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = tok(TEXTS[:3], padding=True, return_tensors="np")["input_ids"]
    np.testing.assert_array_equal(ids, tokenizer()(TEXTS[:3], padding=True, return_tensors="np")["input_ids"])
    np.testing.assert_allclose(hf_text(exported.eval(), ids), hf_text(hf, ids), rtol=0, atol=1e-5)
    image = picture(45, 60)
    processors = [CLIPImageProcessorPil.from_pretrained(place) for place in (tmp_path, directory)]
    pixels = [one(image, return_tensors="np")["pixel_values"] for one in processors]
    np.testing.assert_array_equal(*pixels)
    weights = hf.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in exported.state_dict().items())
    # oneDNN takes kernels by how memory is aligned: not equal to the last bit though weights and pixels are
    np.testing.assert_allclose(hf_image(exported, pixels[0]), hf_image(hf, pixels[1]), rtol=0, atol=1e-5)
    save_pretrained(again, tmp_path)  # in place of the first


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"text_config": {"hidden_act": "relu"}},
            "text_config: hidden_act='relu' is not supported; supported: quick_gelu",
        ),
        ({"text_config": {"eos_token_id": [1, 2]}}, r"text_config: eos_token_id=\[1, 2\] is not supported"),
        ({"vision_config": {"patch_size": [4, 4]}}, r"vision_config: patch_size=\[4, 4\] is not supported"),
        ({"vision_config": {"num_channels": 1}}, "vision_config: num_channels=1 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
    ],
)
def test_unsupported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^dir/config.json: {message}"):
        clip_from_hf(changes, "dir/config.json")


def test_vit_l_14_as_published() -> None:
    """openai/clip-vit-large-patch14 says its text tower twice; the old section counts, as in transformers."""
    sections = {
        "text_config": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072, "eos_token_id": 2},
        "text_config_dict": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
        "vision_config": {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "patch_size": 14,
        },
    }
    config = clip_from_hf(sections | {"projection_dim": 768})
    theirs = transformers.CLIPConfig(**sections, projection_dim=768)
    assert config.eos_id == theirs.text_config.eos_token_id == 49407
    assert (config.patches, config.projection, config.max_length) == (256, 768, 77)
    model = nnx.eval_shape(lambda: Clip(config, jax.random.key(0)))
    with torch.device("meta"):
        expected = sum(parameter.numel() for parameter in transformers.CLIPModel(theirs).parameters())
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == expected == 427_616_513


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_center_crop": False}, "do_center_crop=false is not supported"),
        ({"size": {"longest_edge": 5}}, r"size=\{'longest_edge': 5\} is not supported"),
        ({"crop_size": {"height": 3, "width": 4}}, "crop_size=.* is not supported; supported: a square"),
        ({"crop_size": {"shortest_edge": 3}}, "crop_size=.* is not supported; supported: a square"),
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type 'ViTImageProcessor' is not supported"),
    ],
)
def test_unsupported_processing(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^preprocessor_config.json: {message}"):
        processor_from_hf(changes)


def test_pictures_of_another_size_than_the_tower_reads(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    CLIPImageProcessorPil(size={"shortest_edge": 31}, crop_size=30).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"preprocessor_config\.json: pictures are cut to 30 pixels, but the tower reads 31"
    ):
        load(tmp_path)


def test_text_as_uniir_writes_it() -> None:
    """By its `format_string`: stripped, quotes off, a capital, a full stop unless another mark ends it."""
    assert uniir_text(' "where is it\r" ') == "Where is it."
    assert uniir_text("what is this?", "Retrieve a paragraph that answers the question.") == (
        "Retrieve a paragraph that answers the question. what is this?"
    )
    assert uniir_text("  ") == uniir_text('""') == ""


def test_old_processor_files() -> None:
    """OpenAI's preprocessor_config.json: sizes as numbers, no rescale."""
    old = {"crop_size": 224, "size": 224, "resample": 3, "feature_extractor_type": "CLIPFeatureExtractor"}
    assert processor_from_hf(old) == ClipImageProcessor()
    buffer = io.BytesIO()
    picture(30, 20).save(buffer, "JPEG")
    assert ClipImageProcessor()(buffer.getvalue()).shape == (224, 224, 3)


def openai_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A transformers CLIP as OpenAI's package would hold it, by that package's model.py."""
    result = {"logit_scale": state["logit_scale"]}
    towers = {"text_model": "", "vision_model": "visual."}
    for tower, start in towers.items():
        embeddings = f"{tower}.embeddings."
        result[start + "positional_embedding"] = state[embeddings + "position_embedding.weight"]
        norms = {"vision_model": {"ln_pre": "pre_layrnorm", "ln_post": "post_layernorm"}}
        for theirs, ours in norms.get(tower, {"ln_final": "final_layer_norm"}).items():
            for kind in ("weight", "bias"):
                result[f"{start}{theirs}.{kind}"] = state[f"{tower}.{ours}.{kind}"]
        for i in range({"text_model": 2, "vision_model": 3}[tower]):
            layer, block = f"{tower}.encoder.layers.{i}.", f"{start}transformer.resblocks.{i}."
            for kind in ("weight", "bias"):
                parts = [state[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv"]
                result[f"{block}attn.in_proj_{kind}"] = torch.cat(parts)
                for theirs, ours in {
                    "attn.out_proj": "self_attn.out_proj",
                    "ln_1": "layer_norm1",
                    "ln_2": "layer_norm2",
                    "mlp.c_fc": "mlp.fc1",
                    "mlp.c_proj": "mlp.fc2",
                }.items():
                    result[f"{block}{theirs}.{kind}"] = state[f"{layer}{ours}.{kind}"]
    result["token_embedding.weight"] = state["text_model.embeddings.token_embedding.weight"]
    result["visual.conv1.weight"] = state["vision_model.embeddings.patch_embedding.weight"]
    result["visual.class_embedding"] = state["vision_model.embeddings.class_embedding"]
    result["text_projection"] = state["text_projection.weight"].T
    result["visual.proj"] = state["visual_projection.weight"].T
    return result


@pytest.mark.parametrize("uniir", [False, True])
def test_weights_with_openai_s_names(clip: tuple[Any, pathlib.Path, Clip], tmp_path: pathlib.Path, uniir: bool) -> None:
    hf, directory, model = clip
    state = openai_names(hf.state_dict())
    if uniir:  # what its train.py saves
        weights = {f"clip_model.{name}": value for name, value in state.items()}
        state = {"model": weights, "optimizer": {"state": {0: {"exp_avg": torch.ones(3)}}}, "epoch": 4}
    torch.save(state, tmp_path / "clip_sf.pth")
    convert(tmp_path / "clip_sf.pth", like=str(directory), target=tmp_path / "out")
    same_tensors(tmp_path / "out", directory)
    assert load(tmp_path / "out").config == model.config
    torch.save({"x": torch.ones(2)}, tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth: holds no 'visual\.conv1\.weight'"):
        convert(tmp_path / "other.pth", like=str(directory), target=tmp_path / "third")
