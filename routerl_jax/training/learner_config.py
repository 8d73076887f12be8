"""The section `learner` of a run's configuration."""

from __future__ import annotations

import dataclasses
from typing import Literal

from routerl_jax.core.config import Count, NonNegative, Size, checked
from routerl_jax.learning.advantages import ADVANTAGES, EPISODE_MASKS, advantage_named
from routerl_jax.learning.losses import Aggregation
from routerl_jax.learning.objective import LossConfig
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.models.decoder import Remat
from routerl_jax.training.credit.forks import ForkCreditConfig
from routerl_jax.training.credit.kinds import credit_named
from routerl_jax.training.credit.turns import TurnCreditConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class LearnerConfig:
    """From episodes to updates."""

    advantage: str = "grpo"  # learning.advantages.ADVANTAGES
    # how the reward is shared among tokens (training.credit.kinds.CREDITS). episode: every token gets the whole reward. turn:
    # every token gets the outcome and the rewards of its own and later turns. counterfactual: the choice of a knowledge base is
    # compared with the other choices, which needs rollout.forks
    credit: str = "episode"
    turn: TurnCreditConfig = TurnCreditConfig()
    forks: ForkCreditConfig = ForkCreditConfig()
    # smallest standard deviation of rewards by which an advantage is divided (grpo, batch_std)
    std_floor: NonNegative = 0.0
    drop_no_signal: bool = True  # leave out groups whose rewards are all equal (reinforce_pp keeps them)
    leave_out: tuple[str, ...] = ()  # episodes that are not trained on (learning.advantages): void_turns, overlong
    minibatches: Size = 1  # updates per step
    # how losses of tokens become one: mean over tokens, over sequences, or a sum with a constant divisor (learning.losses)
    aggregation: Aggregation = "token"
    # tokens per sequence by which aggregation="constant" divides (Dr. GRPO's constant); 0: engine.max_length
    aggregation_tokens: Count = 0
    loss: LossConfig = LossConfig()
    reward_kl_coef: NonNegative = 0.0  # weight of the k1 KL to the reference that is subtracted from the reward
    # the reward that it is subtracted from: the episode's, or each token's (and so from the return of the tokens before it)
    reward_kl: Literal["episode", "token"] = "episode"
    importance_cap: NonNegative = 0.0  # truncated importance sampling against the sampler's numerics, e.g. 2; 0: off
    # leave out a sequence if the learner's probability of it (before the updates) over the sampler's is outside [1 / C, C] for
    # this C, e.g. 10; 0: off
    mask_sequence_ratio: NonNegative = 0.0
    # leave out a sequence if the geometric mean of its tokens' ratios is outside [1 / C, C] for this C, e.g. 1.01; 0: off
    mask_mean_ratio: NonNegative = 0.0
    optimizer: OptimizerConfig = OptimizerConfig()
    micro_tokens: Size = 2048  # tokens of a micro-batch (gradient accumulation)
    length_buckets: tuple[Size, ...] = ()  # row lengths of micro-batches; empty: engine.max_length
    # compute shared prompts and histories of sequences once, pictures included (learning.batch)
    share_prefixes: bool = False
    # send every token through the experts that the sampler chose for it (R3, arXiv 2510.11370); for models with experts
    replay_routing: bool = False
    # what the backward pass recomputes to save memory: nothing, everything, or all but matrix products
    remat: Remat = "none"

    def __post_init__(self) -> None:
        advantage, credit = advantage_named(self.advantage), credit_named(self.credit)
        for name in self.leave_out:
            EPISODE_MASKS.get(name)
        if self.std_floor and not advantage.scaled:
            raise ValueError(
                f"config.learner.std_floor={self.std_floor}: advantage={self.advantage!r} divides by no standard deviation; "
                f"{', '.join(name for name in ADVANTAGES if advantage_named(name).scaled)} do"
            )
        if credit.forked and (advantage.whitened or self.reward_kl_coef):
            setting = f"advantage={self.advantage!r}" if advantage.whitened else "reward_kl_coef"
            raise ValueError(
                f"config.learner.{setting} does not go with credit={self.credit!r}: the values of branches are rewards, "
                "compared question by question; take dr_grpo, rloo, grpo or batch_std, and loss.kl_coef"
            )
        if credit.forked and self.leave_out:
            raise ValueError(
                f"config.learner.leave_out={self.leave_out} does not go with credit={self.credit!r}: without one of its "
                "branches a choice has only the advantages of the others"
            )
        for name in ("mask_sequence_ratio", "mask_mean_ratio"):
            if (bound := getattr(self, name)) and bound <= 1:
                raise ValueError(f"config.learner.{name}={bound} is the largest ratio, above 1, such as 1.01; 0: off")
        if credit.forked and (self.mask_sequence_ratio or self.mask_mean_ratio):
            name = "mask_sequence_ratio" if self.mask_sequence_ratio else "mask_mean_ratio"
            raise ValueError(
                f"config.learner.{name} does not go with credit={self.credit!r}: without one of its branches a choice has only "
                "the advantages of the others; set it to 0"
            )
        if self.aggregation_tokens and self.aggregation != "constant":
            raise ValueError(
                f"config.learner.aggregation_tokens={self.aggregation_tokens} is of aggregation='constant', and it is "
                f"{self.aggregation!r}: set it to 0"
            )
        self._check_ratio()

    def _check_ratio(self) -> None:
        """Checks settings that exclude a ratio of whole sequences, which is one term of the loss with one advantage."""
        if self.loss.ratio == "geometric" and self.share_prefixes:
            raise ValueError(
                "config.learner.loss.ratio='geometric' does not go with config.learner.share_prefixes=True: the tokens of a "
                "sequence then lie apart; switch share_prefixes off"
            )
        if self.loss.ratio != "sequence":
            return
        checks = [
            (
                self.aggregation == "sequence",
                f"aggregation={self.aggregation!r}: a sequence is one term, however long it is; take aggregation='sequence'",
            ),
            (
                credit_named(self.credit).whole,
                f"credit={self.credit!r}: its tokens have advantages of their own, a sequence has one; take credit='episode'",
            ),
            (
                not self.reward_kl_coef or self.reward_kl == "episode",
                "reward_kl='token': its tokens have advantages of their own, a sequence has one; take reward_kl='episode'",
            ),
            (
                not self.importance_cap,
                f"importance_cap={self.importance_cap}: it weighs tokens one by one; set it to 0",
            ),
            (
                not self.share_prefixes,
                "share_prefixes=True: the tokens of a sequence then lie apart; switch share_prefixes off",
            ),
        ]
        for fine, message in checks:
            if not fine:
                raise ValueError(f"config.learner.loss.ratio='sequence' does not go with config.learner.{message}")
