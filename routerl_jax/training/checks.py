"""What is checked before a run begins, so that nothing slow starts in vain: that a workdir holds no other run; that a resumed
run has the settings and reads the contents that it began with; that what is configured is there; and that no question is both
trained and evaluated on."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import logging

from routerl_jax.agents.agent import check_choices
from routerl_jax.core.buckets import fetched
from routerl_jax.core.config import first_difference, naming
from routerl_jax.core.files import read_json, write_atomic
from routerl_jax.core.secrets import without_secrets
from routerl_jax.core.types import Example
from routerl_jax.data.gold_paths import known_path
from routerl_jax.data.overlap import examples_of, find_overlaps
from routerl_jax.data.readers import ExampleSource
from routerl_jax.knowledge.corpus import file_sha256, passages_sha256
from routerl_jax.knowledge.store import Manifest, built_at
from routerl_jax.models import pretrained
from routerl_jax.parallel import multihost
from routerl_jax.recipes.recipe import Recipe
from routerl_jax.rewards.terms import RewardFunction
from routerl_jax.services.judge import settings_that_count
from routerl_jax.training.atlas_sources import atlas_passages
from routerl_jax.training.config import KnowledgeConfig, TrainConfig, kept_config
from routerl_jax.training.controls import check_controls
from routerl_jax.training.demonstrations import MADE, demonstration_files, shown_questions
from routerl_jax.training.evaluation import check_names
from routerl_jax.training.knowledge import check_knowledge, check_snapshot, check_sources_differ, content_sha256
from routerl_jax.training.loggers import require_log
from routerl_jax.training.run import as_json
from routerl_jax.training.sections import SEARCHED
from routerl_jax.training.setup import (
    build_recipe,
    check_engine_devices,
    evaluated_agent,
    evaluation_examples,
    open_examples,
)

INPUTS = "inputs.json"
_SAMPLES, _SAMPLE = 64, 2**12  # pieces of a file of weights that are read, and bytes of each
_WEIGHTS = (".safetensors", ".bin", ".gguf")

Inputs = dict[str, dict[str, Any]]
# Settings that fit a run into memory, or a machine. They change its results by rounding alone, so a run may be resumed with
# others.
_MEMORY = {"engine": ("rows",), "learner": ("micro_tokens", "remat"), "mesh": ("peer_timeout",)}


def check_run(config: TrainConfig, workdir: pathlib.Path, resume: bool) -> Recipe:
    """Checks a run of reinforcement learning whose workdir has been checked, and gives its recipe (a collective call).

    Raises:
      ValueError: names the setting that can't be used, and why.
    """
    multihost.on_main(lambda: require_log(config.log))
    check_knowledge(config.knowledge)
    check_sources_differ(config.knowledge)
    check_snapshot(config, workdir, resume=resume)
    check_engine_devices(config.mesh)
    recipe = build_recipe(config)
    if forked := next((name for name in config.stages if config.in_stage(name).rollout.forks), None):
        check_choices(recipe.agent, f"config.rollout.forks (stage {forked!r})")
    check_names(config, evaluated_agent(config, recipe))
    check_controls(config, workdir)
    check_overlap(config)
    check_inputs(config, workdir, resume)
    check_gold_paths(config)
    return recipe


def check_resumable(workdir: pathlib.Path) -> None:
    """Raises ValueError if a workdir holds no run, nor one that was stopped in its warm start."""
    if not any((workdir / name).is_file() for name in ("config.json", "warm_start/config.json")):
        raise ValueError(
            f"--resume: {workdir} holds no run; check --workdir, or leave out --resume to begin one (--resume=auto does either)"
        )


def check_workdir(config: TrainConfig, workdir: pathlib.Path, resume: bool) -> None:
    """Refuses to mix runs in a workdir. The main process checks, and all get the result (a collective call).

    Raises:
      ValueError: the workdir holds a run already and `resume` is False, or it holds a run with another configuration.
    """
    multihost.on_main(lambda: _check_settings(config, workdir / "config.json", resume))


def _check_settings(config: TrainConfig, path: pathlib.Path, resume: bool) -> None:
    if not path.is_file():
        return
    if not resume:
        raise ValueError(f"{path.parent} holds a run already; pass --resume to continue it, or use another --workdir")
    saved, current = _saved(path), as_json(config)
    saved["judge"] = _judge_of(saved.get("judge", {}), config)
    saved["knowledge"] = _with_index_of(saved.get("knowledge", {}), current["knowledge"])
    for section, keys in _MEMORY.items():
        if section in saved:
            saved[section] |= {key: current[section][key] for key in keys}
    free = {"steps", "profile", "checkpoint", "evaluation", "watch", "callbacks"}  # may change between sessions
    free |= {"log", "log_episodes", "log_groups", "log_tokens"}
    shown = config.warm_start.demonstrations if config.kind == "sft" else ""
    if shown:
        free.add("rollout")  # of which only tool_timeout matters
    if shown and shown not in SEARCHED:
        free.add("data")  # not trained on
    before, now = (values.get("evaluation", {}).get("normalizer") for values in (saved, current))
    if before != now and shown not in ("atlas", "annotated"):
        purpose = "answers are looked for" if shown == "drawn" else "rewards are judged"
        raise ValueError(
            f"{path} was made with config.evaluation.normalizer={before!r}, and now it is {now!r}: {purpose} with it; "
            f"resume with the same one, or use another --workdir"
        )
    differing = [key for key in current if key not in free and saved.get(key) != current[key]]
    if not differing:
        return
    key, before, now = first_difference(saved.get(differing[0]), current[differing[0]], f"config.{differing[0]}")
    raise ValueError(
        f"{path} was made with another configuration ({key} was {without_secrets(before, key)!r}, and now it is {now!r}); "
        f"resume with the same one, or use another --workdir"
    )


def _judge_of(saved: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """The saved judge section, with the current values of settings that may change.

    These are the settings that change no verdict, or all settings if no reward asks the judge.
    """
    rewarded = False
    for name, stage in config.stages.items() if config.kind == "rl" else ():
        with naming(f"config.stages.{name}.reward"):
            rewarded = rewarded or bool(RewardFunction(dict(stage.reward)).asks)
    matters = settings_that_count(config.judge) if rewarded else ()
    return {**as_json(config)["judge"], **{name: saved.get(name) for name in matters}}


def _saved(path: pathlib.Path) -> dict[str, Any]:
    """The configuration in a workdir. Settings that did not exist yet have their defaults."""
    saved = read_json(path, "use another --workdir")
    try:
        return as_json(kept_config(saved))
    except ValueError:  # no longer a valid configuration: returned unchanged, so that it differs from the current one
        return saved


def _with_index_of(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration's knowledge bases, with the index's current name if both names stand for the default."""
    default, result = ("auto", "scann"), {}  # "scann" was the default before "auto"
    for name, spec in saved.items():
        now = current.get(name, {}).get("index")
        result[name] = {**spec, "index": now} if now in default and spec.get("index") in default else spec
    return result


