"""CLIP (arXiv 2103.00020) with UniIR's score fusion (arXiv 2311.17136): the model, and how Hugging Face stores it.

Texts, pictures, or both. UniIR publishes its weights as a .pth with the names of OpenAI's `clip` package;
`models.openai_clip.convert` makes the Hugging Face directory of it that is read here.
Dimensions: B batch, T time (tokens or patches), D width, S side of a picture, E width of the embeddings.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int
from PIL import Image

from routerl_jax.core.files import read_json
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import TextAndImage
from routerl_jax.models.attention import Attention
from routerl_jax.models.config import Prompts, UnsupportedModelError, refuse_quantized
from routerl_jax.models.embedding import PictureEmbedder, TransformerBlocks, run_layers, text_and_picture
from routerl_jax.models.families.sentence import read_texts, save_texts
from routerl_jax.models.family import (
    FROM_HEADS,
    MATRIX,
    NEEDED,
    TO_HEADS,
    TRANSPOSED,
    VECTOR,
    Family,
    Rule,
    Rules,
    read_keys,
    with_biases,
    write_json,
    write_keys,
)
from routerl_jax.models.images import CLIP_MEAN, CLIP_STD, ImageSource, decode_image, normalised_levels
from routerl_jax.models.layers import Initializer, layer_norm, matmul_precision

_MOST_PIXELS = 2**28  # of a picture after resizing: a thin strip becomes huge before the crop takes its middle


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipImageProcessor:
    """The preprocessing of a picture for CLIP's vision tower: resized, centre-cropped, normalised, by numpy and Pillow.

    Every value is equal to that of transformers' CLIPImageProcessor (its Pillow version). OpenAI's own pipeline, which UniIR
    uses, rounds half of an odd margin of the crop to even; this one and transformers round down. So crops differ by at most one
    pixel.

    Attributes:
      size: length of the shorter side after resizing, pixels; or (height, width), which ignores the aspect ratio.
      crop: side of the square in the middle that is kept, pixels. Parts outside the picture are black.
      mean, std: mean and standard deviation of the channels, after rescaling.
      rescale: factor for pixel values from 0 to 255.
      resample: Pillow's number of the filter.
    """

    size: int | tuple[int, int] = 224
    crop: int = 224
    mean: tuple[float, float, float] = CLIP_MEAN
    std: tuple[float, float, float] = CLIP_STD
    rescale: float = 1 / 255
    resample: int = int(Image.Resampling.BICUBIC)

    def __call__(self, source: ImageSource) -> Float32[np.ndarray, "crop crop 3"]:
        """Pixels of one picture. Raises ValueError if it is no picture (`images.decode_image`)."""
        pixels = self._middle(decode_image(source))
        table = normalised_levels(self.mean, self.std, self.rescale)
        return np.stack([table[channel][pixels[:, :, channel]] for channel in range(3)], axis=-1)

    def _middle(self, image: Image.Image) -> np.ndarray:
        """The crop of the resized picture, uint8."""
        if isinstance(self.size, tuple):
            height, width = self.size
        else:
            long = int(self.size * max(image.size) / min(image.size))
            height, width = (long, self.size) if image.width <= image.height else (self.size, long)
        top, left = (height - self.crop) // 2, (width - self.crop) // 2
        if height * width > _MOST_PIXELS:
            raise ValueError(
                f"a picture of {image.width}x{image.height} pixels would become {width}x{height} before the middle is cut out; "
                f"crop or pad it"
            )
        resized = np.asarray(image.resize((width, height), Image.Resampling(self.resample)))
        # If a side is shorter than the crop, it is padded with black on both ends; an odd line goes to the start.
        above, before = max(0, -top), max(0, -left)
        resized = resized[max(0, top) : max(0, top) + self.crop, max(0, left) : max(0, left) + self.crop]
        canvas = np.zeros((self.crop, self.crop, 3), np.uint8)
        canvas[above : above + resized.shape[0], before : before + resized.shape[1]] = resized
        return canvas

    def to_hf(self) -> dict[str, Any]:
        """The preprocessor_config.json that transformers loads as the same processor."""
        if isinstance(self.size, tuple):
            size = {"height": self.size[0], "width": self.size[1]}
        else:
            size = {"shortest_edge": self.size}
        return {
            "image_processor_type": "CLIPImageProcessor",
            "size": size,
            "crop_size": {"height": self.crop, "width": self.crop},
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "rescale_factor": self.rescale,
            "resample": self.resample,
            "do_convert_rgb": True,
            "do_resize": True,
            "do_center_crop": True,
            "do_rescale": True,
            "do_normalize": True,
        }


def processor_from_hf(config: Mapping[str, Any], source: str = "preprocessor_config.json") -> ClipImageProcessor:
    """Reads a preprocessor_config.json, or a processor_config.json with an `image_processor` in it.

    Raises:
      UnsupportedModelError: processing that this class does not do; the values would differ.
    """
    config = config.get("image_processor", config)
    for key in ("do_resize", "do_center_crop", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not config.get(key, True):
            raise UnsupportedModelError(f"{source}: {key}=false is not supported; supported: true")
    kind = str(config.get("image_processor_type") or config.get("feature_extractor_type") or "CLIPImageProcessor")
    if not kind.startswith(("CLIPImageProcessor", "CLIPFeatureExtractor")):
        raise UnsupportedModelError(
            f"{source}: image_processor_type {kind!r} is not supported; supported: CLIPImageProcessor"
        )
    default = ClipImageProcessor()
    size, crop = config.get("size", default.size), config.get("crop_size", default.crop)
    if isinstance(size, Mapping):
        if set(size) == {"height", "width"}:
            size = (int(size["height"]), int(size["width"]))
        elif set(size) == {"shortest_edge"}:
            size = int(size["shortest_edge"])
        else:
            raise UnsupportedModelError(
                f"{source}: size={dict(size)} is not supported; supported: shortest_edge, or height and width"
            )
    if isinstance(crop, Mapping):
        if set(crop) != {"height", "width"} or crop["height"] != crop["width"]:
            raise UnsupportedModelError(f"{source}: crop_size={dict(crop)} is not supported; supported: a square")
        crop = crop["height"]
    mean, std = (config.get(key) or getattr(default, key[6:]) for key in ("image_mean", "image_std"))
    return ClipImageProcessor(
        size=size,
        crop=int(crop),
        mean=tuple(mean),
        std=tuple(std),
        rescale=config.get("rescale_factor", default.rescale),
        resample=config.get("resample", default.resample),
    )


ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}
_LEGACY_EOS = 2  # configs of early exports say this and mean the largest id of the row


@dataclasses.dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """A pre-LayerNorm transformer."""

    embed: int
    layers: int
    heads: int
    mlp: int
    norm_eps: float = 1e-5
    activation: str = "quick_gelu"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """Two towers and their projections into one space."""

    model_type: str = "clip"
    text: TowerConfig
    vision: TowerConfig
    vocab_size: int
    max_length: int  # tokens
    image_size: int  # side of a picture, pixels
    patch: int  # side of a patch, pixels
    projection: int  # width of the embeddings
    bos_id: int | None = None
    eos_id: int | None = None  # a text's vector is taken at its first one; 2: at the largest id
    pad_id: int | None = None
    init_scale: float = 0.02
    images: ClipImageProcessor = ClipImageProcessor()
    text_length: int | None = None  # tokens of a text that `embed` reads; None: max_length
    prompts: Prompts = Prompts()

    def __post_init__(self) -> None:
        for name, tower in (("text", self.text), ("vision", self.vision)):
            if tower.embed % tower.heads:
                raise ValueError(f"{name}: embed={tower.embed} must be a multiple of heads={tower.heads}")
            if tower.activation not in ACTIVATIONS:
                raise ValueError(f"{name}: activation={tower.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.images.crop != self.image_size:
            raise ValueError(f"pictures are cut to {self.images.crop} pixels, but the tower reads {self.image_size}")

    @property
    def patches(self) -> int:
        """Patches of a picture; a last one that is not whole is not read."""
        return (self.image_size // self.patch) ** 2


class TowerBlocks(TransformerBlocks):
    """Norms come before attention and feed-forward. `__call__` runs the layer whose slice it holds."""

    def __call__(self, x_BTD: Array, causal: bool, attention: Attention) -> Array:
        eps = self.config.norm_eps
        h = layer_norm(x_BTD, self.attention_norm[...], self.attention_norm_bias[...], eps)
        x_BTD = x_BTD + self.attend(h, None, causal, attention)
        h = layer_norm(x_BTD, self.mlp_norm[...], self.mlp_norm_bias[...], eps)
        return x_BTD + self.feed_forward(h, ACTIVATIONS[self.config.activation])


class TextTower(nnx.Module):
    """Token ids to one vector per row."""

    def __init__(self, config: ClipConfig, init: Initializer) -> None:
        tower = config.text
        self.config = config
        self.word = init.normal((config.vocab_size, tower.embed), ("vocab", "embed"))
        self.position = init.normal((config.max_length, tower.embed), (None, "embed"))
        self.blocks = TowerBlocks(tower, init)
        self.final_norm = init.ones((tower.embed,), (None,))
        self.final_norm_bias = init.zeros((tower.embed,), (None,))
        self.projection = init.normal((tower.embed, config.projection), ("embed", "mlp"))

    def __call__(self, tokens: Int[Array, "B T"], attention: Attention) -> Float[Array, "B E"]:
        x = run_layers(self.blocks, self.word[...][tokens] + self.position[...][: tokens.shape[1]], True, attention)
        eos = self.config.eos_id
        ends = tokens if eos == _LEGACY_EOS else (tokens == eos).astype(jnp.int32)
        x = x[jnp.arange(len(x)), jnp.argmax(ends, axis=1)]
        x = layer_norm(x, self.final_norm[...], self.final_norm_bias[...], self.config.text.norm_eps)
        return x @ self.projection[...]


class VisionTower(nnx.Module):
    """Pictures to one vector each."""

    def __init__(self, config: ClipConfig, init: Initializer) -> None:
        tower = config.vision
        self.config = config
        self.patch = init.normal((3, config.patch, config.patch, tower.embed), (None, None, None, "embed"))
        self.cls = init.normal((tower.embed,), (None,))
        self.position = init.normal((config.patches + 1, tower.embed), (None, "embed"))
        self.first_norm = init.ones((tower.embed,), (None,))
        self.first_norm_bias = init.zeros((tower.embed,), (None,))
        self.blocks = TowerBlocks(tower, init)
        self.final_norm = init.ones((tower.embed,), (None,))
        self.final_norm_bias = init.zeros((tower.embed,), (None,))
        self.projection = init.normal((tower.embed, config.projection), ("embed", "mlp"))

    def __call__(self, pixels: Float[Array, "B S S 3"], attention: Attention) -> Float[Array, "B E"]:
        side, eps = self.config.patch, self.config.vision.norm_eps
        count = self.config.image_size // side
        whole = pixels[:, : count * side, : count * side].astype(self.patch[...].dtype)
        grid = whole.reshape(len(pixels), count, side, count, side, 3)
        x = jnp.einsum("ByhxwC,ChwD->ByxD", grid, self.patch[...]).reshape(len(pixels), count * count, -1)
        cls = jnp.broadcast_to(self.cls[...], (len(x), 1, x.shape[-1]))
        x = jnp.concatenate([cls, x], axis=1) + self.position[...]
        x = layer_norm(x, self.first_norm[...], self.first_norm_bias[...], eps)
        x = run_layers(self.blocks, x, False, attention)[:, 0]
        return layer_norm(x, self.final_norm[...], self.final_norm_bias[...], eps) @ self.projection[...]


class Clip(PictureEmbedder):
    """`embed` takes texts, pictures (`images.decode_image`; a string is a text) and `TextAndImage`s, in any mix.

    Vectors are UniIR's CLIP-SF: the sum of the two towers' outputs, which is then normalised. A missing part, or an empty text,
    counts as zero. For a single part this is CLIP's usual normalised embedding. (UniIR rounds vectors to float16 before it
    normalises them; this class doesn't.)
    """

    config: ClipConfig

    def __init__(
        self,
        config: ClipConfig,
        key: jax.Array,
        *,
        param_dtype: jnp.dtype = jnp.float32,
        compute_dtype: jnp.dtype | None = None,
    ) -> None:
        super().__init__(config, config.projection, param_dtype, compute_dtype)
        init = Initializer(key, config.init_scale, param_dtype)
        self.text = TextTower(config, init)
        self.vision = VisionTower(config, init)
        self.logit_scale = nnx.Param(jnp.asarray(np.log(1 / 0.07), param_dtype), axes=())  # of the training loss

    def encode_text(self, tokens: Int[Array, "B T"], *, attention: Attention | None = None) -> Float[Array, "B E"]:
        """Projected text vectors, float32, not normalised. Rows are padded on the right; attention is causal, so no mask is
        needed."""
        word = self.text.word[...]
        with matmul_precision(word.dtype):
            return self.text(jnp.asarray(tokens), attention or Attention.for_weight(word)).astype(jnp.float32)

    def encode_image(
        self, pixels: Float[Array, "B S S 3"], *, attention: Attention | None = None
    ) -> Float[Array, "B E"]:
        """Projected vectors of preprocessed pictures (`config.images`), float32, not normalised."""
        patch = self.vision.patch[...]
        with matmul_precision(patch.dtype):
            return self.vision(jnp.asarray(pixels), attention or Attention.for_weight(patch)).astype(jnp.float32)

    def _vectors(
        self, inputs: Sequence[str | list[int] | ImageSource | TextAndImage], prefix: str, batch_size: int, bar: Bar
    ) -> Float32[np.ndarray, "N E"]:
        parts = [text_and_picture(item) for item in inputs]
        written = [i for i, (text, _) in enumerate(parts) if text]
        shown = [i for i, (_, image) in enumerate(parts) if image is not None]
        bar.total = len(written) + len(shown)
        fused = np.zeros((len(parts), self.dim), np.float32)
        if written:
            ids = self._ids([text for text, _ in parts if text], prefix)
            results = self._run(
                "encode_text",
                [len(i) for i in ids],
                functools.partial(self._text_batch, ids),
                batch_size,
                self.longest_text,
            )
            fused[written] += self._gather(results, len(ids), bar)
        if shown:
            images = [image for _, image in parts if image is not None]
            fill = functools.partial(self._image_batch, images)
            results = self._run("encode_image", [1] * len(images), fill, batch_size, 1)
            fused[shown] += self._gather(results, len(images), bar)
        # On the host, because a device program's order of summation would depend on the number of inputs.
        return fused / np.maximum(np.linalg.norm(fused, axis=1, keepdims=True), 1e-12)

    def _text_batch(self, ids: list[list[int]], rows: list[int], shape: tuple[int, int]) -> tuple[np.ndarray]:
        return self._token_batch(ids, rows, shape)[:1]

    def _image_batch(self, images: list[ImageSource], rows: list[int], shape: tuple[int, int]) -> tuple[np.ndarray]:
        pixels = np.zeros((shape[0], self.config.image_size, self.config.image_size, 3), np.float32)
        for row, i in enumerate(rows):
            pixels[row] = self.config.images(images[i])
        return (pixels,)


def uniir_text(text: str, instruction: str = "") -> str:
    """A text in the form of UniIR's data sets: instruction first, then the text with a capital and a mark at its end."""
    text = f"{instruction} {text}" if instruction else text
    text = text.replace("\r", "").strip().strip('"')
    if not text:
        return text
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "?", "!")) else ".")


