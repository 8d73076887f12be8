"""Adapters beside the `peft` library: its logits and gradients, both ways of a directory, and what is refused."""

import copy
import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file, save_file

from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import load_pretrained, save_pretrained
from routerl_jax.models.lora import LoraConfig, LoraRule, adapters, apply_lora
from routerl_jax.models.peft import load_adapter, save_adapter
from tests.models.families import Saved, hf_logits
from tests.models.test_lora import with_b

TOKENS = np.random.default_rng(0).integers(0, 131, (2, 17))
RULES = {"wide": LoraRule(modules="q|down", rank=6, alpha=9.0), "out": LoraRule(modules="o", rank=2)}


@dataclasses.dataclass
class Adapted:
    base: Saved
    model: Decoder
    directory: pathlib.Path


@pytest.fixture(scope="module")
def adapted(saved, tmp_path_factory) -> Adapted:
    """Qwen2 (biases, grouped queries) with an adapter of several ranks and alphas, exported."""
    base: Saved = saved("qwen2")
    model = load_pretrained(str(base.directory))
    assert isinstance(model, Decoder)
    apply_lora(model, LoraConfig(rank=4, modules="v|up", rules=RULES).build(), jax.random.key(0))
    with_b(model)
    directory = tmp_path_factory.mktemp("peft") / "adapter"
    save_adapter(model, directory, str(base.directory))
    return Adapted(base, model, directory)


def in_peft(adapted: Adapted):
    """The exported adapter in peft, on transformers' model."""
    return peft.PeftModel.from_pretrained(copy.deepcopy(adapted.base.hf), adapted.directory, is_trainable=True).eval()


def test_peft_computes_the_same(adapted):
    ours = np.asarray(adapted.model(jnp.asarray(TOKENS)))
    np.testing.assert_allclose(hf_logits(in_peft(adapted), TOKENS), ours, rtol=0, atol=1e-4)
    assert np.abs(hf_logits(adapted.base.hf, TOKENS) - ours).max() > 0.5
    whole = peft.AutoPeftModelForCausalLM.from_pretrained(adapted.directory)  # finds the base by itself
    np.testing.assert_allclose(hf_logits(whole, TOKENS), ours, rtol=0, atol=1e-4)


def test_gradients_are_pefts(adapted):
    """Of the mean negative log-likelihood, in float64 there: to 1e-3 of the largest entry of each A and B."""
    twin = in_peft(adapted).double()
    twin(input_ids=torch.as_tensor(TOKENS), labels=torch.as_tensor(TOKENS)).loss.backward()
    theirs = {name: value.grad for name, value in twin.named_parameters() if value.grad is not None}
    graph, trained, frozen = nnx.split(adapted.model, nnx.LoRAParam, ...)

    @jax.jit
    def loss(trained, frozen, tokens):
        logprobs = jax.nn.log_softmax(nnx.merge(graph, trained, frozen)(tokens)[:, :-1])
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    grads = nnx.to_pure_dict(jax.grad(loss)(trained, frozen, jnp.asarray(TOKENS)))["blocks"]
    names = {"q": "self_attn.q_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj", "up": "mlp.up_proj"}
    names["down"] = "mlp.down_proj"
    assert set(grads) == {f"{name}_lora_{side}" for name in names for side in "ab"}
    assert len(theirs) == 2 * 3 * len(names)
    for name, place in names.items():
        for layer in range(3):
            for side, rank_axis in (("a", -1), ("b", 0)):
                stem = f"base_model.model.model.layers.{layer}.{place}.lora_{side.upper()}.default.weight"
                expected = theirs[stem].numpy().T
                value = np.moveaxis(np.asarray(grads[f"{name}_lora_{side}"][layer]), rank_axis, 0)
                value = value.reshape(value.shape[0], -1)
                expected = expected if side == "b" else expected.T
                assert np.abs(expected).max() > 1e-4, stem
                np.testing.assert_allclose(value, expected, rtol=0, atol=1e-3 * np.abs(expected).max(), err_msg=stem)


def test_round_trip_is_bit_exact(adapted):
    again = load_pretrained(str(adapted.directory))
    assert isinstance(again, Decoder)
    assert adapters(again) == adapters(adapted.model)
    assert again.base_identity == adapted.model.base_identity
    ours, theirs = (dict(nnx.to_flat_state(nnx.state(m, nnx.LoRAParam))) for m in (adapted.model, again))
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value.get_value(), theirs[path].get_value(), err_msg=str(path))


