"""What compiled programs compute, move and send, counted from their text, against numbers by hand and XLA's own count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from routerl_jax.extras.compile_check.hlo import parse
from routerl_jax.extras.compile_check.hlo_costs import Costs, count, members, product_flops
from routerl_jax.parallel.mesh import make_mesh

M, K, N = 64, 32, 48
PRODUCT = 2 * M * K * N


def costs(function: Callable[..., Any], *arguments: Any, trips: float = 1) -> Costs:
    return count(text(jax.jit(function).lower(*arguments).compile()), trips=trips)


def text(compiled: jax.stages.Compiled) -> str:
    found = compiled.as_text()
    assert found is not None
    return found


def array(*shape: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def test_a_product() -> None:
    """Two FLOPs a multiply-add; both factors are read and the result is written, once."""
    found = costs(jnp.matmul, array(M, K), array(K, N))
    assert found.flops == PRODUCT
    assert found.bytes == 4 * (M * K + K * N + M * N)
    assert costs(lambda x, y: jnp.einsum("bij,bjk->bik", x, y), array(5, M, K), array(5, K, N)).flops == 5 * PRODUCT
    assert costs(lambda x: x + 1, array(M, K)).flops == 0


def test_a_scan_counts_as_often_as_it_goes_round() -> None:
    def run(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    layers = 7
    found = costs(run, array(M, K), array(layers, K, K))
    assert found.flops == layers * 2 * M * K * K
    # The stack is read once, slice by slice, and not as a whole every time; activations come on top.
    stack, activations = layers * K * K * 4, layers * M * K * 4
    assert stack < found.bytes < 3 * stack + 12 * activations
    assert not found.unknown_loops


def test_gradients_of_a_scan_take_twice_as_much_again() -> None:
    def loss(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()

    found = costs(jax.grad(loss, argnums=1), array(M, K), array(7, K, K))
    # The gradient in x of the first layer is wanted by nobody, but a scan computes all alike.
    assert found.flops == 3 * 7 * 2 * M * K * K


def test_scans_in_scans() -> None:
    def inner(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, length=3)[0]

    def outer(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (inner(x, w), None), x, weights)[0]

    assert costs(outer, array(M, K), array(5, K, K)).flops == 3 * 5 * 2 * M * K * K


def test_loops_that_only_a_value_bounds() -> None:
    """They go round as often as the caller says, and are named."""

    def run(x: jax.Array, w: jax.Array, n: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)

    arguments = array(M, K), array(K, K), jax.ShapeDtypeStruct((), jnp.int32)
    once, often = costs(run, *arguments), costs(run, *arguments, trips=6)
    assert len(once.unknown_loops) == 1
    assert (once.flops, often.flops) == (2 * M * K * K, 6 * 2 * M * K * K)


def test_a_loop_that_may_be_left_early_counts_to_its_bound() -> None:
    def run(x: jax.Array, w: jax.Array) -> jax.Array:
        def go_on(carry: tuple[Any, Any]) -> jax.Array:
            return (carry[0] < 9) & (carry[1].sum() > 0)

        return jax.lax.while_loop(go_on, lambda carry: (carry[0] + 1, jnp.tanh(carry[1] @ w)), (0, x))[1]

    found = costs(run, array(M, K), array(K, K))
    assert found.flops == 9 * 2 * M * K * K
    assert not found.unknown_loops


def test_the_costlier_branch_counts() -> None:
    def run(which: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.cond(which, lambda: x @ w @ w, lambda: x @ w)

    found = costs(run, jax.ShapeDtypeStruct((), jnp.bool_), array(M, K), array(K, K))
    assert found.flops == 2 * 2 * M * K * K


def test_an_update_in_place_writes_what_is_new() -> None:
    def put(cache: jax.Array, row: jax.Array, at: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(cache, row, (at, 0))

    lowered = jax.jit(put, donate_argnums=0).lower(array(1024, K), array(1, K), jax.ShapeDtypeStruct((), jnp.int32))
    assert count(text(lowered.compile())).bytes <= 4 * (3 * K + 1)


@pytest.mark.parametrize(
    ("window", "settings"),
    [
        ((3,), {"padding": [(1, 1)]}),
        ((4,), {"padding": [(3, 2)], "window_strides": (2,)}),
        ((3,), {"padding": [(2, 4)], "rhs_dilation": (2,), "lhs_dilation": (3,)}),
    ],
)
def test_convolutions_as_xla_counts_them(window: tuple[int, ...], settings: Any) -> None:
    """Places where the window lies on padding, or between entries, do not count."""

    def run(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, w, dimension_numbers=("NHC", "HIO", "NHC"), **({"window_strides": (1,)} | settings)
        )

    compiled = jax.jit(run).lower(array(2, 11, 5), array(*window, 5, 7)).compile()
    module = parse(text(compiled))
    found = sum(product_flops(c, one) for c in module.computations.values() for one in c.instructions.values())
    by_xla = compiled.cost_analysis()
    assert by_xla is not None
    assert found == pytest.approx(by_xla["flops"], rel=0.02)  # which counts all other arithmetic, too


SIDE, WAYS = 128, 8


@pytest.mark.parametrize(
    ("kind", "function", "out", "sent"),
    [
        ("all-reduce", lambda x: jax.lax.psum(x, "data"), PartitionSpec(), 2 * 7 / 8 * SIDE / WAYS * SIDE * 4),
        (
            "all-gather",
            lambda x: jax.lax.all_gather(x, "data", tiled=True),
            PartitionSpec(),
            7 / 8 * SIDE * SIDE * 4,
        ),
        (
            "reduce-scatter",
            lambda x: jax.lax.psum_scatter(x, "data", tiled=True),
            PartitionSpec("data"),
            7 / 8 * SIDE / WAYS * SIDE * 4,
        ),
        (
            "all-to-all",
            lambda x: jax.lax.all_to_all(x, "data", 1, 0, tiled=True),
            PartitionSpec("data"),
            7 / 8 * SIDE / WAYS * SIDE * 4,
        ),
        (
            "collective-permute",
            lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]),
            PartitionSpec("data"),
            SIDE / WAYS * SIDE * 4,
        ),
    ],
)
def test_collectives(kind: str, function: Any, out: PartitionSpec, sent: float) -> None:
    """Bytes that each of eight devices sends on a ring."""
    mesh = make_mesh()
    run = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=out, check_vma=False)
    found = costs(run, array(SIDE, SIDE, sharding=NamedSharding(mesh, PartitionSpec("data"))))
    assert found.sent == pytest.approx({kind: sent})
    assert [one.times for one in found.collectives] == [1]
    if kind != "collective-permute":
        assert found.collectives[0].members == tuple(range(8))


def test_collectives_in_a_loop() -> None:
    mesh = make_mesh({"data": 2, "fsdp": 4})
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 5, lambda _, x: jnp.tanh(jax.lax.psum(x, "fsdp")), x)

    specs = PartitionSpec("data")
    run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)
    [found] = costs(run, array(16, 8, sharding=sharding)).collectives
    assert (found.kind, found.times, found.members) == ("all-reduce", 5, (0, 1, 2, 3))
    assert found.sent == 2 * 3 / 4 * 8 * 8 * 4


HEADER = "HloModule made_up, num_partitions=8\n\n"


def made_up(body: str, more: str = "") -> str:
    return f"{HEADER}{more}\nENTRY %main (x: f32[8,128]) -> f32[8,128] {{\n{body}\n}}\n"


def test_asynchronous_collectives_overlap_with_what_lies_between() -> None:
    """The second is ended at once, and hides nothing."""
    found = count(
        made_up("""
  %x = f32[8,128]{1,0} parameter(0)
  %w = f32[128,128]{1,0} parameter(1)
  %ag = (f32[8,128], f32[32,128]) all-gather-start(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %dot = f32[8,128]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[32,128]{1,0} all-gather-done(%ag)
  %ag2 = (f32[8,128], f32[16,128]) all-gather-start(%dot), channel_id=2, replica_groups={{0,4},{1,5}}, dimensions={0}
  ROOT %done2 = f32[16,128]{1,0} all-gather-done(%ag2)""")
    )
    assert [(one.members, one.overlaps, one.sent) for one in found.collectives] == [
        ((0, 1, 2, 3), True, 3 * 8 * 128 * 4),
        ((0, 4), False, 8 * 128 * 4),
    ]
    assert [found.operations[i].name for i in range(*found.collectives[0].window)] == ["dot"]


def test_what_collectives_move() -> None:
    """They read their operands from main memory and write their results: as one instruction, or as the begin lists them."""
    both = 4 * (8 * 128 + 32 * 128)
    found = count(
        made_up("""
  %x = f32[8,128]{1,0} parameter(0)
  %now = f32[32,128]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}
  %ag = (f32[8,128], f32[32,128]) all-gather-start(%x), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}
  %ar = f32[8,128]{1,0} all-reduce-start(%x), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add
  %done = f32[32,128]{1,0} all-gather-done(%ag)
  ROOT %reduced = f32[8,128]{1,0} all-reduce-done(%ar)""")
    )
    assert [one.moved for one in found.collectives] == [both, both, 4 * 2 * 8 * 128]
    assert found.bytes == 2 * both + 4 * 2 * 8 * 128


SCATTER = """
%scattered (p: f32[8,128], q: f32[16]) -> (f32[4,128], f32[8]) {
  %p = f32[8,128]{1,0} parameter(0)
  %q = f32[16]{0} parameter(1)
  %ar = (f32[8,128], f32[16]) all-reduce(%p, %q), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %id = u32[] partition-id()
  %r = f32[8,128]{1,0} get-tuple-element(%ar), index=0
  %part = f32[4,128]{1,0} dynamic-slice(%r, %id, %id), dynamic_slice_sizes={4,128}
  %s = f32[16]{0} get-tuple-element(%ar), index=1
  %rest = f32[8]{0} dynamic-slice(%s, %id), dynamic_slice_sizes={8}
  ROOT %t = (f32[4,128], f32[8]) tuple(%part, SECOND)
}
"""


@pytest.mark.parametrize(("second", "kind", "times"), [("%rest", "reduce-scatter", 1), ("%s", "all-reduce", 2)])
def test_a_reduce_scatter_as_tpus_write_it(second: str, kind: str, times: int) -> None:
    """A fusion that sums and keeps its slices sends half as much as one of which a sum is kept."""
    found = count(
        made_up(
            """
  %x = f32[8,128]{1,0} parameter(0)
  %y = f32[16]{0} parameter(1)
  ROOT %f = (f32[4,128], f32[8]) fusion(%x, %y), kind=kCustom, calls=%scattered""",
            SCATTER.replace("SECOND", second),
        )
    )
    assert found.sent == {kind: times * 4 * (8 * 128 + 16) / 2}


def test_collectives_that_are_no_pair_of_start_and_done() -> None:
    """A ragged all-to-all has no end of its own; an asynchronous call may have an update between its start and its end."""
    found = count(
        made_up(
            """
  %x = f32[8,128]{1,0} parameter(0)
  %o = s32[8]{0} parameter(1)
  %ra = f32[8,128]{1,0} ragged-all-to-all(%x, %x, %o, %o, %o, %o), channel_id=1, replica_groups=[1,8]<=[8]
  %rs = ((f32[8,128]), f32[1,128]) async-start(%x), calls=%scatter
  %on = ((f32[8,128]), f32[1,128]) async-update(%rs)
  ROOT %done = f32[1,128]{1,0} async-done(%on)""",
            """
