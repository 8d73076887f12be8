"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL whole, beside transformers in float32: logits, gradients, and the way there and back.

Tolerance 1e-4: both sides work in float32 and differ in the order of their sums; logits here reach 5.
"""

import copy
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from routerl_jax.models import image_tokens
from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.decoder import Features
from routerl_jax.models.families.qwen_vl import vision_language_from_hf, vision_language_rules
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.models.images import encoded_image, image_uri
from routerl_jax.models.lora import LoraConfig, LoraRule, apply_lora
from routerl_jax.models.patches import concatenate
from routerl_jax.models.peft import save_adapter
from routerl_jax.models.vision_language import VisionLanguageModel
from routerl_jax.parallel.mesh import make_mesh
from tests.models.families import randomize
from tests.models.test_lora import with_b

START, IMAGE, END = 120, 121, 122
_TEXT = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [2, 2, 2]},
    "bos_token_id": None,
    "eos_token_id": 2,
}
_TOWERS = {
    "qwen2_5_vl": {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 40,
        "out_hidden_size": 48,
        "fullatt_block_indexes": [1],
    },
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 48},
    "qwen3_vl": {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 40,
        "out_hidden_size": 48,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1],
    },
}
_INTERLEAVED = {
    "head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [3, 2, 1]},
}
_CLASSES = {
    "qwen2_5_vl": (transformers.Qwen2_5_VLConfig, transformers.Qwen2_5_VLForConditionalGeneration),
    "qwen2_vl": (transformers.Qwen2VLConfig, transformers.Qwen2VLForConditionalGeneration),
    "qwen3_vl": (transformers.Qwen3VLConfig, transformers.Qwen3VLForConditionalGeneration),
}
# Rows: text tokens, or a picture of (height, width). Two pictures; text alone; a picture that is one window and a bit.
ROWS = [[3, (60, 90), 4, (130, 60), 5], [40], [2, (120, 170), 9]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def make(kind: str, tied: bool = False) -> tuple[Any, pathlib.Path]:
        directory = tmp_path_factory.mktemp(kind)
        make_config, make_model = _CLASSES[kind]
        config = make_config(
            text_config=_TEXT | (_INTERLEAVED if kind == "qwen3_vl" else {}),
            vision_config=dict(_TOWERS[kind]),
            image_token_id=IMAGE,
            video_token_id=123,
            vision_start_token_id=START,
            vision_end_token_id=END,
            tie_word_embeddings=tied,
        )
        torch.manual_seed(0)
        model = make_model(config).eval()
        randomize(model)
        model.save_pretrained(directory)
        processor(kind).save_pretrained(directory)
        return model, directory

    return make


def processor(kind: str) -> Qwen2VLImageProcessorPil:
    newest = {"patch_size": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3} if kind == "qwen3_vl" else {}
    return Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=200 * 200, **newest)


def load(directory: pathlib.Path, **options: Any) -> VisionLanguageModel:
    model = load_pretrained(str(directory), **options)
    assert isinstance(model, VisionLanguageModel)
    return model


def pictures(row: list) -> list[np.ndarray]:
    rng = np.random.default_rng(len(row))
    return [rng.integers(0, 256, (*part, 3)).astype(np.uint8) for part in row if isinstance(part, tuple)]


def prompt(row: list, model: VisionLanguageModel) -> list[int]:
    rng = np.random.default_rng(sum(part for part in row if isinstance(part, int)))
    tokens: list[int] = []
    for part in row:
        tokens += rng.integers(3, START, part).tolist() if isinstance(part, int) else [START, IMAGE, END]
    placed = [model.image_processor(picture) for picture in pictures(row)]
    return model.image_tokens.expand(tokens, placed)[0]


def hf_inputs(kind: str, tokens: list[int], images: list[np.ndarray]) -> dict[str, torch.Tensor]:
    inputs = {
        "input_ids": torch.as_tensor([tokens]),
        "mm_token_type_ids": torch.as_tensor([[int(t == IMAGE) for t in tokens]]),
    }
    if images:
        found = processor(kind)(images, return_tensors="np")
        inputs["pixel_values"] = torch.as_tensor(found["pixel_values"])
        inputs["image_grid_thw"] = torch.as_tensor(found["image_grid_thw"])
    return inputs


def hf_logits(hf: Any, tokens: list[int], images: list[np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        return hf(**hf_inputs(hf.config.model_type, tokens, images)).logits[0].float().numpy()


@pytest.mark.parametrize("kind", ["qwen2_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "qwen3_vl"])
def test_rows_with_pictures_and_without(saved: Any, kind: str) -> None:
    """One padded batch of all rows, as a user calls it; each row equals transformers' alone."""
    hf, directory = saved(kind)
    model = load(directory)
    prompts = [prompt(row, model) for row in ROWS]
    width = max(map(len, prompts))
    tokens = np.zeros((len(ROWS), width), int)
    segments = np.zeros((len(ROWS), width), int)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    got = model(tokens, segment_ids=jnp.asarray(segments), images=[pictures(row) for row in ROWS])
    for row, ids in enumerate(prompts):
        expected = hf_logits(hf, ids, pictures(ROWS[row]))
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(got[row, : len(ids)], expected, rtol=0, atol=1e-4)
    text = model(tokens[1:2, : len(prompts[1])])  # a text-only call needs no images at all
    np.testing.assert_allclose(text[0], got[1, : len(prompts[1])], rtol=0, atol=1e-5)
    seen = model(tokens[:1], images=[pictures([(60, 90), (130, 60)])])
    assert np.abs(seen[0, : len(prompts[0])] - got[0, : len(prompts[0])]).max() > 0.01  # other pixels of equal sizes