def check_inputs(config: TrainConfig, workdir: pathlib.Path, resume: bool) -> None:
    """Compares what a run reads with what it began with. The main process does, for all (a collective call).

    Raises:
      ValueError: an input has another content; names its key, its file, and how to go on.
    """
    multihost.on_main(lambda: _compare_inputs(config, workdir, resume))


def keep_inputs(config: TrainConfig, workdir: pathlib.Path) -> None:
    """Writes `workdir/inputs.json` unless it is there. Called when knowledge bases are built. For the main process."""
    if not (workdir / INPUTS).is_file():
        write_atomic(workdir / INPUTS, json.dumps(read_inputs(config), indent=2) + "\n")


def read_inputs(config: TrainConfig) -> Inputs:
    """Length or size, and digest, of everything that a run reads, by the key that names it.

    Questions count with answers and metadata, pictures in files by name and size; knowledge bases by their manifest, or their
    source if they are yet to be built; a model by its files, of which weights by size, header and samples. Services and
    functions of one's own have no content that could be compared.
    """
    inputs: Inputs = {}
    shown = config.warm_start.demonstrations if config.kind == "sft" else ""
    if config.kind == "rl" or shown in SEARCHED:
        read: dict[tuple[str, tuple[int, ...]], str] = {}
        parts = {"config.data.train": (config.data.train, config.data.train_range)}
        if config.kind == "rl":
            staged = {name: config.in_stage(name).data for name in config.stages}
            parts = {f"config.data.train (stage {n!r})": (d.train, d.train_range) for n, d in staged.items()}
            for part in ("validation", "test"):
                name = getattr(config.data, part) or config.data.train
                parts[f"config.data.{part}"] = (name, getattr(config.data, f"{part}_range"))
        for key, (name, limits) in parts.items():
            if read.setdefault((name, limits), key) == key:
                source = open_examples(name, limits, key.partition(" ")[0])
                inputs[key] = {"name": name, "questions": len(source), "sha256": _questions_sha256(source)}
        for name, spec in config.knowledge.items():
            if content := _knowledge(spec):
                inputs[f"config.knowledge.{name}"] = {"name": spec.directory or spec.source, **content}
    if shown.startswith("trajectories"):
        source = open_examples(shown, (), "config.warm_start.demonstrations")
        found = {"questions": len(source), "sha256": _questions_sha256(source)}
        inputs["config.warm_start.demonstrations"] = {"name": shown, **found}
    elif files := demonstration_files(config) if shown else []:
        digests = [[file.name, file_sha256(file)] for file in files]
        inputs["config.warm_start.demonstrations"] = {
            "name": shown,
            "bytes": sum(file.stat().st_size for file in files),
            "sha256": _sha256(digests),
        }
    if config.model.path:
        directory = pretrained.resolve(config.model.path)
        files = sorted({file for pattern in (*pretrained.FILES, "*.bin") for file in directory.glob(pattern)})
        inputs["config.model.path"] = {
            "name": config.model.path,
            "bytes": sum(file.stat().st_size for file in files),
            "sha256": _sha256([[file.name, _sampled(file)] for file in files]),
        }
    return inputs


