"""NV-Embed against what is published of it: transformers' Mistral under a full mask, and the pooling, here in torch."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers, processors, trainers

from routerl_jax.models.config import UnsupportedModelError
from routerl_jax.models.families.nv_embed import NVEmbed, instruct, nv_embed_from_hf
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.parallel.mesh import make_mesh
from tests.models.families import parameters, randomize, same_tensors

WIDTH, LATENTS, HEADS, HEAD_WIDTH = 48, 11, 2, 20
MISTRAL = {
    "hidden_size": WIDTH,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
QUERY = instruct("Given a question, retrieve passages that answer the question")
TEXTS = ["are judo throws allowed in wrestling?", "", "judo", "wrestling is a sport " * 20]


class Pooling(torch.nn.Module):
    """Latent attention pooling (arXiv 2405.17428, section 3.2), with the published names of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        inner = HEADS * HEAD_WIDTH
        self.latents = torch.nn.Parameter(torch.empty(LATENTS, WIDTH))
        parts = {
            "0.norm": torch.nn.LayerNorm(WIDTH),
            "0.norm_context": torch.nn.LayerNorm(WIDTH),
            "0.fn.to_q": torch.nn.Linear(WIDTH, inner, bias=False),
            "0.fn.to_kv": torch.nn.Linear(WIDTH, 2 * inner, bias=False),
            "0.fn.to_out": torch.nn.Linear(inner, WIDTH, bias=False),
            "1.norm": torch.nn.LayerNorm(WIDTH),
            "1.fn.net.0": torch.nn.Linear(WIDTH, 8 * WIDTH),
            "1.fn.net.2": torch.nn.Linear(4 * WIDTH, WIDTH),
        }
        self.parts = torch.nn.ModuleDict({name.replace(".", "/"): part for name, part in parts.items()})

    def named(self) -> dict[str, torch.Tensor]:
        found = {"latents": self.latents}
        for name, part in self.parts.items():
            for key, value in part.named_parameters():
                found[f"cross_attend_blocks.{name.replace('/', '.')}.{key}"] = value
        return found

    def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        def heads(values: torch.Tensor) -> torch.Tensor:
            return values.unflatten(-1, (HEADS, HEAD_WIDTH)).transpose(-2, -3)

        part = {name.replace("/", "."): module for name, module in self.parts.items()}
        q = heads(part["0.fn.to_q"](part["0.norm"](x)))
        k, v = part["0.fn.to_kv"](part["0.norm_context"](self.latents)).chunk(2, dim=-1)
        weights = torch.softmax(q @ heads(k).transpose(-1, -2) / HEAD_WIDTH**0.5, dim=-1)
        x = x + part["0.fn.to_out"]((weights @ heads(v)).transpose(-2, -3).flatten(-2))
        values, gates = part["1.fn.net.0"](part["1.norm"](x)).chunk(2, dim=-1)
        x = x + part["1.fn.net.2"](values * torch.nn.functional.gelu(gates))
        mean = (x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean, dim=-1)


