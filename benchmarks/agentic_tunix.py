"""The sides of `benchmarks.agentic` in google-tunix, which has a Python of its own (`make peers`).

Rollouts are what its agentic learner does on a CPU: RolloutOrchestrator runs an agent and an environment for every attempt,
and every turn is one call of the vanilla sampler with one conversation, prefilled from its beginning. In two things it is
helped, so that turns are as long as recorded and nothing is compiled anew: buffers have one of a few lengths, and no token ends
a turn.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from transformers import AutoConfig
from tunix.generate import sampler as tunix_sampler
from tunix.generate import tokenizer_adapter
from tunix.models.llama3 import model as llama
from tunix.models.llama3 import params as llama_params
from tunix.rl import algo_core, common
from tunix.rl.agentic import utils as agentic_utils
from tunix.rl.agentic.agents import agent_types, base_agent
from tunix.rl.agentic.environments import base_environment
from tunix.rl.agentic.pipeline import rollout_orchestrator
from tunix.rl.rollout import base_rollout

from benchmarks.agentic_peer import MICRO, serve_peer
from benchmarks.agentic_work import Trajectory, episodes

CONCURRENCY = 16  # GRPOConfig's default
PROMPT, TURN = (
    256,
    128,
)  # shortest buffers of prompts (longer ones are powers of two, as the sampler has it) and of turns
PAD, BOS = 0, 0  # 0: the sampler puts no begin-of-text token in front


class Ids:
    """A tokenizer whose texts are ids with spaces between them, so that the host has next to nothing to do."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return PAD


class FixedLengths(tunix_sampler.Sampler):
    """Stops after exactly as many tokens as asked for; buffers have few lengths, so that few programs are compiled."""

    def init_sample_state(self, all_input_ids: Any, total_sampling_steps: int, *inputs: Any, **options: Any) -> Any:
        width = all_input_ids.shape[1]
        room = -(-(total_sampling_steps - width) // TURN) * TURN
        state = super().init_sample_state(all_input_ids, width + room, *inputs, **options)
        return state.replace(total_sampling_steps=jnp.int32(total_sampling_steps - 1))


def load(directory: str) -> Any:
    """The weights in tunix's Llama."""
    hf_config = AutoConfig.from_pretrained(directory)
    rope = getattr(hf_config, "rope_parameters", None) or {}
    config = llama.ModelConfig(
        num_layers=hf_config.num_hidden_layers,
        vocab_size=hf_config.vocab_size,
        embed_dim=hf_config.hidden_size,
        hidden_dim=hf_config.intermediate_size,
        num_heads=hf_config.num_attention_heads,
        head_dim=hf_config.head_dim,
        num_kv_heads=hf_config.num_key_value_heads,
        rope_theta=int(rope.get("rope_theta") or hf_config.rope_theta),
        norm_eps=hf_config.rms_norm_eps,
        weight_tying=hf_config.tie_word_embeddings,
    )
    return llama_params.create_model_from_safe_tensors(directory, config, model_mesh(), jnp.float32)


def model_mesh() -> jax.sharding.Mesh:
    """One device: the sampler is given one conversation at a time."""
    return jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))


class Agent(base_agent.ConversationAgentBase):
    """Repeats the sampler's text; the environment decides when the episode is over."""

    def update_from_model(self, response: str, **_: Any) -> Any:
        self._trajectory.steps.append(agent_types.Step(model_response=response))
        self._messages.append({"role": "assistant", "content": response})
        return agent_types.Action(action=response)

    def _init_messages(self, system_prompt: str) -> None:
        self._messages = []


