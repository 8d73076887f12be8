"""Metrics of a set of episodes: answer quality, behaviour, routing."""

from __future__ import annotations

import collections
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from routerl_jax.core.types import Episode
from routerl_jax.data.gold_paths import known_path
from routerl_jax.data.trajectories import NONE, golden_step, label_of
from routerl_jax.models.regions import iou
from routerl_jax.rewards.metrics import ANSWER_METRICS, accepted_answers
from routerl_jax.rewards.retrieval import retrieval
from routerl_jax.rewards.scoring import bootstrap_intervals

ANSWER = (
    "em",
    "f1",
    "cover_em",
    "substring_em",
    "f1_recall",
    "anls",
)  # those of rewards.metrics.ANSWER_METRICS that are reported
_AGREEMENT = ("em", "cover_em")  # those that are compared with the judge's verdicts
JUDGE = "judge"  # mean of the judge's verdicts, if there are any
RETRIEVAL = ("recall", "ndcg", "recall_at_first")  # metrics of gold passages (rewards.retrieval), if some are known
MOST_FAILED = 0.05  # default of the greatest share of failures with which numbers are compared
ANSWERED = "_answered"  # end of the name of a score of the questions with a reply alone
_BEHAVIOUR = (
    "searches_per_question",
    "searched_rate",
    "search_ratio",
    "crops_per_question",
    "box_iou",
    "image_tokens_per_question",
)
# Groups of questions with results of their own, if their metadata have these keys.
GROUPS = ("dataset", "kind", "type", "source_type", "print")
_MOST = 24  # values of a key; a key with more does not define groups
_OF_GROUPS = (*ANSWER, "answerable", "em_answerable", JUDGE, "routing_accuracy", *RETRIEVAL, *_BEHAVIOUR)


def summarize(
    episodes: Sequence[Episode],
    normalizer: str = "search_r1",
    tools: Collection[str] | None = None,
    budget: int | None = None,
    seeds: int = 1,
) -> dict[str, Any]:
    """Metrics of finished episodes: `averages` with intervals, and `knowledge_base_shares`.

    Args:
      budget: searches that the agent may make on a question (Agent.search_budget).
      seeds: number of attempts at every question. The episodes are all questions of the first seed, then of the next one.

    Returns:
      The entries of `averages`, and:

      - the intervals of `ANSWER`, `em_interval` and so on (95 %, scoring.bootstrap_intervals), and `judge_interval` if verdicts
        count;
      - `n_answered`, the number of episodes in which every request to the policy had a reply (`Episode.failure` is None), and,
        if a judge was asked, `n_judged`, the number of these whose verdict is not missing (`Verdict.given`). If they are fewer
        than `n`, also the scores of these alone: `em_answered`, `em_answered_interval`, .., `judge_answered`, ..;
      - `kb_share`, and the same as `mode_usage`, which is RouteRAG's name for it;
      - `breakdown`: shares of all questions, `correct_with_search`, `correct_without_search`, `wrong_with_search` and
        `wrong_without_search`, by EM;
      - `n`, the number of episodes;
      - `by`, if the examples have several data sets, kinds or types: for each such key and value, some of these entries.

    Raises:
      ValueError: there are no episodes.
    """
    scores = answer_scores(episodes, normalizer)
    share = knowledge_base_shares(episodes)
    by: dict[str, dict[str, dict[str, Any]]] = {}
    for key, values in by_group([episode.example.metadata for episode in episodes]).items():
        for value, numbers in values.items():
            group = [episodes[i] for i in numbers]
            means = _averages(group, scores[numbers], tools, budget)
            fewer = {name: count for name, count in _numbers(group).items() if count < len(group)}
            row = {"n": len(group), **fewer, **{name: means[name] for name in _OF_GROUPS if name in means}}
            by.setdefault(key, {})[value] = row
    return {
        **_averages(episodes, scores, tools, budget),
        **_spread(episodes, scores, seeds),
        **_numbers(episodes),
        "kb_share": share,
        "mode_usage": share,
        "breakdown": breakdown(scores[:, 0] == 1, np.asarray([bool(episode.calls) for episode in episodes])),
        "n": len(episodes),
        **({"by": by} if by else {}),
    }


