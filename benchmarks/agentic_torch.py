"""The sides of `benchmarks.agentic` in torch: transformers' rollouts, and TRL's GRPO loss and padding."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import datasets
import torch
import transformers
import trl
from trl.trainer.utils import pad as trl_pad

from benchmarks.agentic_peer import serve_peer
from benchmarks.agentic_transformers import ContinuousRollout, Rollout
from benchmarks.agentic_work import Tokens, Trajectory, episodes


class Update:
    """One optimiser step by TRL: its trainer's loss of micro-batches padded to the longest attempt, as `_prepare_inputs` makes
    them (prompts at their beginning, completions at their end), then its optimiser."""

    def __init__(self, directory: str, work: Sequence[Trajectory], micro: int, checkpointing: bool) -> None:
        samples = len(work) // len({trajectory.group for trajectory in work})
        self._work = work
        self._trainer = trainer(directory, samples, -(-len(work) // micro), micro, checkpointing)
        model = self._trainer.model
        model.train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        attempts = episodes(work, model.config.vocab_size)
        self._batches = [
            self._padded(attempts, attempts[at : at + micro], model) for at in range(0, len(attempts), micro)
        ]
        self._trainer.current_gradient_accumulation_steps = len(self._batches)
        self._trainer.create_optimizer()

    def _padded(self, attempts: Sequence[Tokens], micro: Sequence[Tokens], model: Any) -> dict[str, Any]:
        prompts = [torch.tensor(attempt.ids[: attempt.prompt]) for attempt in micro]
        completions = [torch.tensor(attempt.ids[attempt.prompt :]) for attempt in micro]
        sampled = [torch.tensor(attempt.sampled[attempt.prompt :], dtype=torch.long) for attempt in micro]
        longest = [
            max(attempt.prompt for attempt in attempts),
            max(len(attempt.ids) - attempt.prompt for attempt in attempts),
        ]

        def pad(rows: list[Any], side: str) -> Any:
            width = longest[side == "right"]
            filled = [torch.zeros(width, dtype=torch.long), *rows]  # so that all micro-batches are as wide
            return trl_pad(filled, padding_value=0, padding_side=side)[1:]

        tool_mask = pad(sampled, "right")
        return {
            "prompt_ids": pad(prompts, "left"),
            "prompt_mask": pad([torch.ones_like(row) for row in prompts], "left"),
            "completion_ids": pad(completions, "right"),
            "completion_mask": pad([torch.ones_like(row) for row in completions], "right"),
            "tool_mask": tool_mask,
            "advantages": torch.tensor([attempt.advantage for attempt in micro]),
            "old_per_token_logps": -torch.full(tool_mask.shape, float(model.config.vocab_size)).log(),
            "num_items_in_batch": torch.tensor(sum(sum(attempt.sampled) for attempt in attempts)),
        }

    def run(self) -> dict[str, Any]:
        """One update; the tokens that were computed."""
        trainer = self._trainer
        for batch in self._batches:
            trainer._compute_loss(trainer.model, batch).backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer._metrics["train"].clear()
        slots = sum(batch["prompt_ids"].numel() + batch["completion_ids"].numel() for batch in self._batches)
        return {"slots": slots, "tokens": sum(map(len, self._work))}


def trainer(directory: str, samples: int, accumulation: int, micro: int, checkpointing: bool) -> Any:
    """A GRPO trainer of TRL's for a directory's weights; GRPO's loss, and no reference."""
    config = trl.GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        num_generations=samples,
        loss_type="grpo",
        learning_rate=1e-5,
        gradient_checkpointing=checkpointing,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    return trl.GRPOTrainer(
        model=directory,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["the quick"] * max(samples, micro)}),
        processing_class=transformers.AutoTokenizer.from_pretrained(directory),
    )


def policy(directory: str) -> Any:
    """A directory's weights, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")


if __name__ == "__main__":
    serve_peer(
        {
            "rollout": lambda directory, work: Rollout(policy(directory), work),
            "rollout_continuous": lambda directory, work: ContinuousRollout(policy(directory), work),
        },
        Update,
    )
