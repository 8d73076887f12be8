"""What all launch programs share."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["train", "--config=configs/quickstart.py", "--workdir=gs://bucket/run"], "--workdir=gs://bucket/run"),
        (["evaluate", "--workdir=gs://bucket/run"], "--workdir=gs://bucket/run"),
        (["export_hf", "--workdir=runs/x", "--output=gs://bucket/export"], "--output=gs://bucket/export"),
        (["build_kb", "--config=configs/build_kb.py", "--workdir=s3://bucket/kb"], "--workdir=s3://bucket/kb"),
        (
            [
                "train",
                "--config=configs/quickstart.py",
                "--workdir=runs/x",
                "--config.knowledge.text.directory=gs://b/kb",
            ],
            "--config.knowledge.text.directory=gs://b/kb",
        ),
    ],
)
def test_urls_are_refused(arguments: list[str], key: str) -> None:
    """They would become local directories called `gs:`."""
    command = [sys.executable, "-m", f"launch.{arguments[0]}", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"launch.{arguments[0]}: {key}: this must be a path in a file system; mount the bucket"
    )
    assert len(done.stderr.splitlines()) == 1
    assert not list(ROOT.glob("[gs]*:"))


def test_dtypes_of_an_export_are_checked_first() -> None:
    command = [sys.executable, "-m", "launch.export_hf", "--workdir=/nowhere", "--output=/nowhere", "--dtype=int8"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=False)
    assert done.returncode == 1
    assert "flag --dtype=int8: value should be one of <float32|bfloat16|float16>" in done.stderr