%scatter (p: f32[8,128]) -> f32[1,128] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %r = f32[1,128]{1,0} reduce-scatter(%p), channel_id=2, replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}
""",
        )
    )
    sent = 7 / 8 * 8 * 128 * 4
    assert [(one.kind, one.sent) for one in found.collectives] == [("all-to-all", sent), ("reduce-scatter", sent)]


def test_what_lies_in_vector_memory_moves_nothing() -> None:
    """A copy from the main memory of a TPU reads; a product of what is there then does not."""
    found = count(
        made_up("""
  %x = f32[8,128]{1,0:T(8,128)S(1)} parameter(0)
  %w = f32[128,128]{1,0:T(8,128)} parameter(1)
  %start = (f32[128,128]{1,0:T(8,128)S(1)}, f32[128,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%w)
  %done = f32[128,128]{1,0:T(8,128)S(1)} copy-done(%start)
  ROOT %dot = f32[8,128]{1,0:T(8,128)S(1)} convolution(%x, %done), dim_labels=bf_io->bf""")
    )
    assert found.flops == 2 * 8 * 128 * 128
    assert found.bytes == 128 * 128 * 4


def test_heads_written_as_a_padded_window() -> None:
    """How the TPU compiler writes x [D] times w [D, N=2, H]: of the window's two places one lies on padding."""
    found = count(
        made_up(
            """
  %x = bf16[2,256,1,512]{3,2,1,0} parameter(0)
  %w = bf16[512,1,2,128]{3,2,1,0} parameter(1)
  ROOT %c = bf16[2,256,2,128]{3,1,2,0} convolution(%x, %w), """
            "window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, dim_labels=0b1f_i01o->0b1f"
        )
    )
    assert found.flops == 2 * 2 * 256 * 512 * 2 * 128


PAGED = """
  %lengths = s32[4]{0} parameter(0)
  %table = s32[4,3]{1,0} parameter(1)
  %q = bf16[4,6,128]{2,1,0} parameter(2)
  %pages = bf16[99,64,2,128]{3,2,1,0} parameter(3)
  ROOT %ragged_paged_attention_kernel.1 = bf16[4,6,128]{2,1,0} custom-call(%lengths, %table, %q, %pages), \
custom_call_target="tpu_custom_call"
"""


def test_paged_attention() -> None:
    """Four rows of three pages of 64 tokens; keys and values of one head; half of them filled if told so."""
    whole, half = count(made_up(PAGED)), count(made_up(PAGED), filled=0.5)
    assert (whole.flops, half.flops) == (4 * 4 * 6 * 128 * 192, 4 * 4 * 6 * 128 * 96)
    small = 4 * (4 + 12) + 2 * 2 * 4 * 6 * 128
    assert (whole.bytes, half.bytes) == (4 * 192 * 2 * 128 * 2 + small, 4 * 96 * 2 * 128 * 2 + small)
    assert not whole.uncounted


def test_grouped_products() -> None:
    """Three experts, of which each takes some of 64 rows; then their gradient. Half of the rows are in a group if told so."""
    text = """
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[3,32,48]{2,1,0} parameter(1)
  %sizes = s32[3]{0} parameter(2)
  %ragged-dot-metadata.1 = (s32[4]{0}, s32[6]{0}) custom-call(%sizes), custom_call_target="tpu_custom_call"
  %starts = s32[4]{0} get-tuple-element(%ragged-dot-metadata.1), index=0
  %ragged-dot-none.1 = bf16[64,48]{1,0} custom-call(%starts, %x, %w), custom_call_target="tpu_custom_call"
  ROOT %ragged-dot-none.2 = bf16[3,32,48]{2,1,0} custom-call(%starts, %x, %ragged-dot-none.1), \
custom_call_target="tpu_custom_call"
"""
    whole, half = count(made_up(text)), count(made_up(text), grouped=0.5)
    assert [one.flops for one in whole.operations] == [0, PRODUCT, PRODUCT]
    assert half.flops == PRODUCT
    assert half.operations[1].bytes == 2 * (3 * K * N + M * (K + N) // 2)
    assert not whole.uncounted


def test_library_calls_of_gpus() -> None:
    """A product of cuBLAS by its contracted axes, attention of cuDNN (rows, tokens, heads, width) by its two products."""
    found = count(
        made_up(
            """
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[32,48]{1,0} parameter(1)
  %q = bf16[2,16,4,8]{3,2,1,0} parameter(2)
  %k = bf16[2,24,2,8]{3,2,1,0} parameter(3)
  %gemm = (bf16[64,48]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", """
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
            """
  ROOT %fmha = (bf16[2,16,4,8]{3,2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax\""""
        )
    )
    assert [one.flops for one in found.operations] == [2 * 64 * 32 * 48, 2 * 2 * (2 * 16 * 4 * 8) * 24]


def test_an_unknown_kernel_is_named() -> None:
    found = count(made_up(PAGED.replace("ragged_paged_attention_kernel", "something_new")))
    assert found.uncounted == ("something_new.1",)
    assert found.flops == 0


@pytest.mark.parametrize(
    ("groups", "first"),
    [
        ("{{0,2},{1,3}}", [0, 2]),
        ("[2,4]<=[8]", [0, 1, 2, 3]),
        ("[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("mesh['a'=2,'b'=4] {'b'}", [0, 1, 2, 3]),
        ("mesh['a'=2,'b'=4] {'a'}", [0, 4]),
        ("{}", list(range(8))),
    ],
)
def test_groups(groups: str, first: list[int]) -> None:
    module = parse(
        made_up(f"""
  %x = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add""")
    )
    assert members(module.entry.root, module.partitions) == first


def test_the_number_of_partitions_is_at_the_end_of_a_long_first_line() -> None:
    layout = ", ".join(["f32[8,128]{1,0}"] * 20_000)
    text = made_up("  ROOT %x = f32[8,128]{1,0} parameter(0)")
    assert (
        parse(text.replace("num_partitions", f"entry_computation_layout={{{layout}}}, num_partitions")).partitions == 8
    )


LOOP = """
%body (s: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %s = (s32[], f32[8,128]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%s), index=1
  %by = s32[] constant(BY)
  %next = s32[] add(%i, %by)
  %twice = f32[8,128]{1,0} add(%x, %x)
  ROOT %t = (s32[], f32[8,128]) tuple(%next, %twice)
}

%more (s: (s32[], f32[8,128])) -> pred[] {
  %s.1 = (s32[], f32[8,128]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %to = s32[] constant(TO)
  ROOT %c = pred[] compare(%i.1, %to), direction=WAY
}
"""


@pytest.mark.parametrize(
    ("first", "by", "to", "way", "trips"),
    [
        ("constant(0)", 1, 10, "LT", 10),
        ("constant(0)", 3, 10, "LE", 4),
        ("constant(9)", -2, 0, "GT", 5),
        ("constant(9)", -1, 0, "NE", 9),
        ("parameter(1)", 1, 10, "LT", 10),  # as scans begin
        ("parameter(1)", -1, 0, "GT", None),  # anything
    ],
)
def test_loops_that_count_up_and_down(first: str, by: int, to: int, way: str, trips: int | None) -> None:
    more = LOOP.replace("BY", str(by)).replace("TO", str(to)).replace("WAY", way)
    text = made_up(
        f"""
  %x = f32[8,128]{{1,0}} parameter(0)
  %first = s32[] {first}
  %t = (s32[], f32[8,128]) tuple(%first, %x)
  ROOT %loop = (s32[], f32[8,128]) while(%t), condition=%more, body=%body""",
        more,
    )
    found = count(text, trips=77)
    assert {one.times for one in found.operations if one.name == "twice"} == {77 if trips is None else trips}
    assert found.unknown_loops == (() if trips is not None else ("loop",))


def test_elements_of_tuples_without_instructions_of_their_own() -> None:
    """libtpu 0.0.50 writes `%s#0` where others have a get-tuple-element: the same counts, with tuples in tuples, too."""
    loop = """
  %x = f32[8,128]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %t = (s32[], f32[8,128]) tuple(%zero, %x)
  %loop = (s32[], f32[8,128]) while(%t), condition=%more, body=%body
"""
    more = LOOP.replace("BY", "1").replace("TO", "10").replace("WAY", "LT")
    result = "  %y = f32[8,128]{1,0} get-tuple-element(%loop), index=1\n  ROOT %n = f32[8,128]{1,0} negate(%y)"
    known = count(made_up(loop + result, more))
    lines = [line for line in more.splitlines() if "get-tuple-element" not in line]
    short = "\n".join(lines).replace("%i.1", "%s.1#0").replace("%i", "%s#0").replace("%x", "%s#1")
    assert "#" in short
    assert "%i" not in short
    assert count(made_up(loop + "  ROOT %n = f32[8,128]{1,0} negate(%loop#1)", short)) == known
    nested = parse(
        made_up("""
  %p = ((s32[3]{0:T(128)}, (bf16[5,7]{1,0:T(8,128)(2,1)S(1)}, pred[2]{0})), f32[4]{0}) parameter(0)
  ROOT %t = (bf16[5,7], pred[2], f32[4]) tuple(%p#0#1#0, %p#0#1#1, %p#1)""")
    ).entry
    shapes = [(one.shape.dtype, one.shape.dims, one.shape.memory) for one in nested.operands(nested.root)]
    assert shapes == [("bf16", (5, 7), 1), ("pred", (2,), 0), ("f32", (4,), 0)]


def test_no_program() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        count("HloModule nothing\n")