class Reference:
    """Backbone, pooling and tokenizer of one random model."""

    def __init__(self) -> None:
        self.tokenizer = make_tokenizer()
        torch.manual_seed(0)
        config = transformers.MistralConfig(**MISTRAL, vocab_size=len(self.tokenizer), attn_implementation="eager")
        self.backbone, self.pooling = transformers.MistralModel(config).eval(), Pooling().eval()
        randomize(self.backbone)
        randomize(self.pooling)

    def hidden(self, ids: np.ndarray, mask: np.ndarray) -> torch.Tensor:
        lowest = torch.finfo(torch.float32).min
        seen = torch.where(torch.as_tensor(mask)[:, None, None, :], 0.0, lowest).expand(-1, 1, ids.shape[1], -1)
        with torch.no_grad():
            return self.backbone(
                torch.as_tensor(ids), attention_mask=seen.contiguous(), use_cache=False
            ).last_hidden_state

    def embed(self, text: str, prefix: str, longest: int) -> np.ndarray:
        """The published `encode`: eos behind the text, and the prefix's own count of tokens out of the mean."""
        tok = self.tokenizer
        ids = tok([prefix + text + "</s>"], truncation=True, max_length=longest, return_tensors="np")["input_ids"]
        keep = np.ones(ids.shape, np.float32)
        keep[:, : len(tok.tokenize(prefix))] = 0
        with torch.no_grad():
            return self.pooling(self.hidden(ids, np.ones(ids.shape, bool)), torch.as_tensor(keep)).numpy()[0]

    def save(self, directory: pathlib.Path) -> None:
        tensors = {f"embedding_model.{name}": value for name, value in self.backbone.state_dict().items()}
        tensors |= {f"latent_attention_model.{name}": value for name, value in self.pooling.named().items()}
        directory.mkdir(exist_ok=True)
        save_file(
            {name: value.detach().contiguous() for name, value in tensors.items()}, directory / "model.safetensors"
        )
        text = self.backbone.config.to_dict() | {"model_type": "bidir_mistral", "sliding_window": 8}
        (directory / "config.json").write_text(json.dumps(config_json(text_config=text)))
        self.tokenizer.save_pretrained(directory)


def config_json(**changes: Any) -> dict[str, Any]:
    latent = {"num_latents_value": LATENTS, "num_cross_heads": HEADS, "cross_dim_head": HEAD_WIDTH}
    return {
        "model_type": "nvembed",
        "padding_side": "right",
        "add_eos": True,
        "mask_type": "b",
        "is_mask_instruction": True,
        "text_config": MISTRAL | {"model_type": "bidir_mistral", "vocab_size": 99},
        "latent_attention_config": latent | {"hidden_dim": WIDTH, "latent_dim": WIDTH, "output_normalize": True},
    } | changes


