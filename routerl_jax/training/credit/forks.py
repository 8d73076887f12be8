"""Credit in attempts that were forked: which episodes share which tokens, and what all of them are to be reinforced by."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from routerl_jax.core.types import Episode
from routerl_jax.learning.advantages import Compare
from routerl_jax.learning.counterfactual import Baseline, Weights, choice_advantages, probabilities, try_weights

Way = tuple[str, ...]  # the knowledge bases chosen so far
OfTokens = list[Float[np.ndarray, " T"]]  # per sequence, one number per token


_LEAST_REACH = 1e-6  # tokens of weight 0 would not be trained


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForkCreditConfig:
    """credit="counterfactual" (learning.counterfactual), of attempts with rollout.forks."""

    baseline: Baseline = "policy"  # that a way's value is compared with: the policy's expectation, or the ways' mean
    weights: Weights = "policy"  # a way counts as often as the policy takes it, or all ways alike (even)
    # all other tokens: what came of them is compared with all of the question, or with what followed on the same choices
    compare: Literal["question", "choices"] = "choices"
    # whose deviation of rewards differences between ways are divided by, with an advantage that divides by one: all questions'
    # of the step together, or each question's own, in which every way counts once
    scale: Literal["step", "question"] = "step"


@dataclasses.dataclass(kw_only=True)
class Stretch:
    """What an attempt did between two decisions, or up to its end.

    Attributes:
      way: what was chosen before.
      owner: index of the episode whose sequences hold it as the policy's own.
      ahead: the stretches after the decision at its end, with the log-probability of each; none if the attempt ends.
      value: the expected reward from here on: of what comes after, weighted by the policy's probabilities of going there.
      reach: the policy's probability of getting here: the product of those of the choices before it.
      weight: what its advantage counts: the product of what those choices do (learning.counterfactual.try_weights).
    """

    way: Way
    owner: int
    ahead: list[tuple[Stretch, float]] = dataclasses.field(default_factory=list)
    value: float = 0.0
    reach: float = 1.0
    weight: float = 1.0

    def __iter__(self) -> Iterator[Stretch]:
        """This one and all that follow."""
        yield self
        for stretch, _ in self.ahead:
            yield from stretch

    @property
    def logprobs(self) -> Float[np.ndarray, " n"]:
        """Of the choices at its end."""
        return np.asarray([logprob for _, logprob in self.ahead])

    @property
    def values(self) -> Float[np.ndarray, " n"]:
        """What comes of the choices at its end."""
        return np.asarray([after.value for after, _ in self.ahead])


def trees(episodes: Sequence[Episode], rewards: Float[np.ndarray, " N"]) -> list[Stretch]:
    """The attempts of a step, each as its first stretch; values are those of the rewards."""
    members: dict[tuple[str, int], list[int]] = {}
    for i, episode in enumerate(episodes):
        members.setdefault((episode.example.id, episode.sample), []).append(i)
    return [_tree(episodes, rewards, indices, ()) for indices in members.values()]


def _tree(episodes: Sequence[Episode], rewards: np.ndarray, members: Sequence[int], way: Way) -> Stretch:
    depth = len(way)
    stretch = Stretch(way=way, owner=members[0])
    ways: dict[str, list[int]] = {}
    for i in members:
        if len(episodes[i].branches) > depth:
            ways.setdefault(episodes[i].branches[depth].tool, []).append(i)
    if not ways:
        (only,) = members
        stretch.value = float(rewards[only])
        return stretch
    for tool, indices in ways.items():
        logprob = episodes[indices[0]].branches[depth].logprob
        stretch.ahead.append((_tree(episodes, rewards, indices, (*way, tool)), logprob))
    stretch.value = float(probabilities(stretch.logprobs) @ stretch.values)
    return stretch


def _weigh(stretch: Stretch, weights: Weights) -> None:
    """Sets `reach` and `weight` of all stretches after this one."""
    if stretch.ahead:
        shares = zip(probabilities(stretch.logprobs), try_weights(stretch.logprobs, weights))
        for (after, _), (probability, share) in zip(stretch.ahead, shares):
            after.reach = max(stretch.reach * float(probability), _LEAST_REACH)
            after.weight = stretch.weight * float(share)
            _weigh(after, weights)


def by_forks(
    settings: ForkCreditConfig,
    episodes: Sequence[Episode],
    rewards: Float[np.ndarray, " N"],
    groups: np.ndarray,
    advantage: Compare,
    scale: Float[np.ndarray, " N"],
) -> tuple[OfTokens, OfTokens]:
    """For each sequence of the episodes, in order, the advantage of each token, and how likely the policy gets there.

    A choice's tokens get its counterfactual advantage (learning/counterfactual.py), divided by its episode's `scale`. All
    others get that of their stretch's value among the stretches of the question (`compare="question"`), or among those that
    come after the same choices (`"choices"`): what a stretch made of the choice that was taken for it. Tokens then count in the
    loss as the policy gets to them: the sum over an attempt, grad log pi each, is the gradient of what the attempt is expected
    to earn, and what the loss has beside it, KL and entropy, is that of attempts that go one way. Where ways count alike
    (`weights="even"`), advantages make up for it, and KL and entropy stay the policy's own.

    Args:
      groups: per episode, which question it is of.
      advantage: (values, groups) -> advantages.
      scale: per episode.
    """
    roots = trees(episodes, rewards)
    for root in roots:
        _weigh(root, settings.weights)
    stretches = [stretch for root in roots for stretch in root]
    names: dict[tuple[int, Way], int] = {}
    compared = [
        names.setdefault((int(groups[s.owner]), s.way if settings.compare == "choices" else ()), len(names))
        for s in stretches
    ]
    of_stretches = advantage(np.asarray([s.value for s in stretches]), np.asarray(compared, int))
    result = [[np.zeros(len(sequence)) for sequence in episode.sequences] for episode in episodes]
    reach = [[np.ones(len(sequence)) for sequence in episode.sequences] for episode in episodes]
    for stretch, value in zip(stretches, of_stretches):
        episode, depth = episodes[stretch.owner], len(stretch.way)
        _fill(episode, depth, stretch.weight / stretch.reach * float(value), result[stretch.owner])
        _fill(episode, depth, stretch.reach, reach[stretch.owner])
    for stretch in stretches:
        if not stretch.ahead:
            continue
        chosen = choice_advantages(stretch.values, stretch.logprobs, settings.baseline) / scale[stretch.owner]
        for (after, _), value in zip(stretch.ahead, chosen):
            branch = episodes[after.owner].branches[len(stretch.way)]
            name = slice(branch.start, branch.start + branch.tokens)
            result[after.owner][branch.sequence][name] = after.weight / after.reach * value
            reach[after.owner][branch.sequence][name] = after.reach
    return list(itertools.chain(*result)), list(itertools.chain(*reach))


def _fill(episode: Episode, depth: int, value: float, result: Sequence[np.ndarray]) -> None:
    """Sets the tokens of an episode after its first `depth` decisions, up to the next one."""
    begins = (-1, 0)
    if depth:
        last = episode.branches[depth - 1]
        begins = (last.sequence, last.start + last.tokens)
    ends = (len(episode.sequences), 0)
    if depth < len(episode.branches):
        ends = (episode.branches[depth].sequence, episode.branches[depth].start)
    for number, values in enumerate(result):
        first = begins[1] if number == begins[0] else 0
        stop = ends[1] if number == ends[0] else len(values)
        if begins[0] <= number <= ends[0]:
            values[first:stop] = value


def fork_metrics(episodes: Sequence[Episode], rewards: Float[np.ndarray, " N"]) -> dict[str, float]:
    """What the forks showed: `forks/decisions` (per attempt), `forks/spread` (the best way's value less the worst's),
    `forks/best_rate` (probability with which the policy takes a best way), `forks/regret` (the best way's value less what the
    policy expects), and how many alternatives' values were equal, `forks/even_rate`; means over decisions."""
    roots = trees(episodes, rewards)
    decisions = [stretch for root in roots for stretch in root if stretch.ahead]
    if not decisions:
        return {"forks/decisions": 0.0}
    rows = []
    for stretch in decisions:
        values, share = stretch.values, probabilities(stretch.logprobs)
        best = values >= values.max() - 1e-9
        rows.append((np.ptp(values), share[best].sum(), values.max() - stretch.value, float(best.all())))
    names = ("spread", "best_rate", "regret", "even_rate")
    means = np.mean(rows, axis=0)
    return {"forks/decisions": len(decisions) / len(roots)} | {f"forks/{n}": float(v) for n, v in zip(names, means)}


def as_the_policy_goes(episodes: Sequence[Episode], seed: Sequence[int]) -> list[int]:
    """Indices of one episode per attempt: at every decision the way is drawn with the policy's probabilities, so that their
    statistics are those of attempts that were not forked."""
    rng = np.random.default_rng(seed)
    chosen = []
    for root in trees(episodes, np.zeros(len(episodes))):
        stretch = root
        while stretch.ahead:
            share = probabilities(stretch.logprobs)
            stretch = stretch.ahead[int(rng.choice(len(share), p=share))][0]
        chosen.append(stretch.owner)
    return chosen
