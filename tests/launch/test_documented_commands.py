"""Every command of the documentation and of the programs' own help is one that the program takes."""

import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence

import pytest

from tests.programs import read_by

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
    read_by(program, words, monkeypatch)
