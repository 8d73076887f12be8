"""The example of the library in docs/quickstart.md runs as it stands there and answers."""

import os
import re
import subprocess
import sys

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