class Environment(base_environment.BaseTaskEnv):
    """Sleeps as long as the tool took, and gives as many tokens as it gave."""

    def __init__(self, attempt: Trajectory, **more: Any) -> None:
        super().__init__({}, max_steps=len(attempt.steps), **more)
        self.attempt, self.turn = attempt, 0

    def _initial_observation(self) -> str:
        self.turn = 0
        return _words(self.attempt.prompt)

    def _step_impl(self, action: Any) -> Any:
        step = self.attempt.steps[self.turn]
        self.turn += 1
        time.sleep(step.seconds)
        is_last = self.turn == len(self.attempt.steps)
        return base_environment.EnvStepResult(
            observation=None if is_last else _words(step.observed), reward=0.0, done=is_last, info={}
        )


def _words(count: int) -> str:
    return " ".join(["7"] * count)


class Rollout:
    """The rollout of some work."""

    def __init__(self, directory: str, work: Sequence[Trajectory]) -> None:
        self._work = work
        longest, turn = max(map(len, work)), max(step.sampled for trajectory in work for step in trajectory.steps)
        room = tunix_sampler.utils.next_power_of_2(longest) + -(-turn // TURN) * TURN
        model = load(directory)
        config = model.config
        self._sampler = FixedLengths(
            model,
            tokenizer_adapter.TokenizerAdapter(Ids()),
            tunix_sampler.CacheConfig(
                cache_size=room,
                num_layers=config.num_layers,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
            ),
        )
        self._counts = {"prefilled_tokens": 0, "prefill_slots": 0, "decode_slots": 0, "sampled": 0}
        self._lock = threading.Lock()

    def _model_call(self, messages: list[dict[str, str]], environment: Environment, **_: Any) -> Any:
        step = environment.attempt.steps[environment.turn]
        text = " ".join(message["content"] for message in messages)
        output = self._sampler(
            [text],
            max_generation_steps=step.sampled,
            max_prompt_length=PROMPT,
            temperature=1.0,
            top_p=1.0,
            top_k=None,
            seed=0,
            eos_tokens=[-1],
            return_logprobs=True,
        )
        sampled = np.asarray(output.tokens[0])[: step.sampled]
        with self._lock:
            self._counts["prefilled_tokens"] += len(text.split())
            self._counts["prefill_slots"] += output.padded_prompt_tokens.size
            self._counts["decode_slots"] += step.sampled
            self._counts["sampled"] += len(sampled)
        environment.task["policy_version"] = 0
        # the words that were sampled never stop a turn, and may be padding: the conversation goes on with others
        return base_rollout.RolloutOutput(
            text=[_words(step.sampled)], logits=None, tokens=[sampled], left_padded_prompt_tokens=None, logprobs=None
        )

    def run(self) -> dict[str, Any]:
        """One rollout; the tokens that were computed."""
        self._counts = dict.fromkeys(self._counts, 0)
        asyncio.run(self._all())
        assert self._counts["sampled"] == sum(trajectory.sampled for trajectory in self._work)
        return {**self._counts, "tools_s": sum(step.seconds for trajectory in self._work for step in trajectory.steps)}

    async def _all(self) -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(max_workers=CONCURRENCY + 1))
        orchestrator = rollout_orchestrator.RolloutOrchestrator(
            rollout_sync_lock=agentic_utils.RolloutSyncLock(),
            engine_kwargs={"model_call": self._model_call, "timeout": 1e6},
            max_concurrency=CONCURRENCY,
        )

        def pairs() -> Iterator[tuple[Any, Any]]:
            for i, trajectory in enumerate(self._work):
                yield Agent(""), Environment(trajectory, group_id=trajectory.group, pair_index=i)

        samples = len(self._work) // len({trajectory.group for trajectory in self._work})
        producing = asyncio.create_task(
            orchestrator.run_producers_from_stream(
                pairs(),
                group_size=samples,
                group_key_fn=lambda _, env, __: env.extra_kwargs["group_id"],
                collect_mode="Token",
            )
        )
        await asyncio.sleep(0)
        received = 0
        async for batch in orchestrator.yield_batches(samples):
            received += len(batch)
            if received == len(self._work):
                break
        await producing


