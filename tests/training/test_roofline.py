"""Time at best, from made-up costs on a made-up chip."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from routerl_jax.extras.compile_check.hlo_costs import Collective, Costs, Operation
from routerl_jax.extras.compile_check.roofline import CHIPS, Chip, chip_of, estimate, usable_links
from routerl_jax.parallel.mesh import make_mesh

CHIP = Chip(name="made up", peak_flops=100.0, memory_bandwidth=10.0, link_bandwidth=5.0, torus_axes=0)
PRODUCT = Operation(name="product", flops=200.0, bytes=5.0, times=3)  # 2 s of products, half a second of memory
NORM = Operation(name="norm", flops=0.0, bytes=10.0, times=3)  # 1 s of memory
FETCH = Operation(name="fetch", flops=0.0, bytes=20.0, times=3, asynchronous=True)  # 2 s of memory beside the others


def gather(sent: float, window: tuple[int, int] = (0, 0), kind: str = "all-gather") -> Collective:
    return Collective(kind=kind, sent=sent, members=(0, 1, 2, 3), times=3, window=window)


def test_every_instruction_takes_the_longer_of_its_two_times() -> None:
    found = estimate(Costs(operations=(PRODUCT, NORM), collectives=()), CHIP)
    assert (found.compute_s, found.memory_s, found.seconds) == (6.0, 4.5, 9.0)
    assert (found.bound, found.mfu, found.hbm_share) == ("compute", 6 / 9, 0.5)
    assert estimate(Costs(operations=(PRODUCT, NORM), collectives=()), CHIP, useful=300.0).mfu == 3 / 9


def test_fetching_ahead_takes_no_time_until_memory_binds() -> None:
    found = estimate(Costs(operations=(PRODUCT, NORM, FETCH), collectives=()), CHIP)
    assert found.seconds == found.memory_s == 10.5
    assert found.bound == "memory"


def test_fetching_goes_on_during_collectives() -> None:
    """9 s of work and 6 s of a gather: 15 s, in which all of the memory's 10.5 s pass."""
    found = estimate(Costs(operations=(PRODUCT, NORM, FETCH), collectives=(gather(10),)), CHIP)
    assert (found.exposed_s, found.memory_s, found.seconds) == (6.0, 10.5, 15.0)


def test_what_collectives_move_counts_as_bytes() -> None:
    moving = Collective(kind="all-gather", sent=10, members=(0, 1), times=3, window=(0, 0), moved=40)
    found = estimate(Costs(operations=(NORM,), collectives=(moving,)), CHIP)
    assert (found.hbm_bytes, found.memory_s, found.seconds) == (150.0, 15.0, 15.0)


def test_collectives_hide_behind_what_lies_between_and_only_once() -> None:
    """Two gathers of 2 s each share a product of 2 s; a third has nothing to hide behind."""
    costs = Costs(
        operations=(NORM, PRODUCT), collectives=(gather(10, (1, 2)), gather(10, (0, 2)), gather(10, kind="all-reduce"))
    )
    found = estimate(costs, CHIP)
    assert found.network_s == 18.0
    assert found.traffic["all-gather"].hidden_s == 9.0  # behind the product, then behind the norm
    assert found.traffic["all-reduce"].hidden_s == 0.0
    assert found.exposed_s == 9.0
    assert found.seconds == 9.0 + 9.0


def test_a_decoded_token() -> None:
    found = estimate(Costs(operations=(NORM,), collectives=()), CHIP, decoded=(3, 64), name="decode")
    assert (found.token_s, found.tokens_per_s) == (1.0, 64.0)
    assert "engine.rows" in found.hint


def test_axes_of_the_mesh_are_named() -> None:
    mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 4})
    costs = Costs(
        operations=(NORM,),
        collectives=(
            gather(1e9, kind="all-reduce"),
            Collective(kind="all-gather", sent=1.0, members=(0, 4), times=1, window=(0, 0)),
            Collective(kind="all-reduce", sent=1.0, members=tuple(range(8)), times=1, window=(0, 0)),
        ),
    )
    found = estimate(costs, CHIP, mesh, name="update")
    assert list(found.traffic) == ["all-gather/fsdp", "all-reduce/fsdp+tensor", "all-reduce/tensor"]
    assert found.bound == "network"
    assert "mesh.tensor" in found.hint


def test_more_is_computed_than_needed() -> None:
    found = estimate(Costs(operations=(PRODUCT,), collectives=()), CHIP, useful=450.0, name="update")
    assert "33% more FLOPs than needed" in found.hint
    assert "remat" in found.hint


@pytest.mark.parametrize("name", ["encode", "prefill", "decode"])
def test_settings_of_the_learner_are_no_hint_for_the_engine(name: str) -> None:
    for costs in (
        Costs(operations=(PRODUCT,), collectives=()),
        Costs(operations=(NORM,), collectives=()),
        Costs(operations=(), collectives=(gather(1e9),)),
    ):
        assert "learner." not in estimate(costs, CHIP, useful=450.0, name=name).hint


def place(*coords: int) -> SimpleNamespace:
    return SimpleNamespace(coords=coords)


def test_links_that_a_group_can_use() -> None:
    """Both directions where the group spans an axis whose ends are joined, else one; every axis has its own."""
    v5e, pod = CHIPS["v5e"], [place(x, y, 0) for x in range(16) for y in range(16)]
    assert usable_links(v5e, pod[:16], pod) == 2  # one whole column
    assert usable_links(v5e, pod, pod) == 4
    assert usable_links(v5e, pod[:4], pod) == 1  # a part of it
    small = [place(x, y, 0) for x in range(4) for y in range(4)]
    assert usable_links(v5e, small, small) == 2  # no links from end to end
    cube = [place(x, y, z) for x in range(4) for y in range(4) for z in range(4)]
    assert usable_links(CHIPS["v5p"], cube, cube) == 6
    assert usable_links(CHIPS["H100"], small, small) == 1


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
    ],
)
def test_devices_have_their_chip(kind: str, name: str) -> None:
    chip = chip_of(SimpleNamespace(device_kind=kind))
    assert chip is not None
    assert (chip.name, chip.source[:8]) == (name, "https://")


@pytest.mark.parametrize("kind", ["cpu", "TPU v4", "NVIDIA GH200 480GB", "NVIDIA H100 PCIe"])
def test_other_devices_have_none(kind: str) -> None:
    assert chip_of(SimpleNamespace(device_kind=kind)) is None
