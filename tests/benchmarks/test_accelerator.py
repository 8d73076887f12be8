"""The small form of benchmarks.accelerator runs; its table says the right shares."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from benchmarks import accelerator, accelerator_ours
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.published import architecture_of
from routerl_jax.models.work import Work


@pytest.fixture
def config() -> DecoderConfig:
    """Wide enough for matrices to be nearly all of the work."""
    small = {"vocab_size": 1000, "embed": 256, "layers": 2, "heads": 8, "kv_heads": 2, "head_dim": 32, "mlp": 1024}
    return dataclasses.replace(architecture_of("Qwen/Qwen2.5-1.5B-Instruct"), **small)


@pytest.mark.slow
def test_the_small_form_runs(config: DecoderConfig) -> None:
    """A rollout and an update; what they report is what was done."""
    small = dataclasses.replace(config, vocab_size=512, embed=32, heads=4, head_dim=8, mlp=64)
    shapes = dataclasses.replace(accelerator_ours.TINY, turns=2)
    lines: list[dict[str, Any]] = []

    def report(what: str, **numbers: Any) -> None:
        lines.append(json.loads(json.dumps({"size": "1.5B", "part": what, "what": what, **numbers})))

    accelerator_ours.rollout(report, small, shapes)
    accelerator_ours.update(report, small, shapes, "float32", "none")
    rollout, update = lines
    assert rollout["sampled_per_s"] * rollout["seconds"] == pytest.approx(4 * 2 * shapes.sampled)
    assert 0 <= rollout["idle_share"] < 1
    assert update["tokens"] == shapes.sequences * shapes.length
    assert update["flops_per_s"] * update["seconds"] == pytest.approx(Work(config=small).update_flops([32] * 4))


def test_the_table_says_shares() -> None:
    lines = [
        {"size": "7B", "part": "limits", "what": "memory", "bytes_per_s": 4e12},
        {"size": "7B", "part": "limits", "what": "products", "flops_per_s": {"64": 1e14, "128": 8e14}},
        {
            "size": "7B",
            "what": "decode",
            "rows": 8,
            "seconds_per_step": 0.01,
            "tokens_per_s": 800.0,
            "bytes_per_s": 1e12,
        },
        {"size": "7B", "what": "update", "side": "torch", "seconds": 2.0, "tokens_per_s": 9.0, "flops_per_s": 4e14},
        {"size": "7B", "part": "rollout", "failed": "out of memory"},
    ]
    text = accelerator.table(lines)
    assert "| 7B | decode | ours | 8 rows | 800 | 0.01 | 25% of the copy |" in text
    assert "| 7B | update | torch |  | 9 | 2 | 50% of the product |" in text
    assert "| 7B | rollout | | failed |" in text
