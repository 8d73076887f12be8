"""A small run's directory, written as training writes one: metrics, episodes of two steps, an evaluation, a picture."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
from PIL import Image

from routerl_jax.core.types import Action, Branch, Call, Episode, Example, Passage, Shown, Turn
from routerl_jax.evaluation.records import write_records

SCRIPT = '<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">'


def episode(name: str, tool: str = "text", answer: str | None = "lion", sample: int = 0, **fields: Any) -> Episode:
    """A question with one search and an answer; gold is "lion"."""
    passage = Passage(id=f"p/{name}", title="Savannah", text=f"What lives there, {name}: the lion.", score=1.5)
    turns = [
        Turn(
            text=f"<think>I look.</think><search>{name}?</search>",
            stop_reason="stop",
            tokens=9,
            action=Action(kind="search", tool=tool, query=f"{name}?", thought="I look."),
            well_formed=True,
            calls=[Call(tool=tool, query=f"{name}?", passages=(passage,), seconds=0.01, cost=1.0)],
            observation=f"<information>{passage.text}</information>",
        )
    ]
    if answer is not None:
        action = Action(kind="answer", answer=answer, thought="So it is.")
        turns.append(
            Turn(text=f"<answer>{answer}</answer>", stop_reason="stop", tokens=4, action=action, well_formed=True)
        )
    made = Episode(
        example=Example(id=name, question=f"Which animal is {name}?", answers=("lion",), metadata={"dataset": "zoo"}),
        sample=sample,
        answer=answer,
        turns=turns,
        sequences=[],
        prompt=f"Question: {name}",
        rewards={"em": float(answer == "lion"), "total": float(answer == "lion")},
    )
    return dataclasses.replace(made, **fields)


def seen(name: str, page: pathlib.Path) -> Episode:
    """One that was shown a page, and looked closer at a part of it."""
    box = (20.0, 10.0, 60.0, 40.0)
    crop = np.asarray(Image.open(page).convert("RGB"))[10:40, 20:60]
    looked = Turn(
        text="<bbox>[20, 10, 60, 40]</bbox>",
        stop_reason="stop",
        tokens=5,
        action=Action(kind="region", box=box),
        well_formed=True,
        shown=[Shown(image=crop, digest="crop", parent="page", box=box)],
    )
    made = episode(name, "pages")
    made.turns[0].shown = [Shown(passage="p", image=str(page), digest="page")]
    made.turns.insert(1, looked)
    return made


def _walked(made: Episode) -> Episode:
    """The same, where the search walked over a graph."""
    made.turns[0].calls = [
        dataclasses.replace(call, facts=("lion | lives in | savannah",), nodes=("lion", "mane")) for call in made.calls
    ]
    return made


def tokens(text: str) -> list[dict[str, Any]]:
    """As `training.step` writes them: what was fed, then a sampled token per word."""
    words = [f"{word} " for word in text.split()]
    return [
        {
            "text": ["Question", ": ", *words],
            "sampled": [0, 0] + [1] * len(words),
            "logprob": [0.0, 0.0] + [-0.1 - i for i in range(len(words))],
            "advantage": [0.0, 0.0] + [(-1.0) ** i for i in range(len(words))],
        }
    ]


def make_run(path: pathlib.Path) -> pathlib.Path:
    """Writes it. Step 0: a group of two, and an attempt that was forked two ways. Step 1: one with a script in what it
    found, one that looked at a page. An evaluation of the first question."""
    path.mkdir()
    page = path / "page.png"
    Image.new("RGB", (100, 80), "white").save(page)
    watch = {"patience": 2, "most": {"actor/grad_norm": 10.0}}
    (path / "config.json").write_text(json.dumps({"recipe": "search_r1", "steps": 5, "seed": 0, "watch": watch}))
    for step, norm in enumerate((1.0, 20.0, 30.0)):
        write_metrics(path, step, norm)
    ways = [
        Branch(tool=tool, turn=0, sequence=0, start=0, tokens=1, logprob=np.log(p))
        for tool, p in (("text", 0.75), ("table", 0.25))
    ]
    step0 = [
        _walked(episode("a", sample=0)),
        episode("a", "table", "cat", sample=1),
        episode("forked", "text", branches=(ways[0],)),
        episode("forked", "table", None, branches=(ways[1],), truncated=True),
    ]
    learned: list[dict[str, Any]] = [{"advantage": value, "trained": value != 0} for value in (0.5, -0.5, 0.0, 0.0)]
    learned[0]["tokens"] = tokens("I look. a?")
    write_records(path / "episodes" / "step-000000.jsonl", step0, learned, step=0)
    attack = episode("b", answer=SCRIPT)
    call = attack.turns[0].calls[0]
    bad = Passage(id=SCRIPT, title=SCRIPT, text=f"{SCRIPT} the end", score=1.0)
    attack.turns[0].calls = [dataclasses.replace(call, query=SCRIPT, passages=(bad,))]
    attack.turns[0].observation = SCRIPT
    attack = dataclasses.replace(attack, example=dataclasses.replace(attack.example, question=f"{SCRIPT} b"))
    write_records(path / "episodes" / "step-000001.jsonl", [attack, seen("page", page)], step=1)
    write_records(path / "evaluation" / "trained.jsonl", [episode("a", "table")])
    return path


def write_metrics(path: pathlib.Path, step: int, norm: float) -> None:
    """Appends a step's row."""
    row = {
        "step": step,
        "stage": "main",
        "reward/total": 0.5,
        "rollout/em": 0.1 * step,
        "rollout/kb/text": 0.4,
        "rollout/kb/table": 0.6,
    }
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**row, "actor/loss": 0.1, "actor/grad_norm": norm}) + "\n")
