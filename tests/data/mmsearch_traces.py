"""The traces of a public run of MMSearch-R1-7B on FVQA (stayreal233/MMSearch-R1-Reproduction), as recorded rounds."""

from __future__ import annotations

import gzip
import json
import pathlib
from typing import Any

FILE = "fvqa50/traces_dev.jsonl.gz"  # of the `shared_data` fixture


def traces(path: pathlib.Path) -> list[dict[str, Any]]:
    """The rows as they are."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def recorded_row(trace: dict[str, Any], folder: pathlib.Path) -> dict[str, Any]:
    """One trace as a row of routerl_jax.data.rounds; its picture lies in `folder`.

    The run ended at the first search that failed, so that nothing was fed back: the last round has an error and no observation.
    """
    failures = {failure["round"]: failure["error"] for failure in trace["final"]["hard_failures"]}
    return {
        "id": trace["id"],
        "question": trace["question"],
        "golden_answers": trace["golden_answers"],
        "images": [str(folder / trace["image"])],
        "category": trace["category"],
        "rounds": [
            {
                "text": item["response"],
                "tool": "" if item["action"] == "answer" else item["action"],
                "observation": "" if item["round"] in failures else _observation(item),
                "error": failures.get(item["round"]),
            }
            for item in trace["rounds"]
        ],
    }


def _observation(item: dict[str, Any]) -> str:
    """Results as the released code lists them, thumbnails by their addresses."""
    if item["action"] == "image_search":
        found = enumerate(item["image_search_results"], 1)
        return "\n".join(f"{rank}. image: {row['thumbnail_url']}\ntitle: {row['title']}" for rank, row in found)
    pages = enumerate(item.get("summaries", ()), 1)
    return "\n".join(f"{rank}. ({page['url']}) {page['summary']}" for rank, page in pages)


def write_recorded(path: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
    """All traces of `path` as a file of recorded rounds."""
    to.write_text("".join(json.dumps(recorded_row(trace, path.parent)) + "\n" for trace in traces(path)))
    return to
