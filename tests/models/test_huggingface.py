"""From and to Hugging Face directories: every bit kept, every fault named."""

import json
import os
import pathlib
import re
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from absl import logging
from flax import nnx
from transformers import AutoTokenizer

from routerl_jax.data.vocabulary import train_tokenizer
from routerl_jax.models import huggingface
from routerl_jax.models.config import DecoderConfig, UnsupportedModelError
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained, load_without_weights, save_pretrained
from routerl_jax.models.safetensors_files import Checkpoint, TensorWriter, fill
from routerl_jax.parallel import multihost
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny
from tests.models.families import FAMILIES, Saved, hf_logits, parameters, random_decoder
from tests.programs import two_processes

Models = Callable[[str], Saved]
TOKENS = np.random.default_rng(0).integers(0, 131, (2, 24))


def load(directory: pathlib.Path, **options: Any) -> Decoder:
    model = load_pretrained(str(directory), **options)
    assert isinstance(model, Decoder)
    return model


def stored(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    """All tensors in a directory's safetensors files, read by PyTorch."""
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in safetensors.torch.load_file(file).items()}


def assert_same_bits(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        assert value.dtype == other[name].dtype
        assert value.shape == other[name].shape
        equal = torch.equal if isinstance(value, torch.Tensor) else np.array_equal
        assert equal(value, other[name]), name


def load_hf(directory: pathlib.Path) -> Any:
    """As users load it; every tensor must find its place and every place its tensor."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip(saved: Models, tmp_path: pathlib.Path, family: str) -> None:
    """Import, export, import; and the export in transformers, whose logits are those of the original to the last bit.

    Equal logits on the side of transformers also say that the exported config.json means the same architecture.
    """
    hf, directory = saved(family)
    model = load(directory)
    save_pretrained(model, tmp_path)
    assert_same_bits(stored(tmp_path), stored(directory))
    again = load(tmp_path)
    assert again.config == model.config
    assert_same_bits(parameters(again), parameters(model))
    exported = load_hf(tmp_path)
    np.testing.assert_array_equal(hf_logits(exported, TOKENS), hf_logits(hf, TOKENS))
    for key in ("eos_token_id", "bos_token_id"):
        assert getattr(exported.generation_config, key) == getattr(hf.config, key), key
    # generation reads both files
    assert exported.generate(torch.as_tensor(TOKENS[:1]), max_new_tokens=2).shape[1] <= TOKENS.shape[1] + 2


def test_export_of_a_model_made_here(tmp_path: pathlib.Path) -> None:
    """Not imported first, as after training from scratch; 1e-4: float32 sums in another order."""
    config = DecoderConfig(
        model_type="qwen3",
        vocab_size=261,
        embed=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=12,
        mlp=40,
        max_length=64,
        qk_norm=True,
        init_scale=0.3,
    )
    model = nnx.jit(lambda: Decoder(config, jax.random.key(0)))()
    tokenizer = train_tokenizer(["some text"], 259 + 2, ["<a>", "</a>"], context=64)
    save_pretrained(model, tmp_path, tokenizer)
    exported = load_hf(tmp_path)
    np.testing.assert_allclose(nnx.jit(Decoder.__call__)(model, TOKENS), hf_logits(exported, TOKENS), rtol=0, atol=1e-4)
    again = load(tmp_path)
    assert again.tokenizer is not None
    assert again.tokenizer.encode("<a>text</a>") == tokenizer.encode("<a>text</a>")
    save_pretrained(again, tmp_path / "second")  # with the model's own tokenizer
    assert (tmp_path / "second" / "tokenizer.json").is_file()


def test_sharded_export(saved: Models, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf, directory = saved("qwen3")
    model = load(directory)
    monkeypatch.setattr(huggingface, "_SHARD_BYTES", 40_000)
    save_pretrained(model, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 50_000 for file in files)  # plus a header of up to a few kB
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored(directory).values())
    assert_same_bits(stored(tmp_path), stored(directory))
    assert_same_bits(parameters(load(tmp_path)), parameters(model))
    np.testing.assert_array_equal(hf_logits(load_hf(tmp_path), TOKENS), hf_logits(hf, TOKENS))


def test_an_export_replaces_an_earlier_one(
    saved: Models, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of an export with another number of shards must not be taken for the new weights, by us or others."""
    old = load(saved("qwen3").directory)
    new = load(saved("qwen3").directory)
    new.final_norm.set_value(new.final_norm[...] + 1)
    whole, shards = huggingface._SHARD_BYTES, 40_000
    for first, second in [(whole, shards), (shards, whole), (shards, 80_000)]:
        for model, size in [(old, first), (new, second)]:
            monkeypatch.setattr(huggingface, "_SHARD_BYTES", size)
            save_pretrained(model, tmp_path)
        assert_same_bits(parameters(load(tmp_path)), parameters(new))
        assert torch.equal(load_hf(tmp_path).model.norm.weight, torch.tensor(np.asarray(new.final_norm[...])))
        expected = {"config.json", "generation_config.json", *(file.name for file in tmp_path.glob("model*"))}
        assert {file.name for file in tmp_path.iterdir()} == expected
        assert (tmp_path / "model.safetensors").exists() == (second == whole)


def snapshot(directory: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_an_export_appears_whole_or_not_at_all(
    saved: Models, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the weights can't be written, an earlier export stays as it was and nothing else is left."""
    target = tmp_path / "export"
    model = load(saved("qwen3").directory)

    def full(*_: object) -> None:
        assert not target.exists()
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "write", full)
        with pytest.raises(OSError, match="no space left"):
            save_pretrained(model, target)
        assert not list(tmp_path.iterdir())
    save_pretrained(model, target)
    before = snapshot(target)
    monkeypatch.setattr(TensorWriter, "write", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        save_pretrained(load(saved("llama").directory), target)
    assert snapshot(target) == before
    assert list(tmp_path.iterdir()) == [target]


def test_an_export_deletes_nothing_but_an_export(saved: Models, tmp_path: pathlib.Path) -> None:
    model = load(saved("qwen3").directory)
    for name in ("notes.txt", "questions.json", "checkpoints"):
        directory = tmp_path / f"with {name}"
        save_pretrained(model, directory)
        (directory / name).mkdir() if name == "checkpoints" else (directory / name).write_text("mine")
        with pytest.raises(ValueError, match=rf"^{directory} holds {name}, which is not of an export; give another"):
            save_pretrained(model, directory)
        assert (directory / name).exists()


def test_an_export_with_all_that_families_write_is_replaced(saved: Models, tmp_path: pathlib.Path) -> None:
    """Settings of image processors and sentence encoders are part of an export; none of an earlier one is left."""
    model = load(saved("qwen3").directory)
    for name in ("preprocessor_config.json", "processor_config.json", "modules.json", "1_Pooling/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    save_pretrained(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_incomplete_config(saved: Models, tmp_path: pathlib.Path) -> None:
    directory = copy(saved, tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "hidden_size"}))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config\.json: 'hidden_size' is missing; a llama needs it"):
        load(directory)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_file_modes_follow_the_umask(tmp_path: pathlib.Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        save_pretrained(tiny.model(), tmp_path / "export")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "export").iterdir()}
    assert {"model.safetensors", "config.json", "tokenizer.json"} < set(modes)
    assert set(modes.values()) == {mode}, modes


def test_only_the_main_process_writes_and_holds_one_tensor(
    saved: Models, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes gather the same tensors in the same order; the main one writes each before it gathers the next."""
    model = load(saved("qwen3").directory)
    monkeypatch.setattr(huggingface, "_SHARD_BYTES", 40_000)
    events: list[Any] = []
    gather, write = huggingface._Part.gather, TensorWriter.write
    monkeypatch.setattr(
        huggingface._Part, "gather", lambda part: events.append((part.rule.name, part.index)) or gather(part)
    )
    monkeypatch.setattr(TensorWriter, "write", lambda self, tensor: events.append("write") or write(self, tensor))
    save_pretrained(model, tmp_path / "main")
    gathered, written = events[::2], events[1::2]
    assert set(written) == {"write"}
    assert len(gathered) == len(set(gathered)) == len(written) == len(stored(tmp_path / "main"))
    events.clear()
    monkeypatch.setattr(multihost, "is_main", lambda: False)
    save_pretrained(model, tmp_path / "other")
    assert events == gathered
    assert not (tmp_path / "other").exists()


def test_end_tokens_of_generation(saved: Models, tmp_path: pathlib.Path) -> None:
    """An export ends turns where the engine does, an import where transformers' `generate` does."""
    tokenizer = train_tokenizer(["some text"], 259 + 3, ["<|im_end|>", "<a>", "</a>"], context=64)
    model = Decoder(tiny.config(eos_ids=(2, 3)), jax.random.key(0))
    assert not {2, 3} & tokenizer.eos_ids
    assert len(tokenizer.eos_ids) == 2
    save_pretrained(model, tmp_path / "export", tokenizer)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "export")
    assert generation.eos_token_id == [2, 3, *sorted(tokenizer.eos_ids)]
    assert generation.pad_token_id == tokenizer.pad_id
    assert set(load(tmp_path / "export").config.eos_ids) == {2, 3} | tokenizer.eos_ids
    assert json.loads((tmp_path / "export" / "config.json").read_text())["eos_token_id"] == [2, 3]

    directory = copy(saved, tmp_path / "import")
    for theirs, ours in [(7, (7,)), ([7, 9], (7, 9)), (None, (2,))]:  # 2 is config.json's
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": theirs}))
        assert load(directory).config.eos_ids == ours
    (directory / "generation_config.json").unlink()
    assert load(directory).config.eos_ids == (2,)


def test_bfloat16_round_trip(tmp_path: pathlib.Path) -> None:
    hf, directory = random_decoder("qwen2", tmp_path / "float32")
    hf.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs", dtype="bfloat16")
    assert {value.dtype for value in parameters(model).values()} == {jnp.dtype("bfloat16")}
    save_pretrained(model, tmp_path / "ours")
    assert_same_bits(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
    assert_same_bits(parameters(load(tmp_path / "ours", dtype="bfloat16")), parameters(model))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load_hf(tmp_path / "ours").dtype == torch.bfloat16

    widened = load(tmp_path / "theirs")  # float32 holds every bfloat16
    for path, value in parameters(widened).items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, parameters(model)[path].astype(np.float32))
    save_pretrained(load(directory), tmp_path / "narrowed", dtype="bfloat16")  # rounds as PyTorch does
    assert_same_bits(stored(tmp_path / "narrowed"), stored(tmp_path / "theirs"))
    assert json.loads((tmp_path / "narrowed" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_export_from_a_mesh(saved: Models, tmp_path: pathlib.Path) -> None:
    """Weights split over eight devices are written as whole tensors."""
    directory = saved("llama_rope_linear").directory
    model = load(directory, mesh=make_mesh({"fsdp": 4, "tensor": 2}), layout="fsdp+tensor")
    assert not model.blocks.up[...].sharding.is_fully_replicated
    save_pretrained(model, tmp_path)
    assert_same_bits(stored(tmp_path), stored(directory))


@pytest.mark.parametrize("family", ["llama_bias", "qwen3"])
def test_every_block_is_read_once(saved: Models, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Over eight devices of which two or four hold the same: as many numbers are read as the checkpoint has."""
    directory = saved(family).directory
    checkpoints: list[Checkpoint] = []

    def spy(model: Any, rules: Any, checkpoint: Checkpoint, *rest: Any) -> None:
        checkpoints.append(checkpoint)
        fill(model, rules, checkpoint, *rest)

    monkeypatch.setattr(huggingface, "fill", spy)
    for mesh in ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 8}):
        model = load(directory, mesh=make_mesh(mesh), layout="fsdp+tensor", dtype="bfloat16")
        assert checkpoints[-1].bytes_read == sum(tensor.nbytes for tensor in stored(directory).values())
        whole = load(directory, dtype="float32")
        for path, value in parameters(model).items():
            np.testing.assert_array_equal(value, parameters(whole)[path].astype(jnp.bfloat16))


def test_two_processes(saved: Models, tmp_path: pathlib.Path) -> None:
    """Each reads what its two devices hold; together they write what they read; an export that fails, fails on both."""
    directory = saved("qwen3").directory
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    outputs = two_processes(
        "tests.models.two_processes", directory, tmp_path, workdir=tmp_path / "export", JAX_NUM_CPU_DEVICES="2"
    )
    main, other = (json.loads(output.splitlines()[-1]) for output in outputs)
    tensors = stored(directory)
    # Norm scales are whole everywhere; of all else, half is here. Replicas of two halves: both of them are here.
    everything = sum(tensor.nbytes for tensor in tensors.values())
    whole = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith("norm.weight"))
    for found in (main, other):
        assert found["right"]
        assert found["halves"] == whole + (everything - whole) // 2
        assert found["replicas"] == everything
    assert_same_bits(stored(tmp_path / "export"), tensors)
    refusal = f"{tmp_path}/foreign holds notes.txt, which is not of an export; give another directory"
    assert main["foreign"] == other["foreign"] == f"ValueError: {refusal}"
    assert main["full"] == "OSError: no space left on device"
    assert other["full"] == "RuntimeError: the main process failed: no space left on device"
    assert {path.name for path in tmp_path.iterdir()} == {"export", "foreign"}


def test_config_of_transformers_4(saved: Models, tmp_path: pathlib.Path) -> None:
    """Before version 5, rope_theta and rope_scaling stood beside each other; most checkpoints on the hub are such."""
    for family in ("llama_rope_llama3", "llama_rope_linear", "qwen2"):
        directory = saved(family).directory
        shutil.copytree(directory, tmp_path / family)
        config = json.loads((directory / "config.json").read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
        (tmp_path / family / "config.json").write_text(json.dumps(config))
        assert load(tmp_path / family).config == load(directory).config
        if family == "llama_rope_linear":  # and before that, `type`
            rope["type"] = rope.pop("rope_type")
            (tmp_path / family / "config.json").write_text(json.dumps(config))
            assert load(tmp_path / family).config == load(directory).config


def copy(saved: Models, target: pathlib.Path, **changes: Any) -> pathlib.Path:
    """The llama model with another config.json; returns the directory."""
    shutil.copytree(saved("llama").directory, target, dirs_exist_ok=True)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return target


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (130, 48)),
        ("model.norm.weight", (40,)),
        ("lm_head.weight", (131, 40)),
        ("model.layers.2.self_attn.q_proj.weight", (40, 48)),
        ("model.layers.1.self_attn.k_proj.weight", (48, 48)),
        ("model.layers.0.self_attn.o_proj.weight", (48, 40)),
        ("model.layers.0.mlp.gate_proj.weight", (48, 88)),  # transposed
        ("model.layers.2.post_attention_layernorm.weight", (48, 1)),
    ],
)
def test_a_tensor_of_another_shape(saved: Models, tmp_path: pathlib.Path, name: str, shape: tuple[int, ...]) -> None:
    tensors = stored(saved("llama").directory)
    assert tensors[name].shape != shape
    directory = copy(saved, tmp_path)
    safetensors.torch.save_file(tensors | {name: torch.zeros(shape)}, directory / "model.safetensors")
    message = rf"^{tmp_path}: does not fit .*config\.json: tensor '{re.escape(name)}' of shape {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_quantized_weights(saved: Models, tmp_path: pathlib.Path) -> None:
    directory = copy(saved, tmp_path, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match=rf"^{tmp_path}/config\.json: quantization_config \(fp8\) is not"):
        load(directory)
    tensors = stored(saved("llama").directory)
    copy(saved, tmp_path, quantization_config=None)
    name = "model.layers.1.mlp.up_proj.weight"
    for dtype, kind in [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")]:
        safetensors.torch.save_file(tensors | {name: tensors[name].to(dtype)}, directory / "model.safetensors")
        with pytest.raises(
            UnsupportedModelError, match=rf"^{tmp_path}: tensor '{name}' is stored as {kind}; quantized"
        ):
            load(directory)


def test_unused_tensors_are_named(saved: Models, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that every checkpoint of some age has: rotary frequencies, the copy of tied embeddings."""
    lines: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: lines.append(text % values))
    load(saved("qwen2_tied").directory)
    shutil.copytree(saved("qwen2_tied").directory, tmp_path, dirs_exist_ok=True)
    tensors = stored(tmp_path)
    tensors |= {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6),
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    load(tmp_path)
    assert not lines
    safetensors.torch.save_file(tensors | {"score.weight": torch.ones(1, 48)}, tmp_path / "model.safetensors")
    load(tmp_path)
    assert lines == [f"{tmp_path}: 1 tensors are not of this architecture and unused: score.weight"]
    tensors |= {"model.layers.0.mlp.up_proj.bias": torch.ones(88), "model.layers.3.mlp.up_proj.weight": torch.ones(3)}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    message = (
        r"2 tensors are in excess of .*: model\.layers\.0\.mlp\.up_proj\.bias, model\.layers\.3\.mlp\.up_proj\.weight$"
    )
    with pytest.raises(ValueError, match=message):  # without them, logits would be others than those of the checkpoint
        load(tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "model.lm_head.weight"])
def test_a_head_beside_a_tied_embedding_must_be_its_copy(saved: Models, tmp_path: pathlib.Path, name: str) -> None:
    """transformers 4 drops another head, and 5 keeps it: both sources are named."""
    shutil.copytree(saved("qwen2_tied").directory, tmp_path, dirs_exist_ok=True)
    tensors = stored(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    for row in (0, len(embedding) - 1):
        head = embedding.clone()
        head[row, -1] += 0.125
        safetensors.torch.save_file(tensors | {name: head}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"'{name}' differs from 'model\.embed_.*tie_word_embeddings to false"):
            load(tmp_path)
    safetensors.torch.save_file(tensors | {name: embedding[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"'{name}' differs from"):
        load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    safetensors.torch.save_file(tensors | {name: head}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(np.asarray(load(tmp_path).head[...]).T, head.numpy())


def test_one_parameter_under_two_names_must_be_equal(saved: Models, tmp_path: pathlib.Path) -> None:
    """As after a merge that kept the names of both its sides."""
    shutil.copytree(saved("llama_mqa").directory, tmp_path, dirs_exist_ok=True)
    tensors = stored(tmp_path)
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"):
        again = name.removeprefix("model.")
        safetensors.torch.save_file(tensors | {again: tensors[name].clone()}, tmp_path / "model.safetensors")
        assert parameters(load(tmp_path)).keys() == parameters(load(saved("llama_mqa").directory)).keys()
        safetensors.torch.save_file(tensors | {again: tensors[name] * 0.5}, tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=rf"'{again}' differs from '{name}'.*delete '{again}' from"):
            load(tmp_path)


def test_missing_tensors(saved: Models, tmp_path: pathlib.Path) -> None:
    directory = copy(saved, tmp_path, num_hidden_layers=4)
    with pytest.raises(ValueError, match=rf"^{tmp_path}: 9 tensors are missing: .*model\.layers\.3\..* config\.json"):
        load(directory)
    directory = copy(saved, tmp_path, attention_bias=True)
    with pytest.raises(ValueError, match=r"12 tensors are missing: .*model\.layers\.0\.self_attn\.\w_proj\.bias"):
        load(directory)
    shutil.copytree(saved("qwen2_tied").directory, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ValueError, match=r"1 tensor is missing: lm_head\.weight"):
        load(tmp_path)


def test_missing_and_damaged_files(saved: Models, tmp_path: pathlib.Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        ValueError, match=rf"^{empty}: config\.json is missing; expected a Hugging Face model directory"
    ):
        load(empty)
    directory = copy(saved, tmp_path / "model")
    weights = directory / "model.safetensors"
    content = weights.read_bytes()
    for size in (0, 5, len(content) // 2, len(content) - 1):
        weights.write_bytes(content[:size])
        with pytest.raises(ValueError, match=rf"^{weights} is damaged or not a safetensors file"):
            load(directory)
    weights.unlink()
    with pytest.raises(ValueError, match=rf"^{weights} is missing; expected weights in safetensors format"):
        load(directory)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"^{directory}/model-00001-of-00002\.safetensors is missing"):
        load(directory)
    (directory / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(ValueError, match=rf"^{directory}/config\.json is not JSON"):
        load(directory)


@pytest.mark.parametrize("dtype", ["int8", "float31"])
def test_dtypes_that_hold_no_weights(saved: Models, tmp_path: pathlib.Path, dtype: str) -> None:
    directory = saved("qwen2").directory
    with pytest.raises(ValueError, match=f"dtype='{dtype}' can't hold weights"):
        load(directory, dtype=dtype)
    with pytest.raises(ValueError, match=f"dtype='{dtype}' can't hold weights"):
        save_pretrained(load(directory), tmp_path / "ours", dtype=dtype)


def test_ids_without_a_row_are_refused_at_load(saved: Models, tmp_path: pathlib.Path) -> None:
    """Of the tokenizer, of config.json and of generation_config.json: before any weight is read."""
    directory = copy(saved, tmp_path)
    rows = json.loads((directory / "config.json").read_text())["vocab_size"]
    train_tokenizer(["abc"], rows + 200, [], context=64).save(directory)
    assert len(AutoTokenizer.from_pretrained(directory)) > rows
    (directory / "model.safetensors").unlink()
    for read in (load_pretrained, load_without_weights):
        with pytest.raises(
            ValueError, match=rf"^{directory}: the tokenizer has ids up to \d+ \(.*\), the model {rows} rows"
        ):
            read(str(directory))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    message = rf"{directory}/config\.json \(or generation_config\.json\): eos_token_id: id {rows}"
    copy(saved, tmp_path, eos_token_id=rows)
    (directory / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(ValueError, match=message):
        load_without_weights(str(directory))
    copy(saved, tmp_path, eos_token_id=2)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, rows]}))
    with pytest.raises(ValueError, match=message):
        load_without_weights(str(directory))
    (directory / "generation_config.json").unlink(missing_ok=True)
    for wrong in (-1, rows):
        copy(saved, tmp_path, eos_token_id=2, bos_token_id=wrong)
        with pytest.raises(ValueError, match=rf"bos_token_id: id {wrong} has no row"):
            load_without_weights(str(directory))


def test_a_directory_with_parts_of_a_tokenizer_says_what_is_missing(saved: Models, tmp_path: pathlib.Path) -> None:
    directory = copy(saved, tmp_path)
    for name, content in {"vocab.json": '{"a": 0}', "tokenizer_config.json": "{}", "vocab.txt": "a"}.items():
        (directory / name).write_text(content)
        with pytest.raises(ValueError, match=rf"(?s)^{directory}: no usable tokenizer.*copy tokenizer\.json"):
            load_without_weights(str(directory))
        (directory / name).unlink()
    assert load_without_weights(str(directory)).tokenizer is None
