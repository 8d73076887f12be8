"""Draws the pictures of docs/concepts.md. What is shown of a rollout is a real one, of the packaged warm start.

    python -m benchmarks.concepts --output=docs/images

About 20 seconds on an idle core, and as much again the first time, for Atlas's knowledge bases.
"""

from __future__ import annotations

import argparse
import io
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np

import routerl_jax as rj
from routerl_jax.core.tokenizer import Tokenizer
from routerl_jax.learning.advantages import grpo
from routerl_jax.recipes.r1_router.grammar import R1RouterGrammar
from routerl_jax.rewards.metrics import exact_match
from routerl_jax.training.knowledge import open_knowledge_bases
from routerl_jax.training.sections import KnowledgeConfig

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

INK, PALE, LINE = "#222831", "#f3f4f6", "#9aa3ad"
POLICY, TOOL, LEARN, GOOD, BAD = "#cfe0fc", "#d7f0dd", "#fde3c8", "#3a9d5d", "#c8553d"
_KINDS = {"text": "dense_text", "table": "dense_table", "elements": "dense_text"}
_CHOSEN = 1  # the rollout whose ledger is shown


def rollouts() -> tuple[list[rj.Episode], Tokenizer]:
    """A group of eight, for one question."""
    knowledge = {name: KnowledgeConfig(source=f"atlas/{name}", kind=kind) for name, kind in _KINDS.items()}
    tools = open_knowledge_bases(knowledge, progress=False)
    engine = rj.Engine(rj.load_pretrained("atlas-warm-start"), rows=8, max_length=512)
    agent = rj.SearchAgent(grammar=R1RouterGrammar(tools=tuple(tools)), max_searches=2)
    example = rj.Example(id="1", question="What is the capital of Ghana?", answers=("Accra",))
    return rj.run(agent, [example], engine, tools, samples=8), engine.tokenizer


# --- drawing: one unit is an inch, from the lower left ---


