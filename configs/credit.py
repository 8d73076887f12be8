"""The quickstart with five kinds of credit: which tokens are credited with a search of the wrong knowledge base?"""

import dataclasses

import ml_collections

from configs import quickstart
from routerl_jax.core.config import from_config_dict, to_config_dict
from routerl_jax.training import config as schema

TURNS = {
    "r1_router.turn_route": {"weight": 0.3, "encoder": "all-MiniLM-L6-v2"},
    "r1_router.turn_answer": {"weight": 0.3},
}
KINDS = ("episode", "episode_turns", "turn", "counterfactual", "counterfactual_even")


def get_config(kind: str = "counterfactual") -> ml_collections.ConfigDict:
    """The quickstart (README.md) with another kind of credit.

    python -m launch.train --config=configs/credit.py:turn --workdir=runs/turn
    python -m benchmarks.counterfactual_routing --workdir=runs/credit --seeds=0,1,2    # all kinds, and a table

    - `episode`: the quickstart itself.
    - `episode_turns`: rewards of turns, compared with the gold path, are added to the reward of the episode.
    - `turn`: the same rewards, but each is credited to its own turn.
    - `counterfactual`: the quickstart's rewards. Every attempt is forked at its first search into three branches; 4 such
      attempts generate about as many tokens as 8 attempts without forks.
    - `counterfactual_even`: the same, but branches have equal weights, however often the policy takes them.

    Raises:
      ValueError: there is no such kind.
    """
    if kind not in KINDS:
        raise ValueError(f"configs/credit.py:{kind} is none of {', '.join(KINDS)}")
    base = from_config_dict(schema.TrainConfig, quickstart.get_config())
    learner, rollout, reward = base.learner, base.rollout, dict(quickstart.REWARD)
    if kind in ("episode_turns", "turn"):
        reward |= TURNS
    if kind == "turn":
        learner = dataclasses.replace(learner, credit="turn", turn=schema.TurnCreditConfig(discount=0.9))
    if kind.startswith("counterfactual"):
        weights = "even" if kind.endswith("even") else "policy"
        learner = dataclasses.replace(
            learner, credit="counterfactual", forks=schema.ForkCreditConfig(weights=weights), share_prefixes=True
        )
        rollout = dataclasses.replace(rollout, samples=4, forks=1)
    stages = {"main": schema.StageConfig(reward=reward)}
    return to_config_dict(dataclasses.replace(base, learner=learner, rollout=rollout, stages=stages))
