r"""Scores any system's predictions: EM, CEM, SubEM, F1 and F1-Recall with 95 % intervals.

    python -m launch.score --predictions=predictions.jsonl --normalizer=search_r1
    python -m launch.score --predictions=predictions.jsonl.gz --group=dataset,model --json

    python -m launch.score --trajectories=rounds.jsonl --recipe=mmsearch_r1 --json

Predictions are one JSON object per line: {"id": .., "question": .., "prediction": .., "golden_answers": [..]}. `prediction`
may also be called `pred_answer` and may be null; `golden_answers` may be one string; `id` and `question` are optional. A
thousand rows take under a second on one CPU core.

Trajectories are recorded rounds (routerl_jax/data/rounds.py): what a policy wrote and what its tools returned. The recipe's
agent judges them as it judges its own: actions, form, reward, searches, answers. --agent has settings of the agent, such as
--agent='{"text_searches": 2, "image_first": false}' for the limits of MMSearch-R1's released code. --judge describes a language
model that says whether answers are right, as config.judge does for a run. --reward replaces the terms of the recipe's reward:

    python -m launch.score --trajectories=rounds.jsonl --recipe=mmsearch_r1 --judge='{"model": "Qwen2.5-7B-Instruct",
        "base_url": "http://127.0.0.1:8000/v1", "style": "mmsearch_r1"}' --reward='{"mmsearch_r1.judged_accuracy": 0.9}'
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags
from rich.table import Table
from rich.text import Text

from launch.command import start
from routerl_jax.core.console import open_console
from routerl_jax.core.files import parse_json
from routerl_jax.rewards import scoring
from routerl_jax.rewards.metrics import NORMALIZERS

if TYPE_CHECKING:
    from routerl_jax.services.judge import ModelJudge

FLAGS = flags.FLAGS

_TITLES = {"em": "EM", "cover_em": "CEM", "substring_em": "SubEM", "f1": "F1", "f1_recall": "F1-Recall", "anls": "ANLS"}


def define_flags() -> None:
    flags.DEFINE_string("predictions", None, "The .jsonl or .jsonl.gz file to score.")
    flags.DEFINE_string("trajectories", None, "A file of recorded rounds to score instead; goes with --recipe.")
    flags.DEFINE_string("recipe", None, "Whose agent reads the trajectories, such as mmsearch_r1.")
    flags.DEFINE_list("tools", ["image", "text"], "Names of that agent's knowledge bases.")
    flags.DEFINE_integer("searches", 2, "Searches that the agent may make on a question.", lower_bound=0)
    flags.DEFINE_string("agent", "{}", "Settings of that agent, as JSON.")
    flags.DEFINE_string("judge", "{}", "A judge of the answers: what config.judge has, as JSON.")
    flags.DEFINE_string("reward", "{}", "Terms of the reward in the place of the recipe's own, as JSON.")
    flags.DEFINE_string("normalizer", "search_r1", f"How answers are normalised: {', '.join(NORMALIZERS)}.")
    flags.DEFINE_list("group", [], "Fields to report by as well as overall, such as dataset,model.")
    flags.DEFINE_bool("json", False, "Print one JSON object, values in [0, 1], instead of a table.")


def table(overall: scoring.Report, groups: Mapping[str, scoring.Report], caption: str) -> Table:
    """Means in percent, each above its interval."""
    result = Table(caption=caption)
    result.add_column("group", overflow="fold")
    result.add_column("n", justify="right")
    for name in overall.means:
        result.add_column(_TITLES[name], justify="right")
    for name, report in [*groups.items(), ("all", overall)]:
        cells = [
            f"{100 * mean:.2f}\n{100 * report.intervals[metric][0]:.1f}-{100 * report.intervals[metric][1]:.1f}"
            for metric, mean in report.means.items()
        ]
        result.add_row(Text(name), str(report.n), *cells)
    return result


def main(_: Sequence[str]) -> None:
    NORMALIZERS.get(FLAGS.normalizer)
    if bool(FLAGS.predictions) == bool(FLAGS.trajectories):
        raise ValueError("give either --predictions or --trajectories")
    if bool(FLAGS.trajectories) != bool(FLAGS.recipe):
        raise ValueError("--trajectories and --recipe go together: the recipe's agent reads the trajectories")
    if FLAGS.trajectories:
        _score_trajectories()
    else:
        for name in ("agent", "judge", "reward"):
            if FLAGS[name].present:
                raise ValueError(
                    f"--{name} goes with --trajectories; predictions are compared with their answers alone"
                )
        _score_predictions()


def _score_trajectories() -> None:
    from routerl_jax.evaluation import report
    from routerl_jax.evaluation.benchmark import score_rounds

    judge, counted = _judge()
    with contextlib.closing(judge) if judge else contextlib.nullcontext():
        result = score_rounds(
            FLAGS.trajectories,
            FLAGS.recipe,
            FLAGS.tools,
            _settings("agent"),
            searches=FLAGS.searches,
            normalizer=FLAGS.normalizer,
            judge=judge,
            reward=_settings("reward"),
        )
    result |= {"judge": dict(counted)} if judge else {}
    failed = counted["failed"] if judge else ""
    if FLAGS.json:
        print(json.dumps(result))
        return
    print(report.markdown({FLAGS.recipe: result["metrics"]}, failed=failed))
    for name, value in result["reward"].items():
        print(f"reward {name}: {value:.4f}")


def _judge() -> tuple[ModelJudge | None, Mapping[str, Any]]:
    """The judge that --judge describes, and the settings on which its verdicts depend; None and {} without --judge."""
    settings = _settings("judge")
    if not settings:
        return None, {}
    from routerl_jax.core.config import from_config_dict, naming
    from routerl_jax.services.config import JudgeConfig
    from routerl_jax.services.judge import open_judge, settings_that_count

    config = from_config_dict(JudgeConfig, settings, "--judge")
    with naming("--judge"):
        return open_judge(config, FLAGS.normalizer), settings_that_count(config)


_SUCH_AS = {"agent": '{"text_searches": 2}', "judge": '{"model": "Qwen2.5-7B-Instruct"}', "reward": '{"judge": 1.0}'}


def _settings(flag: str) -> dict[str, Any]:
    """The JSON object that a flag holds."""
    text = str(FLAGS[flag].value)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ValueError(f"--{flag}={text[:200]}: not JSON that can be read ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"--{flag}={text[:200]}: give an object, such as {_SUCH_AS[flag]}")
    return value


def _score_predictions() -> None:
    rows = scoring.read_predictions(FLAGS.predictions, FLAGS.group)
    scores = scoring.score_rows(rows, FLAGS.normalizer, progress=True)
    overall, groups = scoring.summarize(scores), scoring.summarize_groups(rows, scores)
    if FLAGS.json:
        by_group = {name: report.to_json() for name, report in groups.items()}
        print(json.dumps({**overall.to_json(), "normalizer": FLAGS.normalizer, "groups": by_group}))
    else:
        caption = f"percent and its 95% bootstrap interval (Wilson's where all scores are equal); normalizer {FLAGS.normalizer}"
        open_console().print(table(overall, groups, caption))


if __name__ == "__main__":
    start(main, define_flags)
