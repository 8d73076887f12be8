"""The peers of `benchmarks.accelerator` on the same card: transformers' generate, and its forward with torch's AdamW."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.accelerator_ours import Report, Shapes, conversations, report_rollout, report_traces, report_update
from benchmarks.agentic_work import Trajectory
from routerl_jax.models.config import DecoderConfig
from routerl_jax.models.families.llama import decoder_to_hf


def _model(config: DecoderConfig, dtype: Any) -> tuple[Any, str]:
    """Random weights in transformers, attention by torch's fused kernels."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    fields = decoder_to_hf(dataclasses.replace(config, eos_ids=()), "bfloat16")
    hf = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(hf, dtype=dtype, attn_implementation="sdpa")
    return model, device


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak() -> float | None:
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None


def decode(report: Report, config: DecoderConfig, shapes: Shapes) -> None:
    """Seconds of a step of generate: of 33 tokens less of one, at the same live length, each after one of its kind."""
    import torch

    model, device = _model(config, torch.bfloat16)
    for rows in shapes.rows:
        took = {}
        for tokens in (1, 33, 1, 33):
            batch = torch.randint(0, config.vocab_size, (rows, shapes.live), device=device)
            _wait()
            started = time.perf_counter()
            peers.sample(model, batch, tokens)
            _wait()
            took[tokens] = time.perf_counter() - started
        step = (took[33] - took[1]) / 32
        report(
            "decode",
            side="transformers",
            rows=rows,
            live=shapes.live,
            seconds_per_step=step,
            tokens_per_s=rows / step,
            prefill_s=took[1],
            peak_gib=_peak(),
        )


def rollout(report: Report, config: DecoderConfig, shapes: Shapes) -> None:
    """The same rollout; the whole conversation is fed again each turn."""
    import torch

    model, device = _model(config, torch.bfloat16)
    seconds = []
    for _ in range(max(shapes.repeats - 1, 1) + 1):
        _wait()
        started = time.perf_counter()
        batch = torch.randint(0, config.vocab_size, (shapes.groups, shapes.prompt), device=device)
        batch = batch.repeat_interleave(shapes.samples, 0)
        for turn in range(shapes.turns):
            batch = peers.sample(model, batch, shapes.sampled)
            if turn < shapes.turns - 1:
                observed = torch.randint(0, config.vocab_size, (len(batch), shapes.observed), device=device)
                batch = torch.cat([batch, observed], 1)
        assert batch.shape == (shapes.groups * shapes.samples, shapes.conversation)
        _wait()
        seconds.append(time.perf_counter() - started)
    report_rollout(report, "transformers", shapes, seconds[1:], first_s=seconds[0], peak_gib=_peak())


def traces(report: Report, config: DecoderConfig, work: Sequence[Trajectory]) -> None:
    """Attempts of recorded lengths, once: nothing is compiled, and the products before have warmed the card up."""
    import torch

    from benchmarks.agentic_transformers import Rollout as Loop

    loop = Loop(_model(config, torch.bfloat16)[0], work)
    peers.sample(loop.model, torch.ones(len(work), work[0].prompt, dtype=torch.long, device=loop.model.device), 4)
    _wait()
    started = time.perf_counter()
    counted = loop.run()
    report_traces(report, "transformers", work, [time.perf_counter() - started], counted, peak_gib=_peak())


def update(report: Report, config: DecoderConfig, shapes: Shapes, dtype: str, checkpointing: bool) -> None:
    """The same loss in torch; bfloat16 by autocast over weights of another type, AdamW in one fused kernel."""
    import torch

    model, device = _model(config, getattr(torch, dtype))
    if checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=device == "cuda")
    sequences = conversations(config.vocab_size, shapes)
    advantages = np.random.default_rng(0).normal(size=len(sequences)).astype(np.float32)
    total, rows = sum(int(s.loss_mask.sum()) for s in sequences), max(shapes.micro_tokens // shapes.length, 1)

    def update() -> None:
        for at in range(0, len(sequences), rows):
            micro = sequences[at : at + rows]
            ids = torch.tensor(np.stack([s.tokens.astype(np.int64) for s in micro]), device=device)
            mask = torch.tensor(np.stack([s.loss_mask.astype(np.float32) for s in micro]), device=device)
            old = torch.tensor(np.stack([s.logprobs for s in micro]), device=device)
            advantage = torch.tensor(advantages[at : at + rows], device=device)[:, None]
            with torch.autocast(device, torch.bfloat16, enabled=dtype != "bfloat16"):
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
            logprobs = -torch.nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            ).view(len(micro), -1)
            ratio = (logprobs - old[:, 1:]).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            ((loss * mask[:, 1:]).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = []
    for _ in range(shapes.repeats + 1):
        _wait()
        started = time.perf_counter()
        update()
        _wait()
        seconds.append(time.perf_counter() - started)
    remat = "full" if checkpointing else "none"
    report_update(report, "torch", config, shapes, seconds, dtype=dtype, remat=remat, peak_gib=_peak())