def _compare_inputs(config: TrainConfig, workdir: pathlib.Path, resume: bool) -> None:
    path = workdir / INPUTS
    if not resume or not (workdir / "config.json").is_file():
        path.unlink(missing_ok=True)  # of a run that was refused before it began
        return
    if not path.is_file():
        logging.warning("%s is not there: whether the run reads what it began with can't be checked", path)
        return
    saved = read_json(path, "delete it to go on without the check of what the run reads")
    for key, now in read_inputs(config).items():
        before = saved.get(key, {})
        if before.get("name") != now["name"]:
            continue  # another setting, which check_workdir has allowed
        known = [part for part in ("built", "source", "questions", "bytes", "sha256") if part in before and part in now]
        part = next((part for part in known if before[part] != now[part]), None)
        if part is None or (part == "source" and "built" in known):
            continue
        how = f"{before[part]} {part} then, {now[part]} now" if part in ("questions", "bytes") else "another digest"
        raise ValueError(
            f"{key}={now['name']}: its content is not what the run in {workdir} began with ({how}). Put the old content back, "
            f"or use another --workdir; or delete {path} to go on with the new one: questions of the pass under way may then "
            "come twice or not at all"
        )


def _questions_sha256(source: ExampleSource) -> str:
    digest = hashlib.sha256()
    for i in range(len(source)):
        example = source[i]
        parts = [example.id, example.question, list(example.answers), dict(example.metadata)]
        digest.update(json.dumps(parts, sort_keys=True, default=_plain).encode())
        digest.update(json.dumps([_picture(image) for image in example.images]).encode())
    return digest.hexdigest()


def _picture(image: Any) -> Any:
    if isinstance(image, str | pathlib.Path):
        return [os.path.basename(image), os.path.getsize(image)] if os.path.isfile(image) else str(image)
    return hashlib.sha256(image if isinstance(image, bytes) else np.asarray(image).tobytes()).hexdigest()


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # a golden step
        return dataclasses.asdict(value)
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return hashlib.sha256(value).hexdigest() if isinstance(value, bytes) else type(value).__name__


def _knowledge(spec: KnowledgeConfig) -> dict[str, str]:
    """`built`: of the knowledge base that is opened; `source`: of what one is built from."""
    result = {}
    if spec.directory and (directory := built_at(spec.directory)):
        manifest = Manifest.read(directory)
        embedding = manifest.embedding and [manifest.embedding.digest, manifest.embedding.query_digest]
        facts = [
            manifest.kind,
            manifest.count,
            manifest.corpus_sha256,
            manifest.updates,
            str(manifest.delta),
            embedding,
        ]
        result["built"] = _sha256(facts)
    if (passages := atlas_passages(spec)) is not None:
        result["source"] = passages_sha256(passages)
    elif spec.source and spec.kind not in ("tool", "hybrid") and not spec.served:
        settings = [
            pathlib.Path(value).expanduser() for value in spec.settings.values() if value and isinstance(value, str)
        ]
        if (source := fetched(spec.source)).exists():
            paths = [source, *(path for path in settings if path.is_file())]  # such as triples
            result["source"] = _sha256([content_sha256(path) for path in paths])
    return result


def _sampled(file: pathlib.Path) -> str:
    """A digest of a file; of weights, of their size, their first 2 MiB (with safetensors' header) and samples of the rest."""
    if file.suffix not in _WEIGHTS:
        return file_sha256(file)
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as stream:
        digest.update(stream.read(2**21))
        for i in range(_SAMPLES):
            stream.seek(i * max(size - _SAMPLE, 0) // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE))
    return digest.hexdigest()


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


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
