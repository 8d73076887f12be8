"""export_hf on a run that was never trained: files, shards, types and refusals. test_programs.py exports a trained one."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from flax import nnx

from routerl_jax.core.config import to_config_dict
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.models import huggingface
from routerl_jax.models.decoder import Decoder
from routerl_jax.models.huggingface import save_pretrained
from routerl_jax.training.config import EngineConfig, KnowledgeConfig, MeshConfig, ModelConfig, TrainConfig
from tests import seeing, tiny
from tests.programs import launch_here, refusal

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What a finished run of eight devices leaves behind, as far as exports read it."""
    workdir = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(0)
    model = nnx.eval_shape(lambda: Decoder(tiny.config(eos_ids=(5, 7)), jax.random.key(0)))
    shapes = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), shapes))
    tiny.tokenizer().save(workdir / "vocabulary")
    tokenizer = Tokenizer.load(workdir / "vocabulary")
    tokenizer.hf.chat_template = TEMPLATE
    save_pretrained(model, workdir / "policy", tokenizer)
    config = TrainConfig(
        model=ModelConfig(path=str(workdir / "policy")),
        engine=EngineConfig(max_length=64),
        mesh=MeshConfig(fsdp=8, layout="fsdp"),
        kind="sft",
        knowledge={"text": KnowledgeConfig()},
    )
    (workdir / "config.json").write_text(json.dumps(to_config_dict(config).to_dict()))
    return workdir


def tensors(directory: pathlib.Path) -> dict[str, torch.Tensor]:
    return {n: t for file in directory.glob("*.safetensors") for n, t in safetensors.torch.load_file(file).items()}


def test_shards_of_another_type(
    workdir: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As transformers loads them: the policy's weights, rounded by PyTorch; its tokenizer, template and end of turn."""
    monkeypatch.setattr(huggingface, "_SHARD_BYTES", 30_000)
    output = tmp_path / "new" / "exported"
    assert not launch_here("export_hf", f"--workdir={workdir}", f"--output={output}", "--dtype=bfloat16", "--json")
    said = json.loads(capsys.readouterr().out)
    size = sum(file.stat().st_size for file in output.iterdir())
    assert said == {"directory": str(output), "bytes": size, "model_type": "llama"}
    policy = tensors(workdir / "policy")
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == 2 * sum(tensor.numel() for tensor in policy.values())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.bfloat16
    found = model.state_dict()
    for name, tensor in policy.items():
        assert torch.equal(found[name], tensor.to(torch.bfloat16)), name
    assert set(model.generation_config.eos_token_id) == {5, 7} | tiny.tokenizer().eos_ids
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert tokenizer("It is not there.").input_ids == tiny.tokenizer().encode("It is not there.")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Ghana"}], tokenize=False)
    assert chat == "<user>Ghana"


def test_a_policy_that_sees(workdir: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is called by its own type, not by its text part's, and the line printed loads it in transformers."""
    save_pretrained(seeing.model(), tmp_path / "policy")
    (tmp_path / "config.json").write_text((workdir / "config.json").read_text())
    output = tmp_path / "exported"
    assert not launch_here("export_hf", f"--workdir={tmp_path}", f"--output={output}")
    called, _, _ = capsys.readouterr().out.partition("load it with ")[2].partition("(")
    loader, _, method = called.partition(".")
    assert getattr(getattr(transformers, loader), method)(output).config.model_type == "qwen2_5_vl"
    assert not launch_here("export_hf", f"--workdir={tmp_path}", f"--output={tmp_path / 'again'}", "--json")
    assert json.loads(capsys.readouterr().out)["model_type"] == "qwen2_5_vl"


def test_the_output_is_a_new_directory(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """An empty one will do; a file, or a directory with anything in it, even an export, is not touched."""
    output = tmp_path / "exported"
    output.mkdir()
    assert not launch_here("export_hf", f"--workdir={workdir}", f"--output={output}")
    assert all(torch.equal(tensor, tensors(output)[name]) for name, tensor in tensors(workdir / "policy").items())
    message = refusal("export_hf", f"--workdir={workdir}", f"--output={output}")
    assert message == f"launch.export_hf: {output} is not empty; give a directory that can be written afresh"
    for place in (output / "config.json", output / "config.json" / "x"):
        message = refusal("export_hf", f"--workdir={workdir}", f"--output={place}")
        assert message == f"launch.export_hf: --output={place}: {output / 'config.json'} is a file; give a directory"
    message = refusal("export_hf", f"--workdir={tmp_path}", f"--output={tmp_path / 'other'}")
    assert "holds no run" in message
    assert not (tmp_path / "other").exists()