def test_left_padding(saved: Any) -> None:
    hf, directory = saved("qwen2_5_vl")
    model = load(directory)
    ids = prompt(ROWS[0], model)
    padded = np.asarray([[0] * 7 + ids])
    placed = [model.image_processor(picture) for picture in pictures(ROWS[0])]
    positions = np.zeros((3, 1, len(ids) + 7), int)
    positions[:, 0, 7:] = model.image_tokens.positions(ids, placed)[0]
    got = model(padded, jnp.asarray(positions), jnp.asarray(padded > 0).astype(int), images=[pictures(ROWS[0])])
    np.testing.assert_allclose(got[0, 7:], hf_logits(hf, ids, pictures(ROWS[0])), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "remat"), [("qwen2_5_vl", "full"), ("qwen2_vl", "none"), ("qwen3_vl", "full")])
def test_gradients(saved: Any, kind: str, remat: Any) -> None:
    """Of the mean next-token cross-entropy for every parameter, tower included; 1e-3 of its largest gradient."""
    hf, directory = saved(kind)
    model = load(directory)
    ids, images = prompt(ROWS[0], model), pictures(ROWS[0])
    hf.zero_grad()
    targets = torch.as_tensor([ids])
    logits = hf(**hf_inputs(kind, ids, images)).logits[:, :-1]
    hf_loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets[:, 1:])
    hf_loss.backward()
    placed = [model.image_processor(picture) for picture in images]
    inputs = concatenate(placed)
    index = np.full((1, len(ids)), -1)
    index[np.asarray([ids]) == IMAGE] = inputs.slots[inputs.slots >= 0]
    positions = model.image_tokens.positions(ids, placed)[0][:, None]
    tokens = jnp.asarray([ids])
    graph, params = nnx.split(model, nnx.Param)

    @jax.jit
    def loss_and_gradients(params: nnx.State) -> tuple[jax.Array, nnx.State]:
        def loss(params: nnx.State) -> jax.Array:
            policy = nnx.merge(graph, params)
            values = policy.features(jax.tree.map(lambda x: jnp.asarray(x)[None], inputs), remat=remat)
            features = Features(values=values, index=jnp.asarray(index))
            hidden = policy.hidden(tokens, jnp.asarray(positions), remat=remat, features=features)
            logprobs = jax.nn.log_softmax(policy.unembed(hidden)[:, :-1])
            return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

        return jax.value_and_grad(loss)(params)

    loss, gradients = loss_and_gradients(params)
    np.testing.assert_allclose(loss, hf_loss.item(), rtol=1e-5)
    older = {"model.language_model.": "model.", "model.visual.": "visual."} if kind != "qwen3_vl" else {}
    theirs = {}
    for name, parameter in hf.named_parameters():
        old, new = next((pair for pair in older.items() if name.startswith(pair[0])), ("", ""))
        theirs[new + name.removeprefix(old)] = parameter.grad.numpy()
    rules, gaps = vision_language_rules(model.architecture), {}
    for path, leaf in nnx.to_flat_state(gradients):
        rule, value = rules[path], np.asarray(leaf.get_value())
        for place in np.ndindex(*value.shape[: rule.outer]):
            expected = theirs.pop(rule.name_at(place))
            # keys' biases shift all scores of a query alike: their true gradient is 0, and both sides hold rounding
            scale = max(np.abs(expected).max(), 1e-4)
            gaps[rule.name_at(place)] = np.abs(rule.to_theirs(value[place]) - expected).max() / scale
    assert not theirs
    assert max(gaps.values()) <= 1e-3, max(gaps, key=lambda name: gaps[name])


