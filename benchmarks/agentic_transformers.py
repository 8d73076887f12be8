"""A rollout loop over transformers' generate, a peer in `benchmarks.agentic` and `benchmarks.accelerator`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import peers
from benchmarks.agentic_work import Trajectory


class Rollout:
    """Search-R1's loop (llm_agent/generation.py).

    In every turn, all unfinished attempts are one padded batch. Their next texts are generated from their whole conversations.
    Then the tool answers all of them, and the next turn begins when the last reply has arrived.
    """

    def __init__(self, model: Any, work: Sequence[Trajectory]) -> None:
        self.model = model.eval()
        self._work = work

    @torch.no_grad()
    def run(self) -> dict[str, Any]:
        """One rollout; the tokens that were computed."""
        vocabulary = self.model.config.vocab_size
        texts = [torch.randint(3, vocabulary, (trajectory.prompt,)) for trajectory in self._work]
        prefilled = slots = decode_slots = turn = 0
        tools = 0.0
        while alive := [i for i, trajectory in enumerate(self._work) if turn < len(trajectory.steps)]:
            width, steps = max(len(texts[i]) for i in alive), [self._work[i].steps[turn] for i in alive]
            batch, mask = (torch.zeros(len(alive), width, dtype=torch.long) for _ in range(2))
            for row, i in enumerate(alive):
                batch[row, width - len(texts[i]) :], mask[row, width - len(texts[i]) :] = texts[i], 1
            most = max(step.sampled for step in steps)
            device = self.model.device
            written = peers.sample(self.model, batch.to(device), most, mask.to(device))[:, width:].cpu()
            prefilled += int(mask.sum())
            slots, decode_slots = slots + batch.numel(), decode_slots + written.numel()
            for row, (i, step) in enumerate(zip(alive, steps)):
                observed = torch.randint(3, vocabulary, (step.observed,))
                texts[i] = torch.cat([texts[i], written[row, : step.sampled], observed])
            waited = max(step.seconds for step in steps)
            time.sleep(waited)
            tools, turn = tools + waited, turn + 1
        assert [len(text) for text in texts] == [len(trajectory) for trajectory in self._work]
        return {
            "prefilled_tokens": prefilled,
            "prefill_slots": slots,
            "decode_slots": decode_slots,
            "sampled": sum(trajectory.sampled for trajectory in self._work),
            "tools_s": tools,
        }