def test_merged_export(adapted, tmp_path):
    """A plain directory: transformers needs no peft for it."""
    save_pretrained(adapted.model, tmp_path / "merged")
    twin = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ours = np.asarray(adapted.model(jnp.asarray(TOKENS)))
    np.testing.assert_allclose(hf_logits(twin, TOKENS), ours, rtol=0, atol=1e-4)


def test_an_adapter_made_by_peft(adapted, tmp_path):
    """With rsLoRA's scale, alpha / sqrt(rank), on part of the modules, B not 0."""
    settings = peft.LoraConfig(
        r=5, lora_alpha=3, use_rslora=True, target_modules=["k_proj", "gate_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    twin = peft.get_peft_model(copy.deepcopy(adapted.base.hf), settings).eval()
    twin.peft_config["default"].base_model_name_or_path = str(adapted.base.directory)
    twin.save_pretrained(tmp_path)
    model = load_pretrained(str(tmp_path))
    assert set(adapters(model)) == {"k", "gate"}
    np.testing.assert_allclose(model(jnp.asarray(TOKENS)), hf_logits(twin, TOKENS), rtol=0, atol=1e-4)


def edited(adapted, tmp_path, config=None, tensors=None) -> pathlib.Path:
    directory = tmp_path / "edited"
    shutil.copytree(adapted.directory, directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    if tensors:
        stored = load_file(directory / "adapter_model.safetensors")
        tensors(stored)
        save_file(stored, directory / "adapter_model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA' is not supported; supported: LORA"),
        ({"use_dora": True}, "use_dora=True is not supported; supported: False"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'. is not supported"),
        ({"bias": "all"}, "bias='all' is not supported; supported: 'none'"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changes the base"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=.1. is not supported"),
        ({"base_model_name_or_path": ""}, "has no base_model_name_or_path"),
    ],
)
def test_settings_that_are_not_supported(adapted, tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        load_pretrained(str(edited(adapted, tmp_path, config)))


def test_tensors_that_do_not_fit(adapted, tmp_path):
    stem = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"

    def refused(change, message):
        shutil.rmtree(tmp_path / "edited", ignore_errors=True)
        with pytest.raises(ValueError, match=message):
            load_pretrained(str(edited(adapted, tmp_path, tensors=change)))

    refused(lambda t: t.pop(stem), f"{stem} is missing, though other layers have it")
    refused(
        lambda t: t.update({stem: t[stem][:, :-1]}), r"v_proj.lora_A.weight of shape \(4, 47\) .*needed as \(4, 48\)"
    )
    refused(
        lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[stem]}), "1 tensors do not belong to a qwen2"
    )
    (tmp_path / "edited" / "adapter_model.safetensors").write_bytes(b"{}")
    with pytest.raises(ValueError, match="is damaged or not a safetensors file"):
        load_pretrained(str(tmp_path / "edited"))
    (tmp_path / "edited" / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="is missing; expected an adapter in safetensors format"):
        load_pretrained(str(tmp_path / "edited"))


def test_nothing_to_save_and_no_place(adapted, tmp_path):
    with pytest.raises(ValueError, match="is not empty"):
        save_adapter(adapted.model, adapted.directory, "base")
    with pytest.raises(ValueError, match="the model has an adapter already"):
        load_adapter(adapted.model, adapted.directory)
    base = load_pretrained(str(adapted.base.directory))
    assert isinstance(base, Decoder)
    with pytest.raises(ValueError, match="the model has no adapter"):
        save_adapter(base, tmp_path / "x", "base")


def test_whole_weights_beside_an_adapter_are_refused(adapted, tmp_path):
    directory = edited(adapted, tmp_path)
    (directory / "config.json").write_text("{}")  # alone it is no second set of weights
    load_pretrained(str(directory))
    for name in ("model.safetensors", "pytorch_model.bin", "model-00001-of-00002.safetensors"):
        (directory / name).write_bytes(b"")
        with pytest.raises(ValueError, match=f"adapter_config.json.*{name}.*directory of its own"):
            load_pretrained(str(directory))
        (directory / name).unlink()