_KERNEL = ((3,), (0,), (1,), (2,))  # ours [channels, side, side, embed], theirs with embed first
# Of a tower, whose section has all keys: those that are missing get transformers' defaults.
_TOWER_KEYS = {
    "embed": ("hidden_size", NEEDED),
    "layers": ("num_hidden_layers", NEEDED),
    "heads": ("num_attention_heads", NEEDED),
    "mlp": ("intermediate_size", NEEDED),
    "norm_eps": ("layer_norm_eps", NEEDED),
    "activation": ("hidden_act", NEEDED),
}
_TOWER = {"layer_norm_eps": 1e-5, "hidden_act": "quick_gelu", "num_hidden_layers": 12}
_TEXT = _TOWER | {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "pad_token_id": 1,
    "bos_token_id": 49406,
    "eos_token_id": 49407,
}
_VISION = _TOWER | {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
}


def clip_from_hf(config: Mapping[str, Any], source: str = "config.json") -> ClipConfig:
    """Reads a CLIP config.json. Raises UnsupportedModelError for features that would change the vectors."""
    refuse_quantized(config, source)
    text, vision = _part(config, "text_config", _TEXT), _part(config, "vision_config", _VISION)
    for name, part, key, kind in (
        ("vision_config", vision, "image_size", "a number"),
        ("vision_config", vision, "patch_size", "a number"),
        ("text_config", text, "eos_token_id", "a number"),
        ("vision_config", vision, "num_channels", "3"),
    ):
        if not isinstance(part[key], int) or (key == "num_channels" and part[key] != 3):
            raise UnsupportedModelError(f"{source}: {name}: {key}={part[key]!r} is not supported; supported: {kind}")
    for name, part in (("text_config", text), ("vision_config", vision)):
        if part["hidden_act"] not in ACTIVATIONS:
            raise UnsupportedModelError(
                f"{source}: {name}: hidden_act={part['hidden_act']!r} is not supported; supported: {', '.join(ACTIVATIONS)}"
            )
    return ClipConfig(
        text=TowerConfig(**read_keys(text, _TOWER_KEYS)),
        vision=TowerConfig(**read_keys(vision, _TOWER_KEYS)),
        vocab_size=text["vocab_size"],
        max_length=text["max_position_embeddings"],
        image_size=vision["image_size"],
        patch=vision["patch_size"],
        projection=config.get("projection_dim", 512),
        bos_id=text["bos_token_id"],
        eos_id=text["eos_token_id"],
        pad_id=text["pad_token_id"],
        images=ClipImageProcessor(size=vision["image_size"], crop=vision["image_size"]),
    )


