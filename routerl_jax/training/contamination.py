"""Checks of a run's questions: whether it trains on those it is evaluated on, and whether their gold paths name its sources."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from absl import logging

from routerl_jax.core.types import Example
from routerl_jax.data.gold_paths import known_path
from routerl_jax.data.overlap import examples_of, find_overlaps
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.demonstrations import MADE, shown_questions
from routerl_jax.training.sections import SEARCHED
from routerl_jax.training.setup import evaluation_examples, open_examples

_NEAR = 0.8  # above the default of launch.check_data: templates of small data sets (Atlas) reach 0.6 with other names

# of the evaluation questions, whose names may be as alike as "Congo" and "Democratic Republic of the Congo"
_FEW = 0.01


def check_overlap(config: TrainConfig) -> None:
    """Compares the questions that a run evaluates on with those of all its stages, as config.data.overlap says.

    More than a few near-duplicates are logged; questions with equal words are logged or refused.

    Raises:
      ValueError: there are questions with equal words, and `overlap` is "error".
    """
    if config.data.overlap == "ignore":
        return
    evaluated = _evaluated(config)
    pairs = find_overlaps(_trained_on(config), evaluated, threshold=_NEAR)
    near = [pair for pair in pairs if not pair.exact]
    if len({pair.test_id for pair in near}) > _FEW * len(evaluated):
        logging.warning(
            "%d pairs of training and evaluation questions are nearly the same, such as %r and %r (see launch.check_data)",
            len(near),
            near[0].train_question,
            near[0].test_question,
        )
    exact = [pair for pair in pairs if pair.exact]
    if not exact:
        return
    message = (
        f"{len({pair.test_question for pair in exact})} validation or test questions are training questions too, such as "
        f"{exact[0].test_question!r} (id {exact[0].train_id} in training, {exact[0].test_id} in evaluation)"
    )
    if config.data.overlap == "warn":
        logging.warning("%s", message)
        return
    raise ValueError(
        f"{message}. Set config.data.train_range, validation_range and test_range apart, or remove them from a file "
        f"(launch.check_data lists them); config.data.overlap=warn trains all the same"
    )


def check_gold_paths(config: TrainConfig) -> None:
    """Compares the sources that gold paths name with config.knowledge.

    Gold paths that name none of several sources are of another division of the facts, and score no routing. A name among known
    ones, or one that is nearly a known one, is a mistake: searches there would always count as wrong.

    Raises:
      ValueError: a gold path names a source that the run lacks; says which question and which source.
    """
    names = tuple(config.knowledge)
    lacking: dict[str, str] = {}  # the first question of each name
    gold: set[str] = set()
    for part, examples in (("train", _trained_on(config)), ("validation or test", _evaluated(config))):
        for example in examples:
            for hop in known_path(example.metadata) or ():
                gold.add(hop["kb"])
                if hop["kb"] not in names:
                    lacking.setdefault(hop["kb"], f"question {example.id!r} (config.data, {part})")
    mixed = len(names) > 1 and bool(gold & {*names})
    for kb, where in lacking.items():
        close = difflib.get_close_matches(kb, names, n=1, cutoff=0.75)
        if mixed or close:
            hint = f"did you mean {close[0]!r}? There are" if close else "there are"
            raise ValueError(
                f"the gold path of {where} names the knowledge base {kb!r}, which the run lacks; {hint}: {', '.join(names)}. "
                "Mend `kb` in the question's path, or add the knowledge base to config.knowledge"
            )


def _trained_on(config: TrainConfig) -> Iterator[Example]:
    """The training questions of every stage, of controls, and of demonstrations. Sources used twice come once."""
    supervised = (config.warm_start, *(control.supervised for control in config.controls.values()))
    shown = dict.fromkeys(settings.demonstrations for settings in supervised if settings.steps)
    for source in shown:
        # left out: invented questions, those of config.data (added below), and those that a function makes
        if source not in ("atlas", *SEARCHED) and not source.startswith(MADE):
            yield from shown_questions(source)
    runs = [
        config,
        *(config.otherwise(name) for name, control in config.controls.items() if control.stages or control.data),
    ]
    data = [run.in_stage(name).data for run in runs for name in run.stages]
    if any(source in SEARCHED for source in shown):
        data.append(config.data)
    for name, limits in dict.fromkeys((section.train, tuple(section.train_range)) for section in data):
        yield from examples_of(open_examples(name, limits, "config.data.train"))


def _evaluated(config: TrainConfig) -> list[Example]:
    """The validation and test questions that the run uses."""
    test = evaluation_examples(config, "test")
    return test + evaluation_examples(config, "validation") if config.evaluation.every else test
