"""Credit that is finer than an attempt: by turns, whose rewards are compared, and of forked attempts, whose choices are."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Float

from routerl_jax.core.types import Episode, Turn
from routerl_jax.learning.advantages import (
    Estimator,
    Weights,
    choice_advantages,
    judged_advantages,
    probabilities,
    try_weights,
    turn_advantages,
)
from routerl_jax.training.credit import CreditKind, TokenCredit
from routerl_jax.training.sections import LearnerConfig


def by_turns(
    episodes: Sequence[Episode],
    rewards: Float[np.ndarray, " N"],
    groups: np.ndarray,
    advantage: Estimator,
    learner: LearnerConfig,
) -> TokenCredit:
    """Credit by turns: a token gets the advantages of the outcome and of the rewards of its own and later turns
    (learning.advantages).

    Reward terms that judge the same turns are added, and their sums compared among these turns.

    Args:
      rewards: each episode's whole reward, [N]. The outcome is this less the rewards of its turns (`Turn.rewards`).

    Raises:
      ValueError: an episode's turns don't say where all of its sampled tokens are.
    """
    settings = learner.turn
    turns = [turn for episode in episodes for turn in episode.turns]
    of_turns = [np.sum([sum(turn.rewards.values()) for turn in episode.turns]) for episode in episodes]
    alike: dict[tuple[bool, ...], list[str]] = {}  # the terms by the turns that they judge
    for name in dict.fromkeys(name for turn in turns for name in turn.rewards):
        alike.setdefault(tuple(name in turn.rewards for turn in turns), []).append(name)
    first, *others = [
        [np.asarray([_sum_of(turn, names) for turn in episode.turns], np.float64) for episode in episodes]
        for names in alike.values() or [[]]
    ]
    compared = [_compared(episode, settings.compare) for episode in episodes]
    turn_values = turn_advantages(
        rewards - np.asarray(of_turns),
        first,
        groups,
        compared,
        advantage,
        discount=settings.discount,
        weight=settings.weight,
    )
    for part in others:
        own = judged_advantages(part, groups, compared, advantage, discount=settings.discount)
        turn_values = [value + settings.weight * of_part for value, of_part in zip(turn_values, own)]
    return TokenCredit(
        of_tokens=[values for episode, numbers in zip(episodes, turn_values) for values in spread(episode, numbers)]
    )


def _sum_of(turn: Turn, names: Sequence[str]) -> float:
    """The sum of these terms, which judge the same turns; NaN if they don't judge this one."""
    return sum(turn.rewards[name] for name in names) if turn.rewards.keys() & names else np.nan


def spread(episode: Episode, advantages: Sequence[float] | np.ndarray) -> list[Float[np.ndarray, " T"]]:
    """Spreads one number per turn over the tokens of every sequence of the episode; 0 outside of turns.

    Raises:
      ValueError: the turns don't say where all sampled tokens are.
    """
    result = [np.zeros(len(sequence)) for sequence in episode.sequences]
    covered = [np.zeros(len(sequence), bool) for sequence in episode.sequences]
    for turn, advantage in zip(episode.turns, advantages):
        if turn.tokens:
            at = slice(turn.start, turn.start + turn.tokens)
            result[turn.sequence][at] = advantage
            covered[turn.sequence][at] = True
    if any((sequence.loss_mask & ~is_covered).any() for sequence, is_covered in zip(episode.sequences, covered)):
        raise ValueError(
            f"attempt {episode.sample} at question {episode.example.id!r} sampled tokens that belong to no turn; let the agent "
            "write through Conversation.generate alone, which books where a turn's tokens are"
        )
    return result


def _compared(episode: Episode, compare: str) -> list[tuple[str, int]]:
    """The key by which each turn is compared: the agent's request, and the number of equal requests before it."""
    if compare == "asked":
        return [(turn.asked, 0) for turn in episode.turns]
    before: collections.Counter[str] = collections.Counter()
    names = []
    for turn in episode.turns:
        names.append((turn.asked, before[turn.asked]))
        before[turn.asked] += 1
    return names


Choices = tuple[str, ...]  # the knowledge bases chosen so far
_LEAST_REACH = 1e-6  # above 0, because tokens of weight 0 are left out of training


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
    episodes: Sequence[Episode],
    rewards: Float[np.ndarray, " N"],
    groups: np.ndarray,
    advantage: Estimator,
    learner: LearnerConfig,
) -> TokenCredit:
    """Credit of forked attempts: the choice of a knowledge base is compared with what the other choices led to.

    The tokens of a choice get its counterfactual advantage (learning/advantages.py), divided as `forks.scale` says.
    The other tokens of a segment get the advantage of the segment's value. It is compared with the other segments of the
    question (`compare="question"`), or with those after the same choices (`"choices"`), which shows what a segment made of the
    choice taken for it.

    In the loss, each token is weighted by the policy's probability of reaching it. The sum of grad log pi over an attempt is
    then the gradient of the attempt's expected reward. KL and entropy in the loss are those of attempts without forks. With
    `weights="even"`, the advantages carry the change of weight, so that KL and entropy stay those of the policy.
    """
    settings = learner.forks
    scale = advantage.scale(rewards, groups, groups if settings.scale == "question" else np.zeros_like(groups))
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
    return TokenCredit(
        of_tokens=list(itertools.chain(*result)),
        reach=list(itertools.chain(*reach)),
        metrics=fork_metrics(episodes, rewards),
    )


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


TURN = CreditKind(function=by_turns)
COUNTERFACTUAL = CreditKind(function=by_forks, forked=True)
