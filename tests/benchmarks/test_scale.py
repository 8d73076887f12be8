"""Exponents and tables of benchmarks.scale, and what benchmarks.roofline_gpu reads from measured files; nothing is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from benchmarks import roofline_gpu, scale
from configs.r1_searcher_qwen25_7b import searcher_run
from routerl_jax.extras.compile_check.hlo_costs import Costs, Operation
from routerl_jax.extras.compile_check.roofline import CHIPS


def point(varied: str, value: float, **changes: Any) -> scale.Point:
    base = scale.Point(
        varied=varied,
        label=f"{value:.0f}",
        value=value,
        topology="v5e:16x16",
        update_s=value**2,
        decode_s=3.0,
        token_s=0.005,
        update_bound="compute",
        decode_bound="memory",
        update_gib=value,
        decode_gib=4.0,
        available_gib=15.75,
        mfu=0.5,
        hbm_share=0.9,
        compile_s=1.0,
    )
    return dataclasses.replace(base, **changes)


def test_exponents_of_powers() -> None:
    values = [1.0, 2.0, 4.0]
    assert scale.exponent(values, [5 * x**1.5 for x in values]) == pytest.approx(1.5)
    assert scale.exponent(values, [None, 3.0, 6.0]) == pytest.approx(1.0)  # what does not fit has no time
    assert scale.exponent(values, [None, None, 6.0]) is None


def test_the_table_has_every_point_and_its_exponents() -> None:
    points = [point("length", 2.0), point("length", 4.0), point("length", 32.0, update_s=None, decode_s=None)]
    text = scale.table(points)
    assert "| length 2 | 7 | 4 | 3 | 5 | 50% | 90% | 2.00 | 4.00 | compute, memory |" in text
    assert "32.00 (does not fit)" in text
    [exponents] = [line for line in text.splitlines() if "exponent" in line]
    assert exponents.startswith("| exponent in tokens | **1.44** | **2.00** | **0.00** | **0.00** |  |  | **1.00** |")


@pytest.fixture
def no_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """`changed` asks only for the number of the slice's chips."""
    monkeypatch.setattr(scale, "topology_devices", lambda name: [None] * 256)


@pytest.mark.usefixtures("no_slice")
def test_the_least_that_sizes_alone_say() -> None:
    """Qwen2.5-7B on 256 chips in groups of four, by hand: 57,344 bytes of keys and values a token, 16 rows of each group."""
    run = searcher_run("Qwen/Qwen2.5-7B-Instruct")
    short, long = scale.least(run, 256), scale.least(scale.changed(run, "length", 8192, scale.TOPOLOGY)[0], 256)
    cache = 16 * 4096 * 57_344 / 4
    assert (long.token_s - short.token_s) * 819e9 == pytest.approx(cache)
    assert (long.gib - short.gib) * 2**30 == pytest.approx(cache)
    assert short.decode_s == pytest.approx(4096 * short.token_s)  # 1,024 sequences in as many rows
    assert scale.least(run, 2560).idle == pytest.approx(1 - 256 / 640)  # 256 sequences an update, 640 groups
    assert short.update_s / scale.least(run, 512).update_s == pytest.approx(2)


def test_a_gpu_s_measurements_get_their_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    """One operation, bound by products at both peaks: the published 989 TFLOP/s, and the measured 494.5."""
    costs = Costs(operations=(Operation(name="x", flops=989e12, bytes=1.0, times=1),), collectives=())
    monkeypatch.setattr(roofline_gpu, "count_update", lambda line: costs)
    monkeypatch.setattr(roofline_gpu, "count_decode", lambda line: costs)
    lines = [
        {"what": "run", "card": "NVIDIA H100 80GB HBM3"},
        {"what": "memory", "bytes_per_s": 3e12},
        {"what": "products", "flops_per_s": {"2048": 1e14, "8192": 494.5e12}},
        {"what": "update", "side": "ours", "size": "1.5B", "dtype": "float32", "remat": "none", "seconds": 4.0},
        {"what": "update", "side": "torch", "size": "1.5B", "dtype": "float32", "remat": "none", "seconds": 9.0},
        {"what": "decode", "part": "generation", "size": "1.5B", "rows": 8, "seconds_per_step": 0.125},
        {"what": "decode", "part": "generation:drafts=2", "size": "1.5B", "rows": 8, "seconds_per_step": 1.0},
    ]
    update, decode = roofline_gpu.compare(lines)
    assert (update.published_s, update.limits_s, update.measured_s) == pytest.approx((1.0, 2.0, 4.0))
    assert decode.published_s == pytest.approx(1 / roofline_gpu.SEGMENT)
    assert "| 0.25, 0.50 | compute |" in roofline_gpu.table([update])
    assert CHIPS["H100"].name == update.card
