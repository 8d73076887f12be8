"""The directories of runs that the viewer shows, and the files of episode records in them."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from routerl_jax.core.files import parse_json

_STEP = re.compile(r"step-(\d+)")
_SILENCE = 150.0  # seconds without a sign of life (parallel.workdir beats every ten)
_FOLDERS = ("episodes", "evaluation", "benchmarks")  # where records are
TRAINING = "training"  # the source of records of training steps


@dataclasses.dataclass(frozen=True)
class Run:
    """A directory of launch.train or launch.evaluate.

    Attributes:
      name: the run's name on the page.
      normalizer: how answers are normalised before they are compared.
    """

    name: str
    path: pathlib.Path
    normalizer: str

    def config(self) -> dict[str, Any]:
        """Its resolved configuration; {} where there is none (yet)."""
        return _object(self.path / "config.json")

    def record_files(self) -> Iterator[tuple[pathlib.Path, str]]:
        """Its files of episode records, each with its source: "training", or which agent's evaluation it is."""
        for folder in _FOLDERS:
            for path in sorted((self.path / folder).rglob("*.jsonl")):
                yield path, source_of(path.relative_to(self.path))
        if _holds_evaluation(self.path):
            for path in sorted(self.path.glob("*.jsonl")):
                yield path, path.stem

    def state(self) -> dict[str, Any]:
        """Whether it is "running", "finished" or "stopped", and the seconds since it last wrote metrics (None: never)."""
        alive = (beat := _age(self.path / ".lock")) is not None and beat < _SILENCE
        finished = (self.path / "results.json").is_file()
        state = "running" if alive else "finished" if finished else "stopped"
        return {"state": state, "silent": _age(self.path / "metrics.jsonl")}


def _holds_evaluation(path: pathlib.Path) -> bool:
    """Whether it is the output of `launch.evaluate` for one policy, with records directly in it."""
    return (path / "results.json").is_file() and (path / "report.md").is_file() and not (path / "episodes").exists()


def source_of(relative: pathlib.Path) -> str:
    """`episodes/step-000007.jsonl` is of "training", `evaluation/trained.jsonl` of "evaluation/trained"."""
    if relative.parts[0] == "episodes":
        return TRAINING if _STEP.fullmatch(relative.stem) else "/".join(relative.with_suffix("").parts[1:])
    return "/".join(relative.with_suffix("").parts)


def find_runs(directories: Sequence[str | pathlib.Path]) -> list[Run]:
    """The runs in these directories, each followed by its controls; names are as short as they can be and still differ.

    Raises:
      ValueError: a directory does not exist or holds nothing of a run, or is named twice.
    """
    paths = [pathlib.Path(directory).expanduser() for directory in directories]
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path} is no directory; give the --workdir of a run or the --output of an evaluation")
        if not any((path / part).exists() for part in ("config.json", "metrics.jsonl", *_FOLDERS)) and not (
            _holds_evaluation(path)
        ):
            raise ValueError(f"{path} holds no run: there is no metrics.jsonl, episodes/ or evaluation/ in it")
    resolved = [path.resolve() for path in paths]
    twice = next((path for path, whole in zip(paths, resolved) if resolved.count(whole) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is named twice")
    runs = [Run(name, path, normalizer_of(path)) for name, path in zip(_names(resolved), resolved)]
    return [one for run in runs for one in (run, *controls_of(run))]


def controls_of(run: Run) -> list[Run]:
    """The controls of a run (`config.controls`) that there are so far."""
    controls = sorted(path for path in (run.path / "controls").glob("*") if path.is_dir())
    return [Run(f"{run.name}/{path.name}", path, normalizer_of(path)) for path in controls]


def normalizer_of(path: pathlib.Path) -> str:
    """How the answers of a directory are compared: as launch.evaluate says that wrote it, else as the run in whose directory it
    lies, else "search_r1"."""
    if normalizer_name := _object(path / "results.json").get("normalizer"):
        return normalizer_name
    for directory in (path, *path.resolve().parents):
        if (directory / "config.json").is_file():
            return _object(directory / "config.json").get("evaluation", {}).get("normalizer") or "search_r1"
    return "search_r1"


def _names(paths: Sequence[pathlib.Path]) -> list[str]:
    """The last part of each path; as many more as it takes to tell all apart."""
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return ["/".join(path.parts[-parts:]) for path in paths]


def _age(path: pathlib.Path) -> float | None:
    try:
        return max(time.time() - path.stat().st_mtime, 0.0)
    except OSError:
        return None


def _object(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object of a file that another process may be writing; {} where it can't be read."""
    try:
        value = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
