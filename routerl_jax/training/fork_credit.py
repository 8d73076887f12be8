"""Credit in forked attempts: which episodes share which tokens, and the advantage of every token."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from routerl_jax.core.config import checked
from routerl_jax.core.types import Episode
from routerl_jax.learning.advantages import Baseline, Compare, Weights, choice_advantages, probabilities, try_weights

Choices = tuple[str, ...]  # the knowledge bases chosen so far
OfTokens = list[Float[np.ndarray, " T"]]  # per sequence, one number per token


_LEAST_REACH = 1e-6  # above 0, because tokens of weight 0 are left out of training


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class ForkCreditConfig:
    """Settings of credit="counterfactual" (learning.advantages), for attempts with rollout.forks."""

    # a branch's value is compared with the policy's expectation, with the branches' mean, or with the worst
    # branch's (learning.advantages says what each leads to)
    baseline: Baseline = "policy"
    weights: Weights = "policy"  # weight of a branch: the policy's probability of it, or the same for all (even)
    # the value of all other tokens is compared with all of the question, or with segments after the same choices
    compare: Literal["question", "choices"] = "choices"
    # if the advantage divides by a standard deviation of rewards: the one that differences between branches are divided by. It
    # is that of all questions of the step, or of each question, where every branch counts once
    scale: Literal["step", "question"] = "step"


@dataclasses.dataclass(kw_only=True)
class Segment:
    """A segment of a forked attempt: its tokens between two decisions, or after the last one.

    Attributes:
      choices: the choices before it.
      owner: index of the episode in whose sequences these tokens belong to the policy.
      children: the segments after the decision at its end, with the log-probability of each; none if the attempt ends.
      value: the expected reward: the mean over the later segments, weighted by the policy's probabilities.
      reach: the policy's probability of reaching it: the product of the probabilities of the choices before it.
      weight: weight of its advantage: the product of those of the choices before it (learning.advantages.try_weights).
    """

    choices: Choices
    owner: int
    children: list[tuple[Segment, float]] = dataclasses.field(default_factory=list)
    value: float = 0.0
    reach: float = 1.0
    weight: float = 1.0

    def __iter__(self) -> Iterator[Segment]:
        """This segment and all that follow it."""
        yield self
        for segment, _ in self.children:
            yield from segment

    @property
    def logprobs(self) -> Float[np.ndarray, " n"]:
        """Log-probabilities of the choices at its end."""
        return np.asarray([logprob for _, logprob in self.children])

    @property
    def values(self) -> Float[np.ndarray, " n"]:
        """Values of the choices at its end."""
        return np.asarray([after.value for after, _ in self.children])


def trees(episodes: Sequence[Episode], rewards: Float[np.ndarray, " N"]) -> list[Segment]:
    """The attempts of a step as trees, each given by its first segment. Values are computed from the rewards."""
    members: dict[tuple[str, int], list[int]] = {}
    for i, episode in enumerate(episodes):
        members.setdefault((episode.example.id, episode.sample), []).append(i)
    return [_tree(episodes, rewards, indices, ()) for indices in members.values()]


def _tree(episodes: Sequence[Episode], rewards: np.ndarray, members: Sequence[int], choices: Choices) -> Segment:
    depth = len(choices)
    segment = Segment(choices=choices, owner=members[0])
    branches: dict[str, list[int]] = {}
    for i in members:
        if len(episodes[i].branches) > depth:
            branches.setdefault(episodes[i].branches[depth].tool, []).append(i)
    if not branches:
        (only,) = members
        segment.value = float(rewards[only])
        return segment
    for tool, indices in branches.items():
        logprob = episodes[indices[0]].branches[depth].logprob
        segment.children.append((_tree(episodes, rewards, indices, (*choices, tool)), logprob))
    segment.value = float(probabilities(segment.logprobs) @ segment.values)
    return segment


def _weigh(segment: Segment, weights: Weights) -> None:
    """Sets `reach` and `weight` of all segments after this one."""
    if segment.children:
        shares = zip(probabilities(segment.logprobs), try_weights(segment.logprobs, weights))
        for (after, _), (probability, share) in zip(segment.children, shares):
            after.reach = max(segment.reach * float(probability), _LEAST_REACH)
            after.weight = segment.weight * float(share)
            _weigh(after, weights)


def by_forks(
    settings: ForkCreditConfig,
    episodes: Sequence[Episode],
    rewards: Float[np.ndarray, " N"],
    groups: np.ndarray,
    advantage: Compare,
    scale: Float[np.ndarray, " N"],
) -> tuple[OfTokens, OfTokens]:
    """For each sequence of the episodes, in order, the advantage of each token and the policy's probability of reaching it.

    The tokens of a choice get its counterfactual advantage (learning/advantages.py), divided by their episode's `scale`.
    The other tokens of a segment get the advantage of the segment's value. It is compared with the other segments of the
    question (`compare="question"`), or with those after the same choices (`"choices"`), which shows what a segment made of the
    choice taken for it.

    In the loss, each token is weighted by the policy's probability of reaching it. The sum of grad log pi over an attempt is
    then the gradient of the attempt's expected reward. KL and entropy in the loss are those of attempts without forks. With
    `weights="even"`, the advantages carry the change of weight, so that KL and entropy stay those of the policy.

    Args:
      groups: index of each episode's question, [N].
      advantage: (values, groups) -> advantages.
      scale: divisor of each episode, [N].
    """
    roots = trees(episodes, rewards)
    for root in roots:
        _weigh(root, settings.weights)
    segments = [segment for root in roots for segment in root]
    names: dict[tuple[int, Choices], int] = {}
    compared = [
        names.setdefault((int(groups[s.owner]), s.choices if settings.compare == "choices" else ()), len(names))
        for s in segments
    ]
    of_segments = advantage(np.asarray([s.value for s in segments]), np.asarray(compared, int))
    result = [[np.zeros(len(sequence)) for sequence in episode.sequences] for episode in episodes]
    reach = [[np.ones(len(sequence)) for sequence in episode.sequences] for episode in episodes]
    for segment, value in zip(segments, of_segments):
        episode, depth = episodes[segment.owner], len(segment.choices)
        _fill(episode, depth, segment.weight / segment.reach * float(value), result[segment.owner])
        _fill(episode, depth, segment.reach, reach[segment.owner])
    for segment in segments:
        if not segment.children:
            continue
        chosen = choice_advantages(segment.values, segment.logprobs, settings.baseline) / scale[segment.owner]
        for (after, _), value in zip(segment.children, chosen):
            branch = episodes[after.owner].branches[len(segment.choices)]
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
    """Metrics of the forks, as means over decisions:

    - `forks/decisions`: decisions per attempt;
    - `forks/spread`: value of the best branch less that of the worst;
    - `forks/best_rate`: the policy's probability of taking a best branch;
    - `forks/regret`: value of the best branch less the policy's expectation;
    - `forks/even_rate`: share of decisions whose branches all have the same value.
    """
    roots = trees(episodes, rewards)
    decisions = [segment for root in roots for segment in root if segment.children]
    if not decisions:
        return {"forks/decisions": 0.0}
    rows = []
    for segment in decisions:
        values, share = segment.values, probabilities(segment.logprobs)
        best = values >= values.max() - 1e-9
        rows.append((np.ptp(values), share[best].sum(), values.max() - segment.value, float(best.all())))
    names = ("spread", "best_rate", "regret", "even_rate")
    means = np.mean(rows, axis=0)
    return {"forks/decisions": len(decisions) / len(roots)} | {f"forks/{n}": float(v) for n, v in zip(names, means)}


def sample_branches(episodes: Sequence[Episode], seed: Sequence[int]) -> list[int]:
    """Indices of one episode per attempt. At every decision the branch is drawn with the policy's probabilities, so that the
    statistics of these episodes are those of attempts without forks."""
    rng = np.random.default_rng(seed)
    chosen = []
    for root in trees(episodes, np.zeros(len(episodes))):
        segment = root
        while segment.children:
            share = probabilities(segment.logprobs)
            segment = segment.children[int(rng.choice(len(share), p=share))][0]
        chosen.append(segment.owner)
    return chosen