@pytest.mark.slow
def test_bfloat16(saved: Any) -> None:
    """No further from float32 than twice transformers' own bfloat16 is."""
    hf, directory = saved("qwen2_5_vl")
    model = load(directory)
    ids, images = prompt(ROWS[0], model), pictures(ROWS[0])
    exact = hf_logits(hf, ids, images)
    half_hf = _CLASSES["qwen2_5_vl"][1].from_pretrained(directory, dtype=torch.bfloat16).eval()
    inputs = hf_inputs("qwen2_5_vl", ids, images)
    inputs["pixel_values"] = inputs["pixel_values"].to(torch.bfloat16)
    with torch.no_grad():
        theirs = half_hf(**inputs).logits[0].float().numpy()
    ours = load(directory, dtype="bfloat16")(np.asarray([ids]), images=[images])
    assert ours.dtype == jnp.float32
    assert np.abs(np.asarray(ours[0]) - exact).mean() <= 2 * np.abs(theirs - exact).mean()


@pytest.mark.parametrize(
    ("kind", "tied"),
    [("qwen2_5_vl", False), ("qwen2_5_vl", True), ("qwen2_vl", False), ("qwen3_vl", False), ("qwen3_vl", True)],
)
def test_round_trip(saved: Any, tmp_path: pathlib.Path, kind: str, tied: bool) -> None:
    """Bit for bit, and transformers computes the same logits from the export to the last bit."""
    hf, directory = saved(kind, tied)
    model = load(directory)
    save_pretrained(model, tmp_path)
    again = load(tmp_path)
    assert again.architecture == model.architecture
    assert again.image_processor == model.image_processor
    for one, other in zip(jax.tree.leaves(nnx.state(again, nnx.Param)), jax.tree.leaves(nnx.state(model, nnx.Param))):
        np.testing.assert_array_equal(one, other)
    exported, info = _CLASSES[kind][1].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids, images = prompt(ROWS[2], model), pictures(ROWS[2])
    np.testing.assert_array_equal(hf_logits(exported.eval(), ids, images), hf_logits(hf, ids, images))
    theirs = Qwen2VLImageProcessorPil.from_pretrained(tmp_path)(images, return_tensors="np")["image_grid_thw"]
    assert theirs.tolist() == [list(model.image_processor(picture).grid) for picture in images]


@pytest.mark.slow
def test_on_a_mesh(saved: Any) -> None:
    """Every matrix of the tower is split too; 1e-5: partial sums in another order."""
    _, directory = saved("qwen2_5_vl")
    model, spread = (
        load(directory),
        load(directory, mesh=make_mesh({"data": 2, "fsdp": 2, "tensor": 2}), layout="fsdp+tensor"),
    )
    assert not spread.visual.blocks.qkv[...].sharding.is_fully_replicated
    ids, images = prompt(ROWS[0], model), pictures(ROWS[0])
    run = [one(np.asarray([ids]), images=[images]) for one in (model, spread)]
    np.testing.assert_allclose(run[0], run[1], rtol=0, atol=2e-5)


def test_published_config(saved: Any) -> None:
    """The flat config.json of the hub, whose rope says `mrope`."""
    _, directory = saved("qwen2_5_vl")
    ours = load(directory).architecture
    flat = json.loads((directory / "config.json").read_text())
    text = flat.pop("text_config")
    rope = text.pop("rope_parameters")
    flat |= {key: value for key, value in text.items() if key not in ("model_type", "tie_word_embeddings")}
    flat |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    assert vision_language_from_hf(flat) == ours
    flat["rope_scaling"] = None
    with pytest.raises(UnsupportedModelError, match=r"^config\.json: rope_parameters without mrope_section"):
        vision_language_from_hf(flat)


