"""Renders a trajectory in colour for a terminal."""

from __future__ import annotations

import math
import pathlib
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from routerl_jax.core.text import counted
from routerl_jax.evaluation.sheets import pictures_shown


def render(record: dict[str, Any], sheet: str | pathlib.Path | None = None) -> RenderableType:
    """An episode record (evaluation.records) as thoughts, searches, passages and answer.

    Args:
      sheet: path of the sheet with its pictures and boxes (evaluation.sheets).
    """
    numbers = {id(item): number for number, item in enumerate(pictures_shown(record), 1)}
    branches = {branch["turn"]: branch for branch in record.get("branches", ())}
    parts: list[RenderableType] = [Text.assemble(("Question  ", "bold"), record["question"])]
    last = len(record["turns"]) - 1
    for index, turn in enumerate(record["turns"]):
        parts += turn_parts(turn, last=index == last, branch=branches.get(index), numbers=numbers)
    return Group(*parts, *ending_parts(record, sheet))


def turn_parts(
    turn: Mapping[str, Any],
    *,
    last: bool = False,
    branch: Mapping[str, Any] | None = None,
    numbers: Mapping[int, int] = types.MappingProxyType({}),
) -> list[RenderableType]:
    """The texts of a turn of a record, and their consequences.

    Args:
      last: an answer in it is the episode's, which `ending_parts` shows.
      branch: the fork in it.
      numbers: of the pictures on the sheet, by the `id` of their dict.
    """
    parts: list[RenderableType] = []
    # the action is optional for agents
    action: dict[str, Any] = turn["action"] or {"kind": "written", "thought": ""}
    if action["kind"] == "written":
        text = turn["text"].strip() or "(nothing)"
        parts.append(Text.assemble(("writes    ", "cyan"), (turn["forced"], "dim"), text))
    if action["thought"]:
        parts.append(Text.assemble(("thinks    ", "dim"), (action["thought"], "italic cyan")))
    if action["kind"] == "search" and action["query"]:
        parts.append(searching(action["tool"], action["query"]))
    if branch:
        odds = f"a fork: {branch['tool']} was chosen for the policy, which gives it {math.exp(branch['logprob']):.2f}"
        parts.append(Text.assemble(("  branch  ", "bold magenta"), (odds, "magenta")))
    if action["kind"] == "invalid":
        parts.append(Text.assemble(("invalid   ", "bold red"), action["error"], ("  " + turn["text"].strip(), "dim")))
    elif action["kind"] == "answer" and not last:  # the answer to a sub-question
        parts.append(Text.assemble(("finds     ", "yellow"), action["answer"]))
    elif action["kind"] == "region":
        parts.append(Text.assemble(("looks at  ", "bold yellow"), _box(action["box"])))
    elif action["kind"] == "refusal":
        parts.append(Text.assemble(("refuses   ", "bold yellow"), turn["text"].strip()))
    if action["kind"] != "invalid" and action.get("error"):
        parts.append(Text.assemble(("  though  ", "bold red"), action["error"]))
    pictured = {item["passage"] for item in turn.get("shown", ())}
    for call in turn["calls"]:
        if call.get("facts"):
            parts.append(Text.assemble(("  from    ", "dim"), ("; ".join(call["facts"]), "dim")))
        if call.get("nodes"):
            parts.append(Text.assemble(("  through ", "dim"), ("; ".join(call["nodes"]), "dim")))
        parts.append(findings(call, pictured))
    parts += [
        _shown_picture(item, numbers.get(id(item))) for item in turn.get("shown", ()) if item["digest"] or item["error"]
    ]
    if info := turn.get("info"):
        measured = "   ".join(
            f"{name} {value if isinstance(value, str) else f'{value:.4g}'}" for name, value in info.items()
        )
        parts.append(Text.assemble(("  measures ", "dim"), (measured, "dim")))
    if turn.get("rewards"):
        parts.append(Text.assemble(("  earns   ", "dim"), (_terms(turn["rewards"]), "dim")))
    return parts


