"""Beside TRL's trainers on the same tensors, where docs/algorithms.md says that definitions agree.

A real GRPOTrainer (RLOOTrainer) of a tiny model computes: what its model would score and generate is given instead.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from routerl_jax.core.types import Episode, Example, Sequence
from routerl_jax.learning.advantages import ADVANTAGES
from routerl_jax.learning.logprobs import Scores
from routerl_jax.learning.losses import LossConfig, objective, token_weights
from routerl_jax.training.config import LearnerConfig
from routerl_jax.training.credit import assign

torch = pytest.importorskip("torch", reason="torch is not installed (the extra dev)")
pytest.importorskip("trl", reason="TRL is not installed (the extra dev)", exc_type=ImportError)
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

GROUPS, SAMPLES, LENGTH = 3, 4, 11


def trainer(kind: str, directory: Any, **settings: Any) -> Any:
    """A trainer of TRL's with a one-layer model of eight words."""
    import trl

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(i): i for i in range(8)}, unk_token="0"))
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
    )
    model.save_pretrained(directory / "model")  # TRL reads its reference from there
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(directory),
        per_device_train_batch_size=GROUPS * SAMPLES,
        num_generations=SAMPLES,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **settings,
    )
    made = getattr(trl, f"{kind}Trainer")(
        model=str(directory / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1 2"] * GROUPS}),
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="7"),
    )
    made.current_gradient_accumulation_steps = 1  # set by training_step
    return made


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """Twelve attempts of up to eleven tokens, fed ones in between; every one has trained tokens."""
    rng = np.random.default_rng(0)
    shape = (GROUPS * SAMPLES, LENGTH)
    mask = rng.random(shape) < 0.6
    mask[:, 0] = True
    mask[np.arange(LENGTH) >= rng.integers(3, LENGTH + 1, (len(mask), 1))] = False
    logprobs, old = (rng.uniform(-3, -0.05, shape).astype(np.float32) for _ in range(2))
    return {
        "logprobs": logprobs,
        "old": old,
        "reference": logprobs + rng.uniform(-2, 2, shape).astype(np.float32),  # beyond 2.6 we cut k3 off, TRL doesn't
        "mask": mask,
        "entropies": rng.uniform(0, 2, shape).astype(np.float32),
        "advantages": rng.normal(size=len(mask)).astype(np.float32),
        "importance": rng.uniform(0.3, 2, shape).astype(np.float32),
    }


def trl_loss(made: Any, tensors: dict[str, np.ndarray]) -> tuple[float, list[np.ndarray]]:
    """TRL's loss, and its gradient in log-probabilities and entropies."""
    given = {name: torch.tensor(values) for name, values in tensors.items()}
    scored = given["logprobs"].requires_grad_(), given["entropies"].requires_grad_()
    made._get_per_token_logps_and_entropies = lambda *_, **__: (*scored, None)
    whole = torch.ones(given["mask"].shape, dtype=torch.long)
    loss = made._compute_loss(
        made.model,
        {
            "prompt_ids": whole[:, :1],
            "prompt_mask": whole[:, :1],
            "completion_ids": whole,
            "completion_mask": whole,
            "tool_mask": given["mask"].long(),
            "advantages": given["advantages"],
            "old_per_token_logps": given["old"],
            "ref_per_token_logps": given["reference"],
            "importance_sampling_ratio": given["importance"],
            "num_items_in_batch": given["mask"].sum(),
        },
    )
    gradients = torch.autograd.grad(loss, scored, allow_unused=True)
    return loss.item(), [np.zeros(whole.shape) if g is None else g.numpy() for g in gradients]


def our_loss(loss: LossConfig, aggregation: Any, tensors: dict[str, np.ndarray]) -> tuple[float, list[np.ndarray]]:
    """The same of ours."""
    fields = {
        "weights": jnp.asarray(token_weights(list(tensors["mask"]), aggregation, LENGTH)),
        "advantages": jnp.asarray(tensors["advantages"][:, None] * tensors["importance"]),
        "old_logprobs": jnp.asarray(tensors["old"]),
        "ref_logprobs": jnp.asarray(tensors["reference"]),
        "segment_ids": jnp.ones(tensors["mask"].shape, jnp.int32),
    }
    value, gradients = jax.value_and_grad(
        lambda *scored: objective(loss, Scores(*scored, scored[0]), fields)[0], argnums=(0, 1)
    )(jnp.asarray(tensors["logprobs"]), jnp.asarray(tensors["entropies"]))
    return float(value), [np.asarray(g) for g in gradients]