def canvas(width: float, height: float) -> tuple[Any, Any]:
    figure = plt.figure(figsize=(width, height), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    return figure, axis


def box(
    axis: Any, left: float, low: float, width: float, height: float, text: str = "", fill: str = PALE, **style: Any
) -> None:
    axis.add_patch(
        FancyBboxPatch((left, low), width, height, boxstyle="round,pad=0,rounding_size=0.06", fc=fill, ec=LINE, lw=0.8)
    )
    write(axis, left + width / 2, low + height / 2, text, **{"ha": "center", **style})


def write(axis: Any, x: float, y: float, text: str, **style: Any) -> None:
    axis.text(x, y, text, **{"va": "center", "color": INK, "fontsize": 9, "linespacing": 1.35, **style})


def arrow(axis: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": INK, "lw": 1, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 10}
    axis.annotate("", end, start, arrowprops=style)


# --- the pictures ---


def flow() -> Any:
    """A training step from questions to new weights."""
    figure, axis = canvas(9.3, 3.6)
    box(axis, 0.1, 2.3, 1.35, 0.8, "questions\n$\\bf{Example}$")
    box(axis, 2.05, 1.95, 1.75, 1.5, "", PALE)
    write(axis, 2.925, 3.12, "$\\bf{agent}$, 8 rollouts\nof each question", ha="center")
    box(axis, 2.2, 2.05, 1.45, 0.55, "conversation,\nledger of tokens", fontsize=8)
    box(axis, 4.75, 2.8, 1.9, 0.6, "$\\bf{engine}$: the policy\nwrites turns", POLICY)
    box(axis, 4.75, 1.95, 1.9, 0.6, "$\\bf{knowledge\\ bases}$\nand other tools", TOOL)
    box(axis, 7.5, 2.3, 1.6, 0.8, "episodes\n$\\bf{Episode}$")
    box(axis, 7.5, 0.35, 1.6, 0.8, "$\\bf{rewards}$\na number each", LEARN)
    box(axis, 4.75, 0.35, 1.9, 0.8, "$\\bf{advantages}$\ncompare the 8 rollouts\nof a question", LEARN)
    box(axis, 2.05, 0.35, 1.75, 0.8, "$\\bf{loss}$ over sampled\ntokens only", LEARN)
    box(axis, 0.1, 0.35, 1.35, 0.8, "$\\bf{update}$\nnew weights", LEARN)
    arrow(axis, (1.45, 2.7), (2.05, 2.7))
    for y, text in ((3.1, "turn"), (2.25, "search")):
        arrow(axis, (3.8, y), (4.75, y))
        arrow(axis, (4.75, y - 0.1), (3.8, y - 0.1))
        write(axis, 4.275, y + 0.12, text, ha="center", fontsize=8)
    axis.plot([2.925, 2.925, 6.95], [1.95, 1.6, 1.6], color=INK, lw=1)
    axis.plot([6.95, 6.95], [1.6, 2.7], color=INK, lw=1)
    arrow(axis, (6.95, 2.7), (7.5, 2.7))
    write(axis, 4.9, 1.45, "the agent answered, or a budget was spent", ha="center", fontsize=8)
    arrow(axis, (8.3, 2.3), (8.3, 1.15))
    for start, end in ((7.5, 6.65), (4.75, 3.8), (2.05, 1.45)):
        arrow(axis, (start, 0.75), (end, 0.75))
    axis.plot([0.78, 0.78, 9.22, 9.22, 5.7], [0.35, 0.12, 0.12, 3.53, 3.53], color=LINE, lw=1, ls="--")
    axis.plot([5.7, 5.7], [3.53, 3.4], color=LINE, lw=1, ls="--")
    write(axis, 4.6, 0.2, "the engine reads the new weights", ha="center", fontsize=8)
    return figure


def batching() -> Any:
    """How the driver runs many agents at once: decoding and searches take turns."""
    figure, axis = canvas(8.6, 3.3)
    columns = (1.3, 2.75, 4.2, 5.65, 7.1, 8.55)
    names = ("decode\nsegment", "searches", "decode\nsegment", "searches", "decode\nsegment")
    for i, name in enumerate(names):
        fill = TOOL if name == "searches" else POLICY
        axis.axvspan(columns[i], columns[i + 1] - 0.06, 0.02, 0.98, color=fill, alpha=0.35, lw=0)
        write(axis, (columns[i] + columns[i + 1]) / 2, 3.0, name, ha="center", weight="bold")
    rows = (
        ("rollout 1", ("writes a query", "text", "answers", None, None)),
        ("rollout 2", ("writes a query", "table", "writes a query", "text", "answers")),
        ("rollout 3", ("still writes", None, "writes a query", "table", "answers")),
        ("rollout 4", ("writes a query", "text", "writes a query", "text", "answers")),
    )
    for y, (name, steps) in zip((2.45, 1.95, 1.45, 0.95), rows):
        write(axis, 0.1, y, name)
        for x, step in zip(columns, steps):
            if step is not None:
                box(axis, x + 0.1, y - 0.17, 1.19, 0.34, step, TOOL if step in _KINDS else POLICY, fontsize=8)
    for x, text in (
        (columns[1], "one batch to text (2),\none to table (1)"),
        (columns[3], "one batch to text (2),\none to table (1)"),
    ):
        write(axis, x + 0.7, 0.4, text, ha="center", fontsize=8)
    for x, text in ((columns[0], "4 rows of the\nKV cache"), (columns[2], "4 rows"), (columns[4], "3 rows")):
        write(axis, x + 0.7, 0.4, text, ha="center", fontsize=8)
    return figure


def ledger(episode: rj.Episode, tokenizer: Tokenizer) -> Any:
    """The tokens of an episode: who wrote each, its id, and its log-probability if it was sampled."""
    (sequence,) = episode.sequences
    first = int(np.argmax(sequence.loss_mask))
    skipped = range(first + 38, len(sequence) - 14)  # of the observation, which is long
    width, height, per_row = 9.2, 3.9, 13
    figure, axis = canvas(width, height)
    write(axis, 0.16, height - 0.2, "fed: never trained on", fontsize=8, bbox={"fc": PALE, "ec": LINE, "lw": 0.8})
    write(axis, 1.75, height - 0.2, "sampled by the policy: trained on", fontsize=8, bbox={"fc": POLICY, "ec": LINE})
    write(axis, 4.3, height - 0.2, "in each box: text, token id, log-probability when sampled", fontsize=8)
    shown: list[int | None] = [i for i in range(len(sequence)) if i not in skipped]
    shown.insert(skipped.start, None)
    for position, i in enumerate(shown):
        left, low = 0.1 + position % per_row * 0.695, height - 0.95 - position // per_row * 0.56
        if i is None:
            write(axis, left + 0.33, low + 0.24, f"{len(skipped)} more", ha="center", fontsize=7)
            continue
        sampled = bool(sequence.loss_mask[i])
        text = tokenizer.decode([int(sequence.tokens[i])]).replace("\n", "\\n").replace("sub-question", "sub-q.")
        lines = [text.replace("information", "inform."), str(sequence.tokens[i])]
        chance = float(sequence.logprobs[i])
        if sampled:
            lines.append(f"{min(chance, -0.0):.2f}".replace("-0.00", "0.00"))
        surprising = sampled and chance < -0.5
        fill = LEARN if surprising else POLICY if sampled else PALE
        axis.add_patch(Rectangle((left, low), 0.665, 0.5, fc=fill, ec=LINE, lw=0.8, clip_on=False))
        for line, (y, size) in zip(lines, ((0.37, 7.5), (0.22, 6.5), (0.09, 6.5))):
            write(axis, left + 0.333, low + y, line.replace("$", "\\$"), ha="center", fontsize=size)
    return figure


def group(episodes: Sequence[rj.Episode]) -> Any:
    """The rollouts of one question: where they searched, rewards, advantages, and what the loss does with their tokens."""
    rewards = np.asarray([exact_match(episode.answer, episode.example.answers) for episode in episodes])
    advantages = grpo(rewards, np.zeros(len(rewards), int))
    figure, axis = canvas(9.2, 3.75)
    heads = ((0.1, "rollout"), (1.0, "searches"), (3.0, "answer"), (4.2, "reward (EM)"), (5.5, "advantage (GRPO)"))
    for x, text in (*heads, (7.55, "in the loss")):
        write(axis, x, 3.52, text, weight="bold")
    for i, episode in enumerate(episodes):
        y = 3.15 - 0.42 * i
        write(axis, 0.1, y, f"{i + 1}")
        for k, call in enumerate(episode.calls):
            box(axis, 1.0 + 0.95 * k, y - 0.15, 0.85, 0.3, call.tool, TOOL, fontsize=8)
        write(axis, 3.0, y, episode.answer or "none")
        write(axis, 4.55, y, f"{rewards[i]:.0f}")
        axis.barh(y, advantages[i] * 0.3, 0.22, 6.05, color=GOOD if advantages[i] > 0 else BAD)
        write(axis, 5.5, y, f"{advantages[i]:+.2f}", fontsize=8)
        tokens = sum(int(sequence.loss_mask.sum()) for sequence in episode.sequences)
        write(axis, 7.55, y, f"{tokens} tokens {'more' if advantages[i] > 0 else 'less'} likely", fontsize=8)
    axis.plot([6.05, 6.05], [0.0, 3.35], color=LINE, lw=0.8)
    return figure


def knowledge() -> Any:
    """From a corpus to passages in a conversation."""
    figure, axis = canvas(9.2, 2.75)
    box(axis, 0.1, 1.75, 1.5, 0.8, "$\\bf{sources}$\ntexts, tables, PDFs,\npictures, a dump", fontsize=8)
    box(axis, 2.35, 1.75, 1.75, 0.8, "$\\bf{launch.build\\_kb}$\nonce: split, encode,\nindex", TOOL, fontsize=8)
    box(axis, 4.85, 1.75, 1.75, 0.8, "$\\bf{directory}$\npassages, vectors,\nkb.json", TOOL, fontsize=8)
    box(axis, 7.35, 1.75, 1.75, 0.8, "$\\bf{search(queries, k)}$\npassages per query,\nbest first", TOOL, fontsize=8)
    box(axis, 4.85, 0.2, 1.75, 0.8, "$\\bf{launch.serve\\_kb}$\nHTTP and MCP,\nother machines", TOOL, fontsize=8)
    box(
        axis, 7.35, 0.2, 1.75, 0.8, "$\\bf{call.passages}$\nor call.error, shown\nas an observation", POLICY, fontsize=8
    )
    box(axis, 0.1, 0.2, 1.5, 0.8, "$\\bf{the\\ web}$,\nan MCP server's tool,\na class of yours", fontsize=8)
    for start, end in ((1.6, 2.35), (4.1, 4.85), (6.6, 7.35)):
        arrow(axis, (start, 2.15), (end, 2.15))
    arrow(axis, (5.725, 1.75), (5.725, 1.0))
    arrow(axis, (8.225, 1.75), (8.225, 1.0))
    axis.plot([6.6, 6.85, 6.85, 7.1], [0.6, 0.6, 1.97, 1.97], color=INK, lw=1)
    axis.plot([1.6, 1.9, 1.9, 7.1, 7.1], [0.6, 0.6, 0.08, 0.08, 1.85], color=INK, lw=1)
    arrow(axis, (7.0, 1.97), (7.35, 1.97))
    arrow(axis, (7.1, 1.85), (7.35, 1.85))
    write(axis, 3.2, 0.22, "need no build", ha="center", fontsize=8)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("docs/images"))
    output = parser.parse_args(arguments).output
    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "routerl_jax", "font.family": "DejaVu Sans"})
    episodes, tokenizer = rollouts()
    pictures = {
        "flow": flow(),
        "batching": batching(),
        "ledger": ledger(episodes[_CHOSEN], tokenizer),
        "group": group(episodes),
        "knowledge": knowledge(),
    }
    for name, figure in pictures.items():
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata={"Date": None})
        plt.close(figure)
        (output / f"concepts_{name}.svg").write_text(re.sub(r"\n\s+", "\n", written.getvalue()))  # without indentation


if __name__ == "__main__":
    main()
