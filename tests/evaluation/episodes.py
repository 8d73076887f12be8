"""Episodes written by hand."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.types import Action, Call, Episode, Example, Passage, Shown, Turn
from routerl_jax.evaluation.records import episode_record

PATH = [
    {"kb": "table", "passage_id": "t1", "query": "first?", "value": "Togo"},
    {"kb": "text", "passage_id": "x1", "query": "second?", "value": "lion"},
]


def passage(id: str, text: str = "") -> Passage:
    return Passage(id=id, title=f"title {id}", text=text or f"text of {id}", score=0.5)


def call(tool: str, *found: str, error: str | None = None) -> Call:
    return Call(tool=tool, query="q", passages=tuple(passage(id) for id in found), error=error, seconds=0.1)


def episode(
    *calls: Call, answer: str | None = "lion", path: list | None = PATH, invalid: int = 0, truncated: bool = False
) -> Episode:
    """One turn per call, `invalid` turns without an action, a last turn with the answer; two sampled tokens per turn."""
    metadata = {} if path is None else {"path": path}
    turns = [
        Turn(text="s", stop_reason="stop", tokens=2, action=Action(kind="search", tool=c.tool, query="q"), calls=[c])
        for c in calls
    ]
    turns += [Turn(text="?", stop_reason="eos", tokens=2, action=Action(kind="invalid", error="no tag"))] * invalid
    if answer is not None:
        turns.append(Turn(text="a", stop_reason="stop", tokens=2, action=Action(kind="answer", answer=answer)))
    ledger = Ledger()
    ledger.feed([1, 2, 3])
    ledger.sample([4, 5] * len(turns), np.full(2 * len(turns), -1.0).tolist(), 0)
    return Episode(
        example=Example(id="e", question="Which?", answers=("lion", "the lion king"), metadata=metadata),
        sample=0,
        answer=answer,
        turns=turns,
        sequences=[ledger.sequence()],
        prompt="Question: Which?",
        truncated=truncated,
    )


def looked(*steps: str | None, gold: tuple[str, ...] = ("doc.pdf#1",), answer: str | None = "lion") -> Episode:
    """Page by page: a step shows the page of that id, none of those found (None), or a crop of the last one ("crop")."""
    turns, calls = [], [Passage(id="doc.pdf#99", title="", text="")]
    for step in steps:
        if step == "crop":
            action, shown = Action(kind="region", box=(0.0, 0.0, 9.0, 9.0)), Shown(image="x", digest="c", parent="d")
            text, made = "<think>t</think><bbox>[0, 0, 9, 9]</bbox>", []
        else:
            page = Passage(id=step or "doc.pdf#98", title="", text="")
            action, shown = (
                Action(kind="search", tool="pages", query="q"),
                Shown(passage=page.id, image="x", digest="d"),
            )
            text, made = "<think>t</think><search>q</search>", [Call(tool="pages", query="q", passages=(page, *calls))]
        turn = Turn(text=text, stop_reason="stop", tokens=2, action=action, well_formed=True, calls=made)
        turn.observation, turn.shown = "<image>" if step else "none is left", [shown] if step else []
        turns.append(turn)
    if answer is not None:
        said, action = f"<think>t</think><answer>{answer}</answer>", Action(kind="answer", answer=answer)
        turns.append(Turn(text=said, stop_reason="stop", tokens=2, action=action, well_formed=True))
    asked = Example(id="e", question="Which?", answers=("lion",), metadata={"supporting": list(gold)})
    return Episode(example=asked, sample=0, answer=answer, turns=turns, sequences=[])


def record(key: int, right: bool, *costs: float, tool: str = "graph", kind: str = "") -> dict[str, Any]:
    """As a run writes it, with a search for each of the costs; `kind` of question."""
    calls = [Call(tool=tool, query="q", cost=cost) for cost in costs]
    made = json.loads(json.dumps(episode_record(episode(*calls, answer="lion" if right else "cat"))))
    return made | {"id": str(key)} | ({"metadata": {"kind": kind}} if kind else {})
