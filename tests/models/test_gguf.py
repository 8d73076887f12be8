"""GGUF import against transformers' own GGUF reader, on a small file written here; the real one is in test_smollm2."""

import json
import pathlib
from typing import Any

import gguf
import numpy as np
import pytest
import transformers

from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.data.vocabulary import train_tokenizer
from routerl_jax.models.conversion import convert_llama
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained
from tests.models.families import hf_logits, parameters

EMBED, HEADS, KV_HEADS, WIDTH, MLP, LAYERS, VOCAB = 48, 4, 2, 12, 88, 2, 300


def write_gguf(
    path: pathlib.Path, *, architecture: str = "llama", tokenizer: str = "gpt2", pre: str = "smollm", tied: bool = False
) -> tuple[Tokenizer, list[str]]:
    """A random Llama in llama.cpp's format; returns its tokenizer as it was trained, and the vocabulary."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(EMBED)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1000.0)
    writer.add_vocab_size(VOCAB)
    trained = train_tokenizer(["low lower lowest  1 " * 9], VOCAB, ["<|im_end|>"], context=64)
    pieces = trained.hf.convert_ids_to_tokens(list(range(len(trained))))
    pieces += [f"<unused{i}>" for i in range(VOCAB - len(pieces))]
    merges = json.loads(trained.hf.backend_tokenizer.to_str())["model"]["merges"]
    control = {"<|endoftext|>", "<|im_end|>"}
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types([gguf.TokenType.CONTROL if p in control else gguf.TokenType.NORMAL for p in pieces])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(pieces.index("<|endoftext|>"))
    writer.add_eos_token_id(pieces.index("<|im_end|>"))
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")

    def add(name: str, *shape: int) -> None:
        scale = 1.2 / shape[-1] ** 0.5
        values = rng.normal(0, scale, shape) if len(shape) > 1 else rng.uniform(0.5, 1.5, shape)
        writer.add_tensor(name, values.astype(np.float32))

    add("token_embd.weight", VOCAB, EMBED)
    add("output_norm.weight", EMBED)
    if not tied:
        add("output.weight", VOCAB, EMBED)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm.weight", EMBED)
        add(f"blk.{i}.ffn_norm.weight", EMBED)
        add(f"blk.{i}.attn_q.weight", HEADS * WIDTH, EMBED)
        add(f"blk.{i}.attn_k.weight", KV_HEADS * WIDTH, EMBED)
        add(f"blk.{i}.attn_v.weight", KV_HEADS * WIDTH, EMBED)
        add(f"blk.{i}.attn_output.weight", EMBED, HEADS * WIDTH)
        add(f"blk.{i}.ffn_gate.weight", MLP, EMBED)
        add(f"blk.{i}.ffn_up.weight", MLP, EMBED)
        add(f"blk.{i}.ffn_down.weight", EMBED, MLP)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return trained, pieces


@pytest.mark.parametrize("tied", [False, True])
def test_weights_against_transformers(tmp_path: pathlib.Path, tied: bool) -> None:
    """transformers undoes llama.cpp's interleaving by its own code; the tensors are the same to the last bit."""
    write_gguf(tmp_path / "model.gguf", tied=tied)
    convert_llama(tmp_path / "model.gguf", tmp_path / "converted")
    model = load_pretrained(str(tmp_path / "converted"))
    assert isinstance(model, Decoder)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf").eval()
    ours: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted").eval()
    theirs = dict(reference.named_parameters())
    assert set(theirs) == set(dict(ours.named_parameters()))
    for name, value in ours.named_parameters():
        np.testing.assert_array_equal(value.detach(), theirs[name].detach())
    tokens = np.arange(40).reshape(2, 20)
    np.testing.assert_array_equal(hf_logits(ours, tokens), hf_logits(reference, tokens))
    config = model.config
    assert (config.tied_embeddings, config.rope_theta, config.max_length) == (tied, 1000.0, 64)
    assert config.norm_eps == pytest.approx(1e-5)  # GGUF keeps it as float32
    assert parameters(model)[("blocks", "q")].shape == (LAYERS, EMBED, HEADS, WIDTH)


def test_tokenizer_and_template(tmp_path: pathlib.Path) -> None:
    original, pieces = write_gguf(tmp_path / "model.gguf")
    convert_llama(tmp_path / "model.gguf", tmp_path / "converted")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "converted")
    assert tokenizer.convert_ids_to_tokens(list(range(VOCAB))) == pieces
    ends = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token)
    assert ends == ("<|endoftext|>", "<|im_end|>", "<|im_end|>")
    for text in ("lower lowest lows", "a  12 low  1<|im_end|>\n", "naïve 中文"):
        assert tokenizer.encode(text) == original.encode(text)
    assert len(tokenizer.encode("lower lowest lows")) < 9  # merges are there
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user: hi\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, r"GGUF architecture 'gemma' is not supported, only 'llama'"),
        ({"tokenizer": "llama"}, r"tokenizer 'llama' is not supported, only byte-level BPE"),
        (
            {"pre": "llama-bpe"},
            r"pre-tokenizer 'llama-bpe' \(tokenizer\.ggml\.pre\) is not supported, only gpt-2, smollm",
        ),
    ],
)
def test_what_is_not_supported(tmp_path: pathlib.Path, changes: dict[str, str], message: str) -> None:
    write_gguf(tmp_path / "model.gguf", **changes)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=rf"^{tmp_path}/model\.gguf: {message}"):
        convert_llama(tmp_path / "model.gguf", tmp_path / "converted")