def answered(row: Mapping[str, Any], metric: str) -> tuple[int, int]:
    """Of how many of its questions a row of `summarize` has what a metric takes: a reply of the policy and, for `judge`, a
    verdict. Returns this number, and that of all questions."""
    return row.get("n_judged" if metric == JUDGE else "n_answered", row["n"]), row["n"]


def too_few_answered(row: Mapping[str, Any], metric: str, most_failed: float) -> bool:
    """Whether more than a share of a row's questions lacks what a metric takes (`answered`)."""
    count, asked = answered(row, metric)
    return asked - count > round(most_failed * asked, 6)


def verdicts_that_count(episodes: Sequence[Episode]) -> Float[np.ndarray, " N"]:
    """What each episode's verdict counts; nan if it does not count, or if there is none."""
    verdicts = [None if episode.verdict is None else episode.verdict.counts for episode in episodes]
    return np.asarray([np.nan if counts is None else counts for counts in verdicts])


def _replied(episodes: Sequence[Episode]) -> tuple[Bool[np.ndarray, " N"], Bool[np.ndarray, " N"]]:
    """Which episodes have the policy's replies, and which of these a verdict, too."""
    replied = np.asarray([episode.failure is None for episode in episodes])
    found = [episode.verdict is not None and episode.verdict.given for episode in episodes]
    return replied, replied & np.asarray(found)


def _numbers(episodes: Sequence[Episode]) -> dict[str, int]:
    replied, judged = _replied(episodes)
    asked = any(episode.verdict is not None for episode in episodes)
    return {"n_answered": int(replied.sum()), **({"n_judged": int(judged.sum())} if asked else {})}


def _spread(episodes: Sequence[Episode], scores: Float[np.ndarray, "N M"], seeds: int) -> dict[str, Any]:
    """The intervals of all scores; and the scores of the episodes with a reply (and a verdict), if these are fewer."""
    names = (*ANSWER, JUDGE)
    table = np.column_stack([scores, verdicts_that_count(episodes)])
    replied, judged = _replied(episodes)
    counted = np.column_stack([*[replied] * len(ANSWER), judged])
    alone = np.where(counted, table, np.nan)
    columns = np.concatenate([table, alone], axis=1).reshape(seeds, -1, 2 * len(names))
    low, high = bootstrap_intervals(columns)
    found: dict[str, Any] = {}
    for i, name in enumerate(names):
        if not np.isnan(table[:, i]).all():
            found[f"{name}_interval"] = [float(low[i]), float(high[i])]
        j = len(names) + i
        if not np.isnan(alone[:, i]).all() and not counted[:, i].all():
            found[f"{name}{ANSWERED}"] = float(np.nanmean(alone[:, i]))
            found[f"{name}{ANSWERED}_interval"] = [float(low[j]), float(high[j])]
    return found


def group_fields(metadata: Mapping[str, Any]) -> dict[str, str | list[str]]:
    """The values of `GROUPS` in an example's metadata. A list holds several values, such as the source types of a question that
    needs a chart and a table. For a question without `dataset`, that is verl's `data_source`."""
    fields = {**metadata, "dataset": metadata.get("dataset") or metadata.get("data_source")}
    return {key: value for key in GROUPS if (value := fields.get(key)) and _names(value)}