def clip_to_hf(config: ClipConfig, dtype: str) -> dict[str, Any]:
    """The config.json that `transformers` loads as the same architecture."""
    text, vision = (
        write_keys(tower, _TOWER_KEYS) | {"projection_dim": config.projection} for tower in (config.text, config.vision)
    )
    return {
        "architectures": ["CLIPModel"],
        "model_type": "clip",
        "projection_dim": config.projection,
        "text_config": text
        | {
            "model_type": "clip_text_model",
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_length,
            "bos_token_id": config.bos_id,
            "eos_token_id": config.eos_id,
            "pad_token_id": config.pad_id,
        },
        "vision_config": vision
        | {
            "model_type": "clip_vision_model",
            "num_channels": 3,
            "image_size": config.image_size,
            "patch_size": config.patch,
        },
        "torch_dtype": dtype,
    }


def clip_rules(config: ClipConfig) -> Rules:
    """Our parameter path -> Hugging Face tensor."""
    del config  # all have the same
    text, vision = "text_model.embeddings.", "vision_model.embeddings."
    return {
        ("logit_scale",): Rule("logit_scale", ()),
        ("text", "word"): Rule(text + "token_embedding.weight", MATRIX),
        ("text", "position"): Rule(text + "position_embedding.weight", MATRIX),
        ("text", "projection"): Rule("text_projection.weight", TRANSPOSED),
        ("vision", "patch"): Rule(vision + "patch_embedding.weight", _KERNEL),
        ("vision", "cls"): Rule(vision + "class_embedding", VECTOR),
        ("vision", "position"): Rule(vision + "position_embedding.weight", MATRIX),
        ("vision", "projection"): Rule("visual_projection.weight", TRANSPOSED),
        **with_biases(
            {
                ("text", "final_norm"): ("text_model.final_layer_norm", VECTOR),
                ("vision", "first_norm"): ("vision_model.pre_layrnorm", VECTOR),
                ("vision", "final_norm"): ("vision_model.post_layernorm", VECTOR),
            }
        ),
        **_block_rules("text"),
        **_block_rules("vision"),
    }