def make_tokenizer() -> Any:
    """Of Llama's kind: a space belongs to the word after it, bos in front, eos as text."""
    inner = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    inner.train_from_iterator([*TEXTS, QUERY] * 3, trainers.BpeTrainer(vocab_size=90, special_tokens=special))
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def directory(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    home = tmp_path_factory.mktemp("nv_embed")
    reference.save(home)
    return home


def load(directory: pathlib.Path, **options: Any) -> NVEmbed:
    model = load_pretrained(str(directory), **options)
    assert isinstance(model, NVEmbed)
    return model


@pytest.fixture(scope="module")
def model(directory: pathlib.Path) -> NVEmbed:
    return load(directory)


def test_hidden_states_see_the_whole_text(reference: Reference, model: NVEmbed) -> None:
    """1e-4 on values of about 1: float32 sums in another order. The window in config.json is not used, as published."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, len(reference.tokenizer), (3, 20))
    mask = np.arange(20) < np.array([[20], [13], [1]])
    got = np.asarray(nnx.jit(NVEmbed.__call__)(model, tokens, mask))
    np.testing.assert_allclose(got[mask], reference.hidden(tokens, mask).numpy()[mask], rtol=0, atol=1e-4)
    other = tokens.copy()
    other[0, -1] = (other[0, -1] + 1) % len(reference.tokenizer)
    assert np.abs(np.asarray(nnx.jit(NVEmbed.__call__)(model, other, mask))[0, 0] - got[0, 0]).max() > 1e-3


@pytest.mark.parametrize("prefix", ["", QUERY])
def test_embeddings(reference: Reference, model: NVEmbed, prefix: str) -> None:
    """1e-5: unit vectors. Texts too long lose their end, and eos with it."""
    got = model.embed(TEXTS, prefix=prefix, batch_size=3)
    expected = [reference.embed(text, prefix, 64) for text in TEXTS]
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(model.embed(TEXTS, kind="query" if prefix else "passage", batch_size=3), got)
    ids = [model.encode(text, prefix) for text in TEXTS]
    np.testing.assert_array_equal(model.embed(ids, prefix=prefix, batch_size=3), got)
    assert ids[2][-1] == 2
    assert len(ids[3]) == 64
    assert ids[3][-1] != 2


def test_the_instruction_is_left_out_of_the_mean(reference: Reference, model: NVEmbed) -> None:
    """Its last token, which the tokenizer joins to the text, makes room for bos: what is left begins with the text."""
    count = len(reference.tokenizer.tokenize(QUERY))
    text = reference.tokenizer.tokenize(TEXTS[0])
    assert model.encode(TEXTS[0], QUERY)[count:] == [*reference.tokenizer.convert_tokens_to_ids(text), 2]


def test_round_trip(reference: Reference, directory: pathlib.Path, model: NVEmbed, tmp_path: pathlib.Path) -> None:
    save_pretrained(model, tmp_path)
    same_tensors(tmp_path, directory)
    again = load(tmp_path)
    assert again.config == model.config
    for path, value in parameters(again).items():
        np.testing.assert_array_equal(value, parameters(model)[path])
    names = load_file(tmp_path / "model.safetensors")
    backbone = transformers.MistralModel(reference.backbone.config)
    backbone.load_state_dict(
        {
            name.removeprefix("embedding_model."): torch.as_tensor(value)
            for name, value in names.items()
            if name.startswith("embedding_model.")
        }
    )
    exported = json.loads((tmp_path / "config.json").read_text())
    original = json.loads((directory / "config.json").read_text())
    assert exported["latent_attention_config"] == original["latent_attention_config"] | {
        "model_type": "latent_attention"
    }
    theirs = transformers.MistralConfig(**{**exported["text_config"], "model_type": "mistral"})
    for key in MISTRAL:
        assert getattr(theirs, key) == getattr(reference.backbone.config, key), key


def test_on_a_mesh(directory: pathlib.Path, model: NVEmbed) -> None:
    """Heads of the pooling, and keys and values behind one another in one tensor, are split too; 2e-6: sums of halves."""
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    spread = load(directory, mesh=mesh, layout="fsdp+tensor")
    for name in ("q", "kv", "o", "up", "down"):
        shards = getattr(spread.pooler, name)[...].addressable_shards
        assert len({str(shard.index) for shard in shards}) == 4, name
    np.testing.assert_allclose(spread.embed(TEXTS[:3]), model.embed(TEXTS[:3]), rtol=0, atol=2e-6)


def test_bfloat16(directory: pathlib.Path, model: NVEmbed) -> None:
    """0.008 on unit vectors of width 48: roundings of 2^-9 in two layers and the pooling."""
    half = load(directory, dtype="bfloat16")
    np.testing.assert_allclose(half.embed(TEXTS[:3]), model.embed(TEXTS[:3]), rtol=0, atol=0.008)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding_side": "left"}, "padding_side='left' is not supported; supported: 'right'"),
        ({"text_config": {"model_type": "mistral"}}, "text_config: model_type='mistral' is not supported"),
        (
            {"latent_attention_config": {"latent_dim": 32, "hidden_dim": WIDTH}},
            "latent_attention_config: latent_dim=32 is not supported; supported: the width of the text model, 48",
        ),
    ],
)
def test_unsupported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"^dir/config.json: {message}"):
        nv_embed_from_hf(config_json(**changes), "dir/config.json")


def test_as_published() -> None:
    """NV-Embed-v2's config.json: 7.85 billion parameters, 512 latents of width 4096 and 8 heads of that width."""
    text = {
        "model_type": "bidir_mistral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
    }
    config = nv_embed_from_hf({"model_type": "nvembed", "text_config": text})
    assert (config.latents, config.latent_heads, config.latent_head_dim, config.text_length) == (512, 8, 4096, 4096)
    assert config.text.window is None
    model = nnx.eval_shape(lambda: NVEmbed(config, jax.random.key(0)))
    assert model.longest_text == 4096
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert round(count / 1e9, 2) == 7.85