class Update:
    """One optimiser step: its GRPO loss over micro-batches padded to the longest prompt and completion, and optax's AdamW."""

    def __init__(self, directory: str, work: Sequence[Trajectory], micro: int, checkpointing: bool) -> None:
        self._work = work
        model = load(directory)
        if checkpointing:
            for layer in model.layers:
                layer.config = _with_remat(layer.config)
        attempts = episodes(work, model.config.vocab_size)
        prompt, completion = (
            max(attempt.prompt for attempt in attempts),
            max(len(attempt.ids) - attempt.prompt for attempt in attempts),
        )
        self._slots = len(attempts) * (prompt + completion)
        rows = [self._row(attempt, prompt, completion, model.config.vocab_size) for attempt in attempts]
        self._batches = [
            common.TrainExample(
                **{key: jnp.asarray(np.stack([row[key] for row in rows[at : at + micro]])) for key in rows[0]},
                ref_per_token_logps=None,
            )
            for at in range(0, len(rows), micro)
        ]
        steps = len(self._batches)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-5, weight_decay=0.0))
        wrapped = optax.MultiSteps(optimizer, steps).gradient_transformation() if steps > 1 else optimizer
        self._model, self._optimizer = model, nnx.Optimizer(model, wrapped, wrt=nnx.Param)
        config = SimpleNamespace(
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.2,
            loss_algo="grpo",
            temperature=1.0,
            loss_agg_mode="sequence-mean-token-mean",
            force_compute_kl=False,
            kl_loss_mode="kl",
        )

        def loss(model: Any, example: Any) -> Any:
            return algo_core.grpo_loss_fn(model, example, config, pad_id=PAD, eos_id=1)

        def train_step(model: Any, optimizer: Any, example: Any) -> Any:  # as PeftTrainer's
            (value, _), gradients = nnx.value_and_grad(loss, has_aux=True)(model, example)
            norm = optax.global_norm(gradients)
            optimizer.update(model, gradients)
            return value, norm

        self._step = nnx.jit(train_step, donate_argnames=("optimizer",))
        # as PeftTrainer._shard_optimizer: else everything is compiled a second time
        with model_mesh():
            state = nnx.state(self._optimizer, nnx.optimizer.OptState)
            nnx.update(self._optimizer, jax.lax.with_sharding_constraint(state, nnx.get_partition_spec(state)))

    @staticmethod
    def _row(attempt: Any, prompt: int, completion: int, vocabulary: int) -> dict[str, Any]:
        ids = np.asarray(attempt.ids, np.int32)
        after, mask = ids[attempt.prompt :], np.asarray(attempt.sampled[attempt.prompt :], np.int32)
        right = (0, completion - len(after))
        return {
            "prompt_ids": np.pad(ids[: attempt.prompt], (prompt - attempt.prompt, 0)),
            "prompt_mask": np.pad(np.ones(attempt.prompt, np.int32), (prompt - attempt.prompt, 0)),
            "completion_ids": np.pad(after, right),
            "completion_mask": np.pad(mask, right),
            "advantages": np.float32(attempt.advantage),
            "old_per_token_logps": np.full(completion, -np.log(vocabulary), np.float32),
        }

    def run(self) -> dict[str, Any]:
        """One update; the tokens that were computed."""
        for batch in self._batches:
            value, _ = self._step(self._model, self._optimizer, batch)
        jax.block_until_ready(value)
        jax.block_until_ready(nnx.state(self._model))
        return {"slots": self._slots, "tokens": sum(map(len, self._work))}


def _with_remat(config: Any) -> Any:
    return dataclasses.replace(config, remat_config=llama.RematConfig.DECODER)


if __name__ == "__main__":
    serve_peer(
        {"rollout": Rollout}, Update, MICRO | dict.fromkeys(("0.9M", "8M"), 2)
    )  # 8 take 18 GB: it keeps all scores
