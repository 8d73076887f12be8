"""Programs in the documentation run as they stand there: the library's example, and the agent loop in transformers."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.programs import ROOT


def test_the_example_answers() -> None:
    """A line per attempt: its answer, and which knowledge bases it asked. Other CPUs round otherwise and may sample others."""
    ((code, shown),) = re.findall(
        r"```python\n(.*?)```\n\n```text\n(.*?)```", (ROOT / "docs/quickstart.md").read_text("utf-8"), re.S
    )
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    line = re.compile(r"(.+) \[('(text|table|elements)'(, '(text|table|elements)')?)?\]")
    for lines in (done.stdout.splitlines(), shown.splitlines()):
        assert len(lines) == 4
        assert all(line.fullmatch(text) for text in lines), lines
        assert "Accra ['table']" in lines


@pytest.mark.slow
def test_the_loop_in_transformers_writes_what_the_run_s_agent_wrote(small_run: pathlib.Path) -> None:
    """To the letter, for two held-out questions with their searches."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/runs.md").read_text("utf-8"), re.S)
    bases = [f"{kb}={small_run}/kb-{kb}" for kb in ("text", "table", "elements")]
    for line in (small_run / "whole/evaluation/trained.jsonl").read_text().splitlines()[:2]:
        record = json.loads(line)
        assert record["turns"][0]["observation"]
        expected = [text for turn in record["turns"] for text in (turn["text"], turn["observation"]) if text]
        command = [sys.executable, "-c", code, str(small_run / "whole/policy"), record["prompt"], *bases]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "\n".join(expected) + "\n"
