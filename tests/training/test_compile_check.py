"""The compile check on four chips of v5e, where the TPU compiler is installed."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re

import pytest

from routerl_jax.models.decoder import Decoder
from routerl_jax.models.published import PUBLISHED, architecture_of
from routerl_jax.parallel import topology
from routerl_jax.training.compile_check import Report, _results, check
from tests.training.small_policy import ARCHITECTURE, small_policy

SLICE = "v5e:2x2"


@pytest.fixture(scope="module", autouse=True)
def compiler():
    pytest.importorskip("libtpu", reason="needs the TPU compiler: pip install libtpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # other tests may be compiling beside these
        yield


@pytest.fixture(scope="module")
def report() -> Report:
    return check(small_policy(), SLICE)


def parameters() -> int:
    """Counted by hand from the sizes: attention with biases, gated feed-forward, norms, embedding and head."""
    embed, mlp, heads, kv, width = (ARCHITECTURE[key] for key in ("embed", "mlp", "heads", "kv_heads", "head_dim"))
    attention = embed * width * (2 * heads + 2 * kv) + width * (heads + 2 * kv)
    return 2 * (attention + 3 * embed * mlp + 2 * embed) + 2 * 1024 * embed + embed


def test_kernels(report: Report) -> None:
    """The kernels for TPUs are what is compiled: forward again in the backward pass, which rematerialises."""
    update = report.programs["update"].kernels
    assert {name.split("_segmented")[0]: count for name, count in update.items()} == {
        "splash_mha_fwd": 2,
        "splash_mha_dq": 1,
        "splash_mha_dkv": 1,
    }
    assert report.programs["decode"].kernels == {"ragged_paged_attention_kernel": 2}
    assert "ragged_paged_attention_kernel" in report.programs["prefill"].kernels


def test_memory(report: Report) -> None:
    """Arguments by hand, to 2%: vectors that every chip holds whole, and tokens, are not counted here."""
    state = parameters() * 3 * 4 / 4  # weights and two moments in float32, over four chips
    weights = parameters() * 2 / 2  # bfloat16, over the two chips of `tensor`
    cache = 16 // 2 * 256 * 2 * 2 * 128 * 2 * 2 / 2  # rows of a shard, tokens, k and v of 2 heads, 2 layers, bfloat16
    update, decode = report.programs["update"], report.programs["decode"]
    assert update.arguments_gib * 2**30 == pytest.approx(state, rel=0.02)
    assert update.resident_gib * 2**30 == pytest.approx(parameters() + weights + cache, rel=0.02)  # and the reference
    tables = 64 * 1024 * 2 * 4  # of the stop automaton
    assert decode.arguments_gib * 2**30 == pytest.approx(weights + cache + tables, rel=0.02)
    assert decode.resident_gib * 2**30 == pytest.approx(state + parameters(), rel=0.02)
    assert update.outputs_gib < 1e-4  # the state is donated
    for program in report.programs.values():
        parts = (program.arguments_gib, program.outputs_gib, program.temporaries_gib, program.code_gib)
        assert program.hbm_gib_per_chip == pytest.approx(sum(parts) + program.resident_gib)
    assert report.fits
    assert (report.devices, report.device, report.mesh) == (4, "TPU v5 lite", {"data": 1, "fsdp": 2, "tensor": 2})


def test_collectives(report: Report) -> None:
    """The update gathers weights over fsdp; decode, whose weights lie whole over it, must not."""
    assert report.programs["update"].collectives["all-gather"] > 0
    assert not any(program.problems for program in report.programs.values())


def test_a_gathered_weight_is_an_error() -> None:
    """An engine that works with the learner's fsdp shards. (Decoding so few rows, XLA moves these to the weights.)"""
    prefill = check(small_policy(layout=""), SLICE, ["prefill"]).programs["prefill"]
    assert any(re.match("prefill gathers a weight of shape .*512", problem) for problem in prefill.problems)


