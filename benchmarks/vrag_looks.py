"""Draws what VRAG-RL's agent looks at on Atlas's pages, played by a scripted policy that knows the positions of the answers.

    python -m benchmarks.vrag_looks --output=docs/images

Knowledge base, searches, frames, crops and records are the agent's own. Only the policy's texts are scripted. Two
minutes on two busy cores, half of them for drawing the pages, the first time.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from PIL import Image

from routerl_jax.agents.driver import run
from routerl_jax.core.types import Example
from routerl_jax.data.atlas.pages import SIZE, page_questions
from routerl_jax.evaluation.records import read_records, write_records
from routerl_jax.evaluation.trajectory import sheet
from routerl_jax.models.image_tokens import ImageTokens
from routerl_jax.models.images import ImageProcessor
from routerl_jax.models.regions import Pixels, RegionRule, View, region
from routerl_jax.recipes.vrag_rl.agents import VRAGAgent
from routerl_jax.training.knowledge import open_knowledge_bases
from routerl_jax.training.sections import KnowledgeConfig
from tests import seeing
from tests.agents.scripted import SeeingScript

_RULE = RegionRule(least=3)  # plates are 12 x 3 pixels of the frame
_AGENT = VRAGAgent(tool="pages", max_turns=5, max_turn_tokens=200, answer_tokens=40, regions=_RULE)
_MAX_PIXELS = 150 * 112  # a page is seen at 140 x 112
_CALLED = {"fine": "vrag_nested.png", "two_page": "vrag_two_pages.png"}


class Looking(SeeingScript):
    """A scripted policy that sees pages at 140 x 112."""

    def __init__(self, examples: Sequence[Example]) -> None:
        super().__init__(self._write, max_length=2000)
        self.images = ImageTokens(seeing.config(2000), ImageProcessor(min_pixels=28 * 28, max_pixels=_MAX_PIXELS))
        self._turns = {example.id: self._planned(example) for example in examples}

    def _write(self, name: str, _sample: int, turn: int) -> str:
        return self._turns[name][turn]

    def _planned(self, example: Example) -> list[str]:
        """For each gold page a search, and a look at the answer. If there is one page, a look at that quarter comes first."""
        titles, boxes = example.metadata["supporting_titles"], example.metadata["boxes"].values()
        turns: list[str] = []
        for title, box in zip(titles, boxes):
            whole = View(page=SIZE, part=(0, 0, *SIZE), frame=self._frame((0, 0, *SIZE)))
            turns.append(f"<think>which page?</think><search>{title}</search>")
            if len(titles) == 1:
                quarter = [side // 4 * round(at * 4 / side - 0.5) for side, at in zip(SIZE, _middle(box))]
                near = [*quarter, *(start + side // 2 for start, side in zip(quarter, SIZE))]
                part = region(_written(near, whole), whole, _RULE)
                turns.append(_look(near, whole))
                whole = View(page=SIZE, part=part, frame=self._frame(part))
            turns.append(_look([box[0] - 9, box[1] - 9, box[2] + 9, box[3] + 9], whole))
        return [*turns, f"<think>so</think><answer>{example.answers[0]}</answer>"]

    def _frame(self, part: Pixels) -> tuple[int, int]:
        return self.images.frame(Image.new("RGB", (part[2] - part[0], part[3] - part[1])))


def _middle(box: Sequence[float]) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def _written(box: Sequence[float], view: View) -> list[float]:
    """A box of the raw page in the frame of a view, as a policy would write it."""
    sides = [(view.part[axis], view.part[axis + 2] - view.part[axis], view.frame[axis]) for axis in (0, 1)]
    corners = [
        min(max((value - sides[i % 2][0]) / sides[i % 2][1], 0), 1) * sides[i % 2][2] for i, value in enumerate(box)
    ]
    return [round(corner, 1) for corner in corners]


def _look(box: Sequence[float], view: View) -> str:
    return f"<think>too small</think><bbox>{_written(box, view)}</bbox>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="docs/images", help="a directory for the pictures")
    output = pathlib.Path(parser.parse_args().output)
    chosen = {question.metadata["type"]: question for question in page_questions("test", 12)}
    examples = [chosen[kind] for kind in _CALLED]
    settings: dict[str, Any] = {"retriever": "bm25", "pages": {"text": "layer"}}
    tools = open_knowledge_bases({"pages": KnowledgeConfig(kind="ocr", source="atlas/pages", settings=settings)})
    policy: Any = Looking(examples)
    with tempfile.TemporaryDirectory() as scratch:
        path = pathlib.Path(scratch) / "episodes.jsonl"
        write_records(path, run(_AGENT, examples, policy, tools))
        for record, name in zip(read_records(path), _CALLED.values()):
            drawn = sheet(record, path.parent)
            drawn.quantize(128).save(output / name, optimize=True)
            print(f"{output / name}: {record['question']} {record['prediction']}")


if __name__ == "__main__":
    main()
