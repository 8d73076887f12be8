"""Rollouts by transformers, peers in `benchmarks.agentic` and `benchmarks.accelerator`."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

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


class ContinuousRollout:
    """transformers' continuous batching: the manager behind `generate_batch`, which is kept while tools work.

    Every turn is a request of its own length, sent when the conversation's tool has answered, so no turn waits for another.
    The cache is paged and has room for the whole work. Pages that a request has filled serve the later ones that begin with the
    same tokens: other attempts of the group, and the conversation's next turns.
    """

    def __init__(self, model: Any, work: Sequence[Trajectory]) -> None:
        self._work, self._vocabulary = work, model.config.vocab_size
        sampling = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=0, max_new_tokens=1
        )
        page = ContinuousBatchingConfig.page_size
        pages = sum(len(trajectory) // page + 2 for trajectory in work)
        batching = ContinuousBatchingConfig(num_blocks=pages, max_requests_per_batch=len(work))
        self._manager = model.init_continuous_batching(sampling, batching)
        self._manager.warmup()
        self._computed = 0  # tokens of all forward passes
        scheduler = self._manager.batch_processor.scheduler
        schedule = scheduler.schedule_batch

        def counted(*arguments: Any) -> Any:
            result = schedule(*arguments)
            self._computed += result[2] if result[0] else 0
            return result

        scheduler.schedule_batch = counted

    def run(self) -> dict[str, Any]:
        """One rollout; the tokens that were computed. Raises RuntimeError if a request failed."""
        work, self._computed = self._work, 0
        prompts = {each.group: self._random(each.prompt) for each in work}
        texts, turns = [[*prompts[each.group]] for each in work], [0 for _ in work]
        due = [(0.0, i) for i in range(len(work))]  # when the tool has answered, and whom
        running: dict[str, int] = {}
        tools, started = 0.0, time.perf_counter()
        self._manager.start()
        try:
            while due or running:
                while due and due[0][0] <= time.perf_counter() - started:
                    i = heapq.heappop(due)[1]
                    name = f"{i} {turns[i]}"
                    self._manager.add_request(texts[i], name, max_new_tokens=work[i].steps[turns[i]].sampled)
                    running[name] = i
                wait = due[0][0] - (time.perf_counter() - started) if due else 1.0
                if not running:
                    time.sleep(max(wait, 0))
                    tools += max(wait, 0)
                    continue
                result = self._manager.get_result(timeout=max(wait, 1e-4))
                if result is None and self._manager.is_running():
                    continue
                if result is None or result.error is not None:
                    raise RuntimeError(
                        f"transformers' continuous batching failed: {getattr(result, 'error', 'no result')}"
                    )
                i = running.pop(result.request_id)
                step = work[i].steps[turns[i]]
                texts[i] += result.generated_tokens + self._random(step.observed)
                turns[i] += 1
                if turns[i] < len(work[i].steps):
                    heapq.heappush(due, (time.perf_counter() - started + step.seconds, i))
        finally:
            self._manager.stop(keep_for_next_session=True)
        assert [len(text) for text in texts] == [len(trajectory) for trajectory in work]
        sampled = sum(trajectory.sampled for trajectory in work)
        decoded = sampled - sum(turns)  # a prefill gives the first token of a turn
        return {
            "prefilled_tokens": self._computed - decoded,
            "prefill_slots": self._computed - decoded,
            "decode_slots": sampled,
            "sampled": sampled,
            "tools_s": tools,
        }

    def _random(self, tokens: int) -> list[int]:
        return torch.randint(3, self._vocabulary, (tokens,)).tolist()