@pytest.mark.slow
def test_adapters_of_the_text_part(saved: Any, tmp_path: pathlib.Path) -> None:
    """Both ways beside peft, which leaves the tower alone though its modules have names of the decoder's."""
    hf, directory = saved("qwen2_5_vl")
    model = load(directory)
    apply_lora(model, LoraConfig(rank=4, rules={"up": LoraRule(modules="up", rank=2)}).build(), jax.random.key(0))
    with_b(model)
    save_adapter(model, tmp_path / "ours", str(directory))
    tokens = np.arange(3, 20)[None]
    text = {"input_ids": torch.as_tensor(tokens), "mm_token_type_ids": torch.zeros(tokens.shape, dtype=torch.int)}
    twin = peft.PeftModel.from_pretrained(copy.deepcopy(hf), tmp_path / "ours").eval()
    assert not [name for name, _ in twin.named_parameters() if "lora" in name and "visual" in name]
    with torch.no_grad():
        np.testing.assert_allclose(model(jnp.asarray(tokens)), twin(**text).logits, rtol=0, atol=1e-4)
        assert np.abs(twin(**text).logits - hf(**text).logits).max() > 0.5
    again = load(tmp_path / "ours")
    np.testing.assert_array_equal(again(jnp.asarray(tokens)), model(jnp.asarray(tokens)))

    settings = peft.LoraConfig(r=3, target_modules=r".*language_model.*\.(q_proj|up_proj)", init_lora_weights=False)
    theirs: Any = peft.get_peft_model(copy.deepcopy(hf), settings).eval()
    theirs.peft_config["default"].base_model_name_or_path = str(directory)
    theirs.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        np.testing.assert_allclose(
            load(tmp_path / "theirs")(jnp.asarray(tokens)), theirs(**text).logits, rtol=0, atol=1e-4
        )


def test_processed_pictures_are_kept_as_far_as_memory_goes(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last used ones; and one that is larger than what may be kept is still processed once for its group."""
    host = load(saved("qwen2_vl")[1]).image_tokens
    first, second, third = (np.full((56, 56, 3), level, np.uint8) for level in range(3))
    size = host.process(first).patches.nbytes
    monkeypatch.setattr(image_tokens, "_KEPT_BYTES", 2 * size)
    kept, old = host.process(first), host.process(second)
    assert host.process(first) is kept
    host.process(third)
    assert host.process(first) is kept
    assert host.process(second) is not old
    monkeypatch.setattr(image_tokens, "_KEPT_BYTES", size - 1)
    assert host.process(third) is host.process(third)


def test_equal_encoded_pictures_are_processed_once(
    saved: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A knowledge base gives a fresh string for the same page every time."""
    host = load(saved("qwen2_vl")[1]).image_tokens
    pictures = [Image.new("RGB", (56, 56), color) for color in ("red", "blue")]
    red, blue = (encoded_image(picture)[0] for picture in pictures)
    kept = host.process(red)
    assert host.process(bytearray(red)) is kept
    assert host.process(blue) is not kept
    uris = [image_uri(pictures[0]) for _ in range(2)]
    assert uris[0] is not uris[1]
    assert host.process(uris[0]) is host.process(uris[1])
    path = tmp_path / "page.png"
    path.write_bytes(red)
    read = host.process(path)
    assert host.process(str(path)) is read
    path.write_bytes(blue)
    np.testing.assert_array_equal(host.process(path).patches, host.process(blue).patches)
    with pytest.raises(ValueError, match=r"gone\.png: can't be read"):
        host.process(tmp_path / "gone.png")
    monkeypatch.setattr(image_tokens, "_KEPT_BYTES", 0)  # what tells a picture from others takes memory, too
    held = host.process("data:image/png;base64," + uris[0].partition(",")[2])
    host.process(image_uri(Image.new("RGB", (56, 56), "green")))
    assert host.process(uris[0]) is not held


def test_bad_prompts(saved: Any) -> None:
    model = load(saved("qwen2_5_vl")[1])
    images = pictures(ROWS[2])
    with pytest.raises(ValueError, match=r"0 image tokens \(id 121\) stand for 1 images"):
        model.image_tokens.expand([1, 2, 3], [model.image_processor(images[0])])
    with pytest.raises(ValueError, match=r"1 whole image marks \(\[120, 121, 122\]\) stand for 2"):
        model.image_tokens.expand([IMAGE, IMAGE, IMAGE, START, IMAGE, END], [model.image_processor(images[0])] * 2)
    with pytest.raises(ValueError, match="tokens end with an image"):
        model.image_tokens.expand([1, START, IMAGE], [model.image_processor(images[0])])
    with pytest.raises(ValueError, match="images of 1 rows for 2 rows of tokens"):
        model(np.ones((2, 4), int), images=[[]])