def by_group(metadata: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Indices of the questions of each group, by key and value. Keys with one value, or with very many, are left out. A
    question with several values belongs to several groups.

    Args:
      metadata: the metadata of each question.
    """
    groups: dict[str, dict[str, list[int]]] = {}
    for number, fields in enumerate(map(group_fields, metadata)):
        for key, values in fields.items():
            for value in dict.fromkeys(_names(values)):
                groups.setdefault(key, {}).setdefault(value, []).append(number)
    return {key: dict(sorted(values.items())) for key in GROUPS if 1 < len(values := groups.get(key, {})) <= _MOST}


def _names(value: Any) -> list[str]:
    """The values of a key as a list; [] for anything but a string or strings."""
    values = [value] if isinstance(value, str) else value
    if not isinstance(values, list | tuple) or not all(isinstance(name, str) and name for name in values):
        return []
    return list(values)


def breakdown(right: Bool[np.ndarray, " N"], searched: Bool[np.ndarray, " N"]) -> dict[str, float]:
    """Shares of all questions by right or wrong answer, with or without a search (MMSearch-R1, arXiv 2506.20670, figure 4b)."""
    return {
        f"{answer}_{search}_search": float((is_right & did).mean())
        for answer, is_right in (("correct", right), ("wrong", ~right))
        for search, did in (("with", searched), ("without", ~searched))
    }


def search_rates(searches: Sequence[int], budget: int | None) -> dict[str, float]:
    """`searched_rate`, the share of questions with a search; and if the budget of a question is known, `search_ratio`, the
    number of searches divided by the number allowed."""
    rates = {"searched_rate": float(np.mean([count > 0 for count in searches]))}
    return rates if budget is None else {**rates, "search_ratio": sum(searches) / max(budget * len(searches), 1)}


def averages(
    episodes: Sequence[Episode], normalizer: str = "search_r1", tools: Collection[str] | None = None
) -> dict[str, float]:
    """Means over finished episodes.

    Args:
      tools: names of the knowledge bases; default: those that were asked.

    Returns:
      Metrics by name. Rates are shares of episodes unless another unit is given.

      - Answers: `em`, `f1`, `cover_em`, `substring_em`, `f1_recall`, `anls`, in [0, 1].
      - If it is known which questions can be answered (metadata["answerable"], as `launch.check_data --mark` writes it):
        `answerable`, the share of those for which it is known, and `em_answerable`, the EM of these.
      - Searches: `searches_per_question`; `searched_rate` (at least one search); `search_ratio` (searches divided by those
        allowed, if `summarize` knows their number); `valid_search_share` (at least one search that follows the protocol to the
        letter and succeeded); `repeated_search_rate` (the same query to the same knowledge base twice); `tool_error_rate` (of
        calls); `retrieval_cost` (of all calls of a question, in units of a dense search); and if gold paths are known,
        `routing_accuracy`.
      - Turns: `invalid_action_rate` (of turns), `answered_rate`, `forced_rate` (the answer was begun for the policy),
        `finish_rate` (the policy answered by itself within its turns; VRAG-RL, arXiv 2505.22019, table 3), `refusal_rate` (the
        policy said that it can't answer), `truncated_rate`, `turns_per_question`, `tokens_per_question` (sampled).
      - If there are pictures: `unusable_picture_rate` (of pictures in observations), `crops_per_question` (closer looks), and
        `image_tokens_per_question` (of all pictures in the sequences).
      - If gold boxes are known (metadata["boxes"]): `box_iou`, the intersection over union of the last closer look with the
        gold box of its page, 0 on another page; mean over the questions with a closer look.
      - If gold passages (pages) are known: `recall`, `ndcg` and `recall_at_first` of the passages that searches showed, as
        means over the questions with gold passages (rewards.retrieval).
      - For golden steps (data.trajectories): `em/route`, `em/answer` and `em/final`, for sub-questions, answers to them and
        final answers. `em` covers all three.
      - For a chat model behind an endpoint: `policy_failed_rate` (the policy gave no reply, and the episode ended unanswered),
        `policy_failed/KIND` for each kind of failure, and per question `policy_retries_per_question` (requests that were sent
        again), `prompt_tokens_per_question`, `policy_seconds_per_question` and `money_per_question`.
      - If an agent extracts its answers from free text by rules (`extras.baselines`): `answer_rule/RULE`, the share of
        questions whose answer this rule found.
      - If a judge was asked: `judge` (mean of the verdicts that count; absent if none does); the shares `judge/asked` (there is
        an answer), `judge/right`, `judge/unreadable`, `judge/failed` and `judge/from_cache`; and among answers found right or
        wrong, `judge/em_agreement` and `judge/cover_em_agreement`, the shares for which these metrics agree; and
        `judge/right_where_cover_em` and `judge/right_where_not_cover_em`, the shares found right where CEM is 1 and where it is
        0 (about the same for a judge that does not tell answers apart).

    Raises:
      ValueError: there are no episodes.
    """
    return _averages(episodes, answer_scores(episodes, normalizer), tools)


def answer_scores(episodes: Sequence[Episode], normalizer: str = "search_r1") -> Float[np.ndarray, "N M"]:
    """The metrics of `ANSWER`, in its order, of every episode. Raises ValueError without episodes."""
    if not episodes:
        raise ValueError("there are no episodes to summarise")
    golds = [accepted_answers(episode.example, episode.answer) for episode in episodes]
    return np.asarray(
        [
            [ANSWER_METRICS[name](e.answer, answers, normalizer) for name in ANSWER]
            for e, answers in zip(episodes, golds)
        ]
    )


def knowledge_base_shares(episodes: Sequence[Episode]) -> dict[str, float]:
    """The share of searches that went to each knowledge base; golden routes count for the one that they name. Knowledge bases
    that were never asked are absent."""
    counts = collections.Counter(tool for episode in episodes for tool in asked_knowledge_bases(episode))
    return {name: counts[name] / counts.total() for name in sorted(counts)}


def _averages(
    episodes: Sequence[Episode],
    scores: Float[np.ndarray, "N M"],
    tools: Collection[str] | None,
    budget: int | None = None,
) -> dict[str, float]:
    turns = max(sum(len(e.turns) for e in episodes), 1)
    last = [e.turns[-1] if e.turns else None for e in episodes]
    forced = [e.answer is not None and bool(turn and turn.forced) for e, turn in zip(episodes, last)]
    queries = [[(call.tool, call.image, " ".join(call.query.lower().split())) for call in e.calls] for e in episodes]
    valid = [any(t.well_formed and any(c.error is None for c in t.calls) for t in e.turns) for e in episodes]
    calls = [call for episode in episodes for call in episode.calls]
    result = {
        **{name: float(mean) for name, mean in zip(ANSWER, scores.mean(axis=0))},
        "searches_per_question": len(calls) / len(episodes),
        **search_rates([len(e.calls) for e in episodes], budget),
        "valid_search_share": float(np.mean(valid)),
        "repeated_search_rate": float(np.mean([len(set(asked)) < len(asked) for asked in queries])),
        "invalid_action_rate": sum(e.invalid_actions for e in episodes) / turns,
        "answered_rate": float(np.mean([e.answer is not None for e in episodes])),
        "forced_rate": float(np.mean(forced)),
        "finish_rate": float(np.mean([e.answer is not None and not begun for e, begun in zip(episodes, forced)])),
        "refusal_rate": float(np.mean([bool(turn and turn.action and turn.action.kind == "refusal") for turn in last])),
        "truncated_rate": float(np.mean([e.truncated for e in episodes])),
        "tool_error_rate": sum(call.error is not None for call in calls) / max(len(calls), 1),
        **_seen_rates(episodes),
        "turns_per_question": sum(len(e.turns) for e in episodes) / len(episodes),
        "tokens_per_question": sum(turn.tokens for e in episodes for turn in e.turns) / len(episodes),
        "retrieval_cost": sum(call.cost for call in calls) / len(episodes),
    }
    result |= _of_answerable(episodes, scores) | _endpoint(episodes)
    result |= _judged(episodes, scores) | _retrieved(episodes) | _answer_rules(episodes)
    kinds = [step.kind if (step := golden_step(episode.example)) else "" for episode in episodes]
    for kind in sorted(set(kinds) - {""}):
        result[f"em/{kind}"] = float(scores[[k == kind for k in kinds], 0].mean())
    accuracy = routing_accuracy(list(episodes), tools)
    return result if accuracy is None else {**result, "routing_accuracy": accuracy}


def _of_answerable(episodes: Sequence[Episode], scores: Float[np.ndarray, "N M"]) -> dict[str, float]:
    """The share of questions that can be answered, and their EM; {} if that is not known of any question."""
    known = [e.example.metadata.get("answerable") for e in episodes]
    if not any(isinstance(value, bool) for value in known):
        return {}
    can = np.asarray([value is True for value in known])
    share = {"answerable": float(can.sum() / sum(isinstance(value, bool) for value in known))}
    return {**share, "em_answerable": float(scores[can, 0].mean())} if can.any() else share


def _seen_rates(episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of the pictures in observations and sequences; {} if there are none."""
    rates: dict[str, float] = {}
    pictures = [item for e in episodes for turn in e.turns for item in turn.shown if item.digest or item.error]
    if pictures:
        rates["unusable_picture_rate"] = sum(bool(item.error) for item in pictures) / len(pictures)
        rates["crops_per_question"] = sum(bool(item.parent and item.digest) for item in pictures) / len(episodes)
    overlaps = [overlap for e in episodes if (overlap := _box_iou(e)) is not None]
    if overlaps:
        rates["box_iou"] = float(np.mean(overlaps))
    tokens = [image.tokens for e in episodes for sequence in e.sequences for _, image in sequence.images]
    return {**rates, "image_tokens_per_question": sum(tokens) / len(episodes)} if tokens else rates


def _box_iou(episode: Episode) -> float | None:
    """Overlap of the last closer look with the gold box of its page; None without gold boxes or closer looks."""
    gold = episode.example.metadata.get("boxes")
    looks = [item for turn in episode.turns for item in turn.shown if item.box and item.digest]
    if not gold or not looks:
        return None
    box = gold.get(looks[-1].passage)
    return 0.0 if box is None else iou(box, looks[-1].box)


def _endpoint(episodes: Sequence[Episode]) -> dict[str, float]:
    """Tokens, time, cost and failures of a policy behind an endpoint; {} for another policy."""
    used = [episode.usage for episode in episodes if episode.usage is not None]
    kinds = collections.Counter(episode.failure.kind for episode in episodes if episode.failure is not None)
    if not used and not kinds:
        return {}
    count = len(episodes)
    return {
        "policy_failed_rate": kinds.total() / count,
        **{f"policy_failed/{kind}": number / count for kind, number in sorted(kinds.items())},
        "policy_retries_per_question": sum(usage.retries for usage in used) / count,
        "prompt_tokens_per_question": sum(usage.prompt_tokens for usage in used) / count,
        "policy_seconds_per_question": sum(usage.seconds for usage in used) / count,
        "money_per_question": sum(usage.cost for usage in used) / count,
    }


def _answer_rules(episodes: Sequence[Episode]) -> dict[str, float]:
    """The share of questions whose answer each rule found (`Turn.info["answer_rule"]`); {} without such rules."""
    rules = (
        [turn.info["answer_rule"] for turn in episode.turns if "answer_rule" in turn.info]
        for episode in episodes
        if episode.answer is not None
    )
    counts = collections.Counter(str(found[-1]) for found in rules if found)
    return {f"answer_rule/{rule}": number / len(episodes) for rule, number in sorted(counts.items())}


def _retrieved(episodes: Sequence[Episode]) -> dict[str, float]:
    """Recall and ranks of gold passages; {} if none are known."""
    searched = [shown for episode in episodes if (shown := retrieval(episode)) is not None]
    values = [(shown.recall(), shown.ndcg(), shown.recall_at_first()) for shown in searched]
    return dict(zip(RETRIEVAL, np.mean(values, axis=0).tolist())) if values else {}


def _judged(episodes: Sequence[Episode], scores: Float[np.ndarray, "N M"]) -> dict[str, float]:
    """Metrics of the verdicts; {} if there are none."""
    judged = [(episode.verdict, row) for episode, row in zip(episodes, scores) if episode.verdict is not None]
    if not judged:
        return {}
    kinds = [verdict.kind for verdict, _ in judged]
    shares = {name: float(np.mean([kind == name for kind in kinds])) for name in ("right", "unreadable", "failed")}
    shares["asked"] = float(np.mean([kind != "unasked" for kind in kinds]))
    shares["from_cache"] = float(np.mean([verdict.kept for verdict, _ in judged]))
    for name in _AGREEMENT:
        agreed = [
            (verdict.kind == "right") == (row[ANSWER.index(name)] == 1)
            for verdict, row in judged
            if verdict.kind in ("right", "wrong")
        ]
        shares |= {f"{name}_agreement": float(np.mean(agreed))} if agreed else {}
    for name, covers in (("right_where_cover_em", 1), ("right_where_not_cover_em", 0)):
        right = [
            verdict.kind == "right"
            for verdict, row in judged
            if verdict.kind in ("right", "wrong") and row[ANSWER.index("cover_em")] == covers
        ]
        shares |= {name: float(np.mean(right))} if right else {}
    counted = [verdict.counts for verdict, _ in judged if verdict.counts is not None]
    mean = {JUDGE: float(np.mean(counted))} if counted else {}
    return mean | {f"{JUDGE}/{name}": share for name, share in shares.items()}


def routing_decisions(episode: Episode) -> tuple[int, int] | None:
    """(right decisions, decisions) of an episode; None if its example has no gold path.

    The gold path (`example.metadata["path"]`) lists hops, each with the knowledge base `kb` that has passage `passage_id`. A
    search is right if it goes to the knowledge base of the first hop whose passage has not been retrieved yet. Once all have
    been, every further search is wrong. An answer without any search counts as one decision: right if the question needs no
    retrieval, else wrong. An episode of a golden step (data.trajectories) makes one decision if the step is a route: the
    retriever that it names.
    """
    step = golden_step(episode.example)
    if step is not None:
        tool = _choice(episode)  # the retriever's name in trajectories is its label
        return None if step.kind != "route" else (int((label_of(tool) if tool else "") in step.retrievers), 1)
    path = known_path(episode.example.metadata)
    if path is None:
        return None
    missing = list(path)
    right = 0
    for call in episode.calls:
        right += bool(missing) and call.tool == missing[0]["kb"]
        retrieved = {passage.id for passage in call.passages}
        while missing and missing[0]["passage_id"] in retrieved:
            missing.pop(0)
    if not episode.calls:
        return (0 if path else 1), 1
    return right, len(episode.calls)


def asked_knowledge_bases(episode: Episode) -> list[str]:
    """The knowledge bases that an episode searched. For a golden route, which makes no search, the one that it names."""
    if golden_step(episode.example) is None:
        return [call.tool for call in episode.calls]
    named = _choice(episode)
    return [named] if named not in ("", NONE) else []


def routing_accuracy(episodes: list[Episode], tools: Collection[str] | None = None) -> float | None:
    """Share of right decisions over all episodes with a gold path.

    None if there is no such episode, or if gold paths use none of the knowledge bases, because these divide the same facts in
    another manner.

    Args:
      tools: names of the knowledge bases; default: those that were asked.
    """
    tool_names = {call.tool for episode in episodes for call in episode.calls} if tools is None else set(tools)
    gold = {hop["kb"] for episode in episodes for hop in known_path(episode.example.metadata) or ()}
    if tool_names and gold and not tool_names & gold:
        return None
    decisions = [d for episode in episodes if (d := routing_decisions(episode)) is not None]
    total = sum(count for _, count in decisions)
    return sum(right for right, _ in decisions) / total if total else None


def _choice(episode: Episode) -> str:
    """The knowledge base that an episode of a golden route chose; "" without a valid choice."""
    action = episode.turns[-1].action if episode.turns else None
    return action.tool if action is not None and action.kind == "search" else ""
