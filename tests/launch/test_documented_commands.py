"""Every command of the documentation and of the programs' own help is one that the program takes."""

import importlib
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence

import pytest

from launch import command
from routerl_jax.comparison.config import ComparisonConfig
from routerl_jax.core.config import from_config_dict
from routerl_jax.knowledge.kinds import KB_BUILDERS
from routerl_jax.training.config import TrainConfig
from tests.programs import launch_here

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "launch").glob("*.py"))]
# what the reader fills in; places that take a server; a file that the page has the reader write
_LEFT_OUT = re.compile(r"=?\.\.+$|gs://|s3://|^--config=(mine|my_router)\.py$")


def documented() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The program and the arguments of each command, once."""
    seen = set()
    for page in PAGES:
        text = re.sub(r"\\\n\s*", " ", page.read_text("utf-8"))
        for program, rest in re.findall(r"^\s*(?:\$ )?python -m launch\.(\w+)((?: [^\n`]*)?)$", text, re.MULTILINE):
            try:
                words = tuple(shlex.split(re.sub(r"[\[\]]", "", rest), comments=True))
            except ValueError:  # a quotation that goes over lines
                continue
            if (program, words) not in seen and not any(_LEFT_OUT.search(word) for word in words):
                seen.add((program, words))
                yield program, words


@pytest.mark.slow
@pytest.mark.parametrize(("program", "words"), documented(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_documented_command_is_taken(program: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its flags exist, its configuration does, and that takes its settings. Nothing is run."""
    module, read = importlib.import_module(f"launch.{program}"), []

    def main(_: Sequence[str]) -> None:
        read.append(True)
        if not any(word.startswith("--config") for word in words):
            return
        settings = command.read_config_dict()
        jobs = module.schemas()
        schema = {
            "build_kb": lambda: KB_BUILDERS.get(str(settings.get("kind", "dense_text"))).config,
            "construct_data": lambda: jobs[f"A job: {settings.job}"],
            "evaluate": lambda: ComparisonConfig if "benchmarks" in settings else TrainConfig,
        }.get(program, lambda: next(iter(jobs.values())))()
        from_config_dict(schema, settings)

    monkeypatch.setattr(module, "main", main)
    assert launch_here(program, *words) in (None, 0)
    assert read
