"""The work of benchmarks.agentic is that of the real traces, all sides are asked for the same, and its books add up."""

from __future__ import annotations

import argparse
import dataclasses
import json
import types
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import agentic, agentic_ours, agentic_peer, agentic_work
from benchmarks.agentic_work import Step, Trajectory
from tests import tiny

WORK = [
    Trajectory(group=0, prompt=9, steps=(Step(sampled=5, observed=30, seconds=0.01), Step(sampled=7))),
    Trajectory(group=0, prompt=9, steps=(Step(sampled=3, observed=12, seconds=0.03), Step(sampled=2))),
    Trajectory(group=1, prompt=14, steps=(Step(sampled=6),)),
    Trajectory(
        group=1, prompt=14, steps=(*(Step(sampled=4, observed=20, seconds=0.02) for _ in range(3)), Step(sampled=5))
    ),
]


def test_the_record_is_what_the_traces_say(shared_data: Callable[[str], Any]) -> None:
    """Of the first rollouts, counted in words instead of tokens: the text is split as in the record."""
    record = json.loads(agentic_work.RECORD.read_text())["rollouts"]
    import gzip

    with gzip.open(shared_data("r1searcher_traces/traces_dev.jsonl.gz"), "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == len(record) == 1194
    for row, (prompt, sampled, observed) in zip(rows, record):
        assert len(observed) == len(row["searches"]) == len(sampled) - 1
        counted = agentic_work.lengths(row, lambda text: len(text.split()))
        words, tokens = counted[0] + sum(counted[1]) + sum(counted[2]), prompt + sum(sampled) + sum(observed)
        assert 1.1 * words < tokens < 2.6 * words


def test_groups_share_prompts_and_the_long_tail_is_drawn() -> None:
    work = agentic_work.trajectories(8, 8)
    assert [each.group for each in work] == [i // 8 for i in range(64)]
    assert all(len({each.prompt for each in work if each.group == group}) == 1 for group in range(8))
    assert agentic_work.trajectories(8, 8) == work
    lengths = sorted(map(len, work))
    assert lengths[-1] > 1.5 * lengths[32]
    assert all(len(each) <= 1500 for each in agentic_work.trajectories(2, 4, longest=1500))
    assert all(step.seconds > 0 for each in work for step in each.steps[:-1])
    must = sum(work[8 * group].prompt - 1 for group in range(8)) + sum(each.fed for each in work)
    assert agentic_work.must_prefill(work) == must


def test_more_attempts_than_were_recorded_are_drawn_again() -> None:
    """All of the record before any comes twice; and what is drawn of fewer does not change."""
    recorded = len(json.loads(agentic_work.RECORD.read_text())["rollouts"])
    shapes = [tuple((step.sampled, step.observed) for step in each.steps) for each in agentic_work.trajectories(300, 8)]
    assert len(shapes) == 2400 > 2 * recorded
    assert sorted(shapes[:recorded]) == sorted(shapes[recorded : 2 * recorded]) != shapes[:recorded]
    with pytest.raises(ValueError, match="at most 5 tokens"):
        agentic_work.trajectories(1, 1, longest=5)


@pytest.mark.slow
def test_continuous_batching_writes_what_was_recorded_and_reads_pages_again() -> None:
    """Every conversation has its recorded length (the rollout asserts it), twice with one manager; less is computed than the
    whole conversations of every turn."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    from benchmarks.agentic_transformers import ContinuousRollout

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    work = [
        dataclasses.replace(each, prompt=600, steps=(Step(sampled=5, observed=300, seconds=0.01), Step(sampled=4)))
        for each in WORK
    ]
    rollout = ContinuousRollout(model, work)
    whole = len(work) * (600 + 905)
    for _ in range(2):
        found = rollout.run()
        assert found["sampled"] == len(work) * 9
        assert agentic_work.must_prefill(work) <= found["prefilled_tokens"] < whole


def test_episodes_have_the_recorded_lengths() -> None:
    found = agentic_work.episodes(WORK, 100)
    for each, attempt in zip(found, WORK, strict=True):
        assert (len(each.ids), sum(each.sampled)) == (len(attempt), attempt.sampled)
        assert not any(each.sampled[: attempt.prompt])
    assert found[0].ids[:9] == found[1].ids[:9] != found[2].ids[:9]


@pytest.mark.slow
def test_a_rollout_feeds_nothing_twice_and_compiles_nothing_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """And where its time goes adds up, with no line below 0 but that of what is not known otherwise."""
    model = tiny.model()
    assert model.tokenizer is not None
    rollout = agentic_ours.Rollout(
        model, WORK, deterministic=True
    )  # else which calls there are depends on the tools' time
    rollout.run()
    rates = iter(
        [1e14, 1e15, 1e15, 1e15, 1e15, 1e17]
    )  # one that was measured while something else ran, and one by mistake
    monkeypatch.setattr(
        agentic_ours,
        "limits",
        lambda *_: {"matmul_flops_per_s": 1e15, "memory_bytes_per_s": next(rates), "dispatch_s": 1e-7},
    )
    found = agentic_ours.Accounts(rollout).run()
    assert found["limits"]["memory_bytes_per_s"] == 1e15
    assert found["compilations"] == 0
    assert found["must_prefill"] <= found["prefilled_tokens"] <= 1.05 * found["must_prefill"]
    assert found["decoded_tokens"] == found["sampled"] == sum(each.sampled for each in WORK)
    assert sum(found["lines"].values()) == pytest.approx(found["seconds"])
    assert min(found["lines"].values()) >= 0
    assert found["lines"]["waiting for tools, no row could run"] > 0
    assert found["lines"]["prefill, recomputed"] == pytest.approx(0, abs=0.05 * found["seconds"])


def test_seconds_outside_of_others() -> None:
    assert agentic_ours.outside([(0, 4), (3, 6), (9, 10)], [(1, 2), (5, 9.5)]) == pytest.approx(1 + 3 + 0.5)


def test_ratios_and_shares() -> None:
    """By hand; the first answer of a side is its warm-up."""
    accounts = {
        "seconds": 5.0,
        "lines": {"decode, at the limit": 1.0, "prefill, at the limit": 0.5},
        "of_limit": {"decode": 0.5},
        "limits": {"matmul_flops_per_s": 1e9},
    }
    ours, theirs = [{"seconds": s, "flops": 3e9} for s in (9, 2, 4)], [{"seconds": s} for s in (9, 6, 8)]
    rollout = agentic.Measured(
        size="8M",
        part="rollout",
        answers={"accounts": [accounts], "ours": ours, "transformers": theirs},
        failed={},
        gib={},
    )
    update = dataclasses.replace(
        rollout, part="update", answers={"ours": ours, "trl": theirs}, gib={"ours": 1.0, "trl": 2.5}
    )
    found = agentic.summary([rollout, update])
    assert found["ratios"] == {
        "rollout_vs_transformers_8M": 2.5,
        "update_vs_trl_8M": 2.5,
        "memory_vs_trl_8M": 2.5,
    }
    shares = {
        "decode": 0.5,
        "rollout_ours": 0.5,
        "rollout_transformers": 1.5 / 7,
        "update_ours": 1.0,
        "update_trl": 3 / 7,
    }
    assert found["of_limit"] == pytest.approx({f"{name}_8M": share for name, share in shares.items()})


def test_a_peer_is_asked_for_what_the_options_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large model one attempt is a micro-batch, and of few attempts there are no more than all."""

    def update(weights: str, work: list[Trajectory], micro: int, checkpointing: bool) -> types.SimpleNamespace:
        return types.SimpleNamespace(run=lambda: {"asked": (weights, len(work), micro, checkpointing)})

    asked = []
    monkeypatch.setattr(agentic_peer, "serve", lambda parts: asked.append(parts))
    agentic_peer.serve_peer({"rollout": lambda weights, work: update(weights, work, 0, False)}, update)
    (parts,) = asked
    options = argparse.Namespace(weights="w", groups=2, samples=2, longest=1500, size="0.9M", checkpointing=1)
    assert parts["rollout"](options)() == {"asked": ("w", 4, 0, False)}
    assert parts["update"](options)() == {"asked": ("w", 4, 4, True)}
    options.size, options.checkpointing = "135M", 0
    assert parts["update"](options)() == {"asked": ("w", 4, 1, False)}