AGGREGATIONS = {"grpo": "sequence", "bnpo": "token", "dapo": "token", "dr_grpo": "constant"}


@pytest.mark.parametrize(
    ("loss_type", "extra"),
    [*itertools.product(AGGREGATIONS, ["", "importance", "decisions"]), ("bnpo", "entropy"), ("dapo", "entropy")],
)
def test_losses(loss_type: str, extra: str, tensors: dict[str, np.ndarray], tmp_path: Any) -> None:
    """Clip-higher and k3; with truncated importance; with the policy gradient at high entropies alone; with a bonus (which TRL
    averages over tokens whatever the loss, so for token means). 1e-6: float32 sums of 60 tokens."""
    settings: dict[str, Any] = {"entropy_coef": 0.1} if extra == "entropy" else {}
    if extra == "decisions":
        settings["top_entropy_quantile"] = 0.5
    made = trainer(
        "GRPO",
        tmp_path,
        loss_type=loss_type,
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.05,
        use_bias_correction_kl=False,  # DeepSeek-V3.2's k3 times the ratio, TRL's default
        max_completion_length=LENGTH,
        **settings,
    )
    if extra == "importance":
        made.use_vllm = True  # where TRL corrects; nothing else of it is asked here
    else:
        tensors = tensors | {"importance": np.ones_like(tensors["importance"])}
    median = float(np.quantile(tensors["entropies"][tensors["mask"]], 0.5))
    loss = LossConfig(
        clip_low=0.2,
        clip_high=0.28,
        kl="k3",
        kl_coef=0.05,
        entropy_coef=0.1 if extra == "entropy" else 0.0,
        min_entropy=median if extra == "decisions" else 0.0,
    )
    value, gradients = our_loss(loss, AGGREGATIONS[loss_type], tensors)
    expected, expected_gradients = trl_loss(made, tensors)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(gradients, expected_gradients):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(expected_gradients[0]).max() > 0.001


def test_the_ratio_of_a_whole_sequence(tensors: dict[str, np.ndarray], tmp_path: Any) -> None:
    """RLOOTrainer's loss, its advantages given: `loss.ratio="sequence"`. Some of the twelve ratios are clipped, some not."""
    made = trainer("RLOO", tmp_path, epsilon=0.2, epsilon_high=0.28, beta=0.0, max_completion_length=LENGTH)
    mask = tensors["mask"]
    moved = np.random.default_rng(7).normal(size=mask.shape).astype(np.float32) * 0.15
    old = tensors["logprobs"] + moved
    logprobs = torch.tensor(tensors["logprobs"]).requires_grad_()
    made._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.tensor(tensors["entropies"]), None)
    whole = torch.ones(mask.shape, dtype=torch.long)
    loss = made._compute_loss(
        made.model,
        {
            "prompt_ids": whole[:, :1],
            "prompt_mask": whole[:, :1],
            "completion_ids": whole,
            "completion_mask": torch.tensor(mask).long(),
            "advantages": torch.tensor(tensors["advantages"]),
            "old_logps": torch.tensor((old * mask).sum(axis=1)),
        },
    )
    (expected,) = torch.autograd.grad(loss, [logprobs])
    ones = np.ones_like(tensors["importance"])
    value, gradients = our_loss(
        LossConfig(ratio="sequence", clip_high=0.28), "sequence", tensors | {"old": old, "importance": ones}
    )
    np.testing.assert_allclose(value, loss.item(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients[0], expected.numpy(), rtol=1e-5, atol=1e-6)
    assert 0 < (np.abs(gradients[0]).max(axis=1) > 0).sum() < len(mask)


@pytest.mark.parametrize("name", ["GSPO", "CISPO", "two-sided clip"])
def test_other_losses(name: str, tensors: dict[str, np.ndarray], tmp_path: Any) -> None:
    """GSPO (`importance_sampling_level`), CISPO (whose `epsilon_high` is the ratio itself), dual clip (`delta`)."""
    theirs, ours, aggregation = {
        "GSPO": (
            {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.2},
            LossConfig(ratio="geometric", clip_low=0.1, clip_high=0.2),
            "sequence",
        ),
        "CISPO": (
            {"loss_type": "cispo", "epsilon_high": 2.0},
            LossConfig(kind="cispo", clip_low=1.0, clip_high=1.0),
            "token",
        ),
        "two-sided clip": (
            {"loss_type": "dr_grpo", "epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.5},
            LossConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.5),
            "constant",
        ),
    }[name]
    made = trainer("GRPO", tmp_path, beta=0.0, max_completion_length=LENGTH, **theirs)
    tensors = tensors | {"importance": np.ones_like(tensors["importance"])}
    value, gradients = our_loss(ours, aggregation, tensors)
    expected, (wanted, _) = trl_loss(made, tensors)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradients[0], wanted, rtol=1e-5, atol=1e-6)
    assert np.abs(wanted).max() > 0.001