def complete(config: ClipConfig, directory: pathlib.Path, config_json: Mapping[str, Any]) -> ClipConfig:
    """Image processing, text length and prompts, from the directory's other files.

    Raises:
      UnsupportedModelError: image processing that is not implemented.
      ValueError: pictures of another size than the tower reads.
    """
    del config_json
    settings = read_texts(directory, config.max_length)
    path = directory / "preprocessor_config.json"
    if path.is_file():
        settings["images"] = processor_from_hf(read_json(path), str(path))
    try:
        return dataclasses.replace(config, **settings)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save(model: Clip, directory: pathlib.Path) -> None:
    """Writes the files that `complete` reads."""
    write_json(directory / "preprocessor_config.json", model.config.images.to_hf())
    save_texts(model, directory)


def _part(config: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A tower's section. As in transformers, an old section `name`_dict replaces it entirely, if there is one."""
    old = config.get(f"{name}_dict")
    part = (config.get(name) or {}) if old is None else old
    return {**defaults, **{key: value for key, value in part.items() if key in defaults}}


def _block_rules(tower: str) -> Rules:
    layer = f"{tower}_model.encoder.layers.{{}}."
    modules = {
        "qkv": ("|".join(f"{layer}self_attn.{part}_proj" for part in "qkv"), TO_HEADS),
        "o": (layer + "self_attn.out_proj", FROM_HEADS),
        "attention_norm": (layer + "layer_norm1", VECTOR),
        "mlp_norm": (layer + "layer_norm2", VECTOR),
        "up": (layer + "mlp.fc1", TRANSPOSED),
        "down": (layer + "mlp.fc2", TRANSPOSED),
    }
    return with_biases({(tower, "blocks", name): module for name, module in modules.items()})


FAMILY = Family(
    role="encoder",
    read=clip_from_hf,
    write=clip_to_hf,
    create=Clip,
    rules=clip_rules,
    complete=complete,
    save=save,
)