@pytest.mark.slow
def test_a_model_that_sees(tmp_path: pathlib.Path) -> None:
    """Qwen2.5-VL from its config.json alone: the tower's full layers and the decoder's attention are kernels, 80 wide too."""
    text = {
        "hidden_size": ARCHITECTURE["embed"],
        "intermediate_size": ARCHITECTURE["mlp"],
        "num_hidden_layers": 1,
        "num_attention_heads": ARCHITECTURE["heads"],
        "num_key_value_heads": ARCHITECTURE["kv_heads"],
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    tower = {"depth": 2, "hidden_size": 160, "num_heads": 2, "intermediate_size": 256, "fullatt_block_indexes": [1]}
    published = dict(PUBLISHED["Qwen/Qwen2.5-VL-7B-Instruct"])
    vision = published["vision_config"] | tower | {"out_hidden_size": ARCHITECTURE["embed"]}
    (tmp_path / "config.json").write_text(json.dumps(published | text | {"vision_config": vision}))
    config = small_policy()
    model = dataclasses.replace(config.model, path=str(tmp_path), architecture={})
    found = check(dataclasses.replace(config, model=model), SLICE)
    assert set(found.programs) == {"update", "encode", "prefill", "decode"}
    assert sum(count for name, count in found.programs["update"].kernels.items() if "splash_mha_dq" in name) == 2
    assert any("splash" in name for name in found.programs["encode"].kernels)
    assert any("ragged_paged" in name for name in found.programs["decode"].kernels)
    assert found.fits
    assert not any(program.problems for program in found.programs.values())


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(topology.HBM_GIB, "TPU v5 lite", 0.001)
    found = check(small_policy(), SLICE, ["decode"])
    assert not found.fits
    assert "decode needs 0.0" in found.programs["decode"].problems[0]


def test_bad_input() -> None:
    for name, message in (("v5e:3x7", "no such slice"), ("tpu", "no such slice")):
        with pytest.raises(ValueError, match=message):
            check(small_policy(), name)
    with pytest.raises(ValueError, match="choose some of update, encode, prefill, decode"):
        check(small_policy(), SLICE, ["train"])
    with pytest.raises(ValueError, match="published ones"):
        architecture_of("Qwen/Qwen9-1T")


def test_collectives_in_text() -> None:
    """Synchronous, asynchronous (operands before results) and combined ones."""
    text = """
      %all-gather.3 = bf16[512,128]{1,0:T(8,128)} all-gather(%a), dimensions={0}
      %ag = (bf16[256,128]{1,0}, bf16[512,128]{1,0}) all-gather-start(%a), dimensions={0}
      ROOT %all-gather = (f32[8]{0}, f32[4,2]{1,0}) all-gather(%a, %b), dimensions={0}
      %x = f32[7] fusion(%all-gather.3), calls=%all-gather
    """
    assert _results(text, "all-gather") == [(512, 128), (512, 128), (8,), (4, 2)]


# Parameters in billions, from the models' cards on the hub.
CARDS = {
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.62,
    "Qwen/Qwen3-4B": 4.02,
    "Qwen/Qwen3-8B": 8.19,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03,
    "meta-llama/Llama-3.2-1B": 1.24,
    "meta-llama/Llama-3.2-3B": 3.21,
    "SmolLM2-135M-Instruct": 0.135,
}


@pytest.mark.parametrize("name", CARDS)
def test_published_architectures(name: str) -> None:
    """They have as many parameters as their cards say, to the last digit given."""
    import jax
    from flax import nnx

    model = nnx.eval_shape(lambda: Decoder(architecture_of(name), jax.random.key(0)))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    assert count / 1e9 == pytest.approx(CARDS[name], abs=0.006 if CARDS[name] > 1 else 0.0006)


def test_the_whole_table_is_read() -> None:
    """Others too, of which the cards count what is not in the text model."""
    assert all(architecture_of(name) for name in PUBLISHED)