def attempts(rewards: np.ndarray, mask: np.ndarray, logprobs: np.ndarray) -> list[Episode]:
    """Episodes of those rewards and log-probabilities."""
    return [
        Episode(
            example=Example(id=str(i), question="?", answers=("a",)),
            sample=0,
            answer=None,
            turns=[],
            sequences=[
                Sequence(
                    tokens=np.zeros(LENGTH, np.int32),
                    loss_mask=mask[i],
                    logprobs=np.where(mask[i], logprobs[i], 0),
                    positions=np.zeros((3, LENGTH), np.int32),
                    versions=np.zeros(LENGTH, np.int32),
                )
            ],
            rewards={"total": reward},
        )
        for i, reward in enumerate(rewards)
    ]


def trl_advantages(made: Any, rewards: np.ndarray, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """What TRL makes of rewards; old and reference log-probabilities are given where it asks for them."""
    count = len(rewards)
    ids = [[1] * int(length) for length in tensors["lengths"]]
    made.reward_funcs = [lambda completions, **_: rewards.tolist()]
    generated = ([[1, 2]] * count, ids, None, ["1"] * count, None, {}, None, None)
    made._generate = lambda _: generated if "GRPO" in type(made).__name__ else ([[1, 2]] * count, ids, ["1"] * count)
    scored = iter([tensors["old"], tensors["reference"]])
    made._get_per_token_logps_and_entropies = lambda *_, **__: (torch.tensor(next(scored)), None, None)
    made.model.train()
    return made._generate_and_score_completions([{"prompt": "1 2"}] * count)["advantages"].numpy()


REWARDS = np.random.default_rng(5).normal(size=GROUPS * SAMPLES)
BY_GROUP = np.repeat(np.arange(GROUPS), SAMPLES)


@pytest.mark.parametrize(("scale", "name"), [("group", "grpo"), ("none", "dr_grpo")])
def test_grpo_advantages(scale: str, name: str, tensors: dict[str, np.ndarray], tmp_path: Any) -> None:
    """TRL adds 1e-4 to the standard deviation, where we add 1e-6: 3e-4 of a deviation of a third."""
    made = trainer("GRPO", tmp_path, scale_rewards=scale, max_completion_length=LENGTH)
    found = trl_advantages(made, REWARDS, tensors | {"lengths": np.full(len(REWARDS), LENGTH)})
    np.testing.assert_allclose(ADVANTAGES.get(name)(REWARDS, BY_GROUP), found, rtol=3e-4, atol=1e-6)


def test_rloo_with_divergence_in_the_reward(tensors: dict[str, np.ndarray], tmp_path: Any) -> None:
    """TRL's RLOO takes k1 from the reward of the whole completion, as `reward_kl="episode"` does."""
    made = trainer("RLOO", tmp_path, beta=0.1, max_completion_length=LENGTH)
    lengths = np.random.default_rng(6).integers(2, LENGTH + 1, len(REWARDS))
    lengths[0] = LENGTH
    mask = np.arange(LENGTH) < lengths[:, None]
    found = trl_advantages(made, REWARDS, tensors | {"lengths": lengths})
    settings = LearnerConfig(advantage="rloo", reward_kl_coef=0.1, reward_kl="episode")
    credit = assign(settings, attempts(REWARDS, mask, tensors["old"]), BY_GROUP, list(tensors["reference"]))
    np.testing.assert_allclose([values[0] for values in credit.advantages], found, rtol=1e-5, atol=1e-6)