def searching(tool: str, query: str) -> Text:
    """A search: of which knowledge base, for what."""
    return Text.assemble(("searches  ", "bold yellow"), (f"[{tool}] ", "yellow"), query)


def ending_parts(record: Mapping[str, Any], sheet: str | pathlib.Path | None = None) -> list[RenderableType]:
    """The answer of a record, with its judgement. `sheet` as in `render`."""
    parts: list[RenderableType] = []
    answer = record["prediction"]
    golds = record.get("golden_answers") or []
    correct = " / ".join(golds)
    parts.append(Text.assemble(("answers   ", "bold green"), (answer if answer is not None else "(no answer)", "bold")))
    if failure := record.get("failure"):
        parts.append(Text.assemble(("no reply  ", "bold red"), failure["kind"], (f"  {failure['message']}", "dim")))
    if correct:
        parts.append(Text.assemble(("gold      ", "dim"), (correct, "dim")))
    if verdict := record.get("verdict"):
        reason = " ".join(verdict["said"].split())
        parts.append(Text.assemble(("judge     ", "dim"), verdict["kind"], (f"  {reason}" if reason else "", "dim")))
    if usage := record.get("usage"):
        money = f", {usage['cost']:.5f} of money" if usage["cost"] else ""
        usage_text = (
            f"{usage['replies']} repl{'y' if usage['replies'] == 1 else 'ies'}, "
            f"{counted(usage['prompt_tokens'], 'token')} read, {usage['tokens']:,} written{money}"
        )
        parts.append(Text.assemble(("took      ", "dim"), (usage_text, "dim")))
    if record.get("rewards"):
        parts.append(Text.assemble(("rewards   ", "dim"), (_terms(record["rewards"]), "dim")))
    if sheet is not None:
        parts.append(Text.assemble(("drawn     ", "dim"), (str(sheet), "magenta")))
    return parts


def _terms(rewards: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:+.2f}" for name, value in rewards.items())


def _shown_picture(shown: dict[str, Any], number: int | None) -> RenderableType:
    """A picture that the policy was shown, with its number on the sheet, or why it could not be shown."""
    source = f" of {shown['passage']}" if shown["passage"] else ""
    if shown["error"]:
        return Text.assemble(("  unseen  ", "bold red"), f"a picture{source}: {shown['error']}")
    cut = f", the part {_box(shown['box'])} of it" if shown["box"] else ""
    on_sheet = "" if number is None else f"  [{number}]"
    return Text.assemble(("  sees    ", "magenta"), f"{shown['image'] or 'a picture'}{source}{cut}{on_sheet}")


def _box(box: Sequence[float]) -> str:
    return "(" + ", ".join(f"{side:g}" for side in box) + ")"


def findings(call: Mapping[str, Any], pictured: Collection[str] = ()) -> RenderableType:
    """The passages of a call, in a frame, or the reason of its failure.

    Args:
      pictured: ids of the passages whose pictures were shown. If the call has some of them, its others are only counted.
    """
    if call["error"] is not None:
        return Text.assemble(("  failed  ", "bold red"), call["error"])
    lines, passages = Text(), call["passages"]
    listed = [passage for passage in passages if passage["id"] in pictured] or passages
    for i, passage in enumerate(listed):
        lines.append(f"{passage['score']:.2f} ", "dim")
        if passage["title"] and passage["title"] not in passage["text"]:
            lines.append(f"{passage['title']}: ", "bold")
        if image := passage.get("image"):
            lines.append(f"(picture {passage['id'] if image.startswith('data:') else image}) ", "magenta")
        lines.append(passage["text"].strip() + ("\n" if i + 1 < len(listed) else ""))
    if len(listed) < len(passages):
        lines.append(f"\n{len(passages) - len(listed)} more found, not shown to the policy", "dim")
    return Panel(lines or Text("nothing found", "dim"), title=call["tool"], title_align="left", border_style="blue")
