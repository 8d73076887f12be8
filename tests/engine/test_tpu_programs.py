"""The engine's programs through the TPU compiler (no TPU needed), at the head geometry of Qwen2.5-7B."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType

from routerl_jax.engine import programs
from routerl_jax.engine.pages import PagedCache
from routerl_jax.extras.compile_check.run_programs import lower_programs
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.decoder import Decoder
from routerl_jax.parallel.mesh import AXES, batch_shards, replicated

CONFIG = DecoderConfig(
    model_type="qwen2",
    vocab_size=1024,
    embed=1024,
    layers=2,
    heads=28,
    kv_heads=4,
    head_dim=128,
    mlp=2048,
    max_length=4096,
    qkv_bias=True,
)
# Elements of the smallest matrix, [1024, 4 x 128]. Activations here stay far below: 8 rows of up to 2048.
SMALLEST_WEIGHT = 1024 * 4 * 128
ROWS, LENGTH = 16, 2048


@pytest.fixture(scope="module")
def compiled(tpu_compiler):
    """Prefill, decode and fork on four chips, two of them sharing each half of the heads."""
    from jax.experimental import topologies

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        patch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
        topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
        mesh = jax.make_mesh((1, 2, 2), AXES, axis_types=(AxisType.Auto,) * 3, devices=topology.devices)
        model = nnx.eval_shape(lambda: Decoder(CONFIG, jax.random.key(0), param_dtype=jnp.dtype(jnp.bfloat16)))
        lowered = lower_programs(model, mesh, rows=ROWS, max_length=LENGTH, segment=8, prompt_rows=2, prompt_tokens=64)
        drafted = lower_programs(model, mesh, rows=ROWS, max_length=LENGTH - 3, segment=8, drafts=3)
        lowered["decode with drafts"] = drafted["decode"]
        shards = batch_shards(mesh)
        cache = PagedCache.abstract(CONFIG, mesh, shards, ROWS // shards, LENGTH, jnp.bfloat16)
        some = jax.ShapeDtypeStruct((shards, 2), jnp.int32, sharding=replicated(mesh))
        fork = programs.jit_programs(nnx.graphdef(model), mesh, cache).fork
        lowered["fork"] = fork.lower(cache=cache, sources=some, targets=some, span=LENGTH)
        return {name: program.compile() for name, program in lowered.items()}


def results(text, operation):
    """Element counts of all results of an operation in compiled text (asynchronous ones too)."""
    lines = re.findall(rf"= (.*?) {operation}(?:-start)?\(", text)
    shapes = [shape for line in lines for shape in re.findall(r"\w+\[([\d,]*)\]", line)]
    return [math.prod(int(size) for size in shape.split(",") if size) for shape in shapes]


@pytest.mark.parametrize("program", ["prefill", "decode", "decode with drafts", "fork"])
def test_pages_are_read_by_the_kernel_and_written_in_place(compiled, program):
    text = compiled[program].as_text()
    calls = re.findall(r"ragged_paged_attention_kernel\S* = .*custom-call\(.*tpu_custom_call", text)
    assert len(calls) == {"prefill": 1, "fork": 0}.get(program, CONFIG.layers)  # scanned, unrolled
    layer = ROWS // 2 * LENGTH * (2 * CONFIG.kv_heads // 2) * CONFIG.head_dim  # of a chip
    assert max(results(text, "copy")) < layer
    memory = compiled[program].memory_analysis()
    assert memory.alias_size_in_bytes == 2 * layer * CONFIG.layers  # bfloat16; all of the cache is donated
    assert memory.temp_size_in_bytes < 2 * layer


@pytest.mark.parametrize("program", ["prefill", "decode"])
def test_no_weight_is_gathered(compiled, program):
    text = compiled[program].as_text()
    assert max(results(text, "all-reduce")) > 0  # the search finds what there is
    for operation in ("all-gather", "all-to-all", "collective-permute"):
        assert max(results(text, operation), default=0) < SMALLEST_WEIGHT // 2
