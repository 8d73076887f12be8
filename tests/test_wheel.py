"""The wheel: what is in it, and that it works in an environment of its own, without the checkout."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from typing import Any

import pytest

from tests.programs import ROOT

PACKAGES = ("routerl_jax", "launch", "configs")
_NOT = shutil.ignore_patterns("__pycache__", "*.pyc")


def run(*command: Any, cwd: pathlib.Path, **environment: str) -> str:
    """The output of a command that must go well, in an environment that does not know the checkout."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "JAX_NUM_CPU_DEVICES")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from a copy, because a build writes into its directory. No network: setuptools is this Python's."""
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=_NOT)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    options = ("--no-deps", "--no-build-isolation", f"--wheel-dir={made}")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", *options, ".", cwd=source)
    (path,) = made.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_what_the_packages_hold(wheel: pathlib.Path) -> None:
    """Every file of the three packages, and the licence; nothing else of the checkout."""
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    kept = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == kept
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


@pytest.mark.slow
def test_it_works_without_the_checkout(wheel: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The quickstart's first steps. The other packages are this Python's, by a path alone, so that its editable install of the
    checkout is not seen."""
    place, here = tmp_path / "venv", tmp_path / "work"
    here.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", place, cwd=here)
    python = place / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=here)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=here).strip()
    (pathlib.Path(site) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    found = run(
        *(
            python,
            "-c",
            "import configs, launch, routerl_jax; print(*configs.__path__, *launch.__path__, *routerl_jax.__path__)",
        ),
        cwd=here,
    )
    assert {str(pathlib.Path(path).parent) for path in found.split()} == {site}
    told = run(python, "-m", "launch.train", "--help", cwd=here)
    assert "--workdir: Directory of the run" in told
    assert "config.rollout.samples" in told
    shown = run(python, "-m", "launch.train", "--config=configs/quickstart.py", "--show", cwd=here)
    assert "* config.learner.advantage = 'batch_std'" in shown
    few = ("steps=2", "evaluation.before=False", "evaluation.baselines=False", "evaluation.final_examples=8")
    smaller = [f"--config.{setting}" for setting in (*few, "evaluation.every=0")]
    command = (python, "-m", "launch.train", "--config=configs/quickstart.py", "--workdir=run")
    run(*command, *smaller, cwd=here)
    assert "trained" in json.loads((here / "run" / "results.json").read_text())["agents"]
    assert "answers" in run(python, "-m", "launch.ask", "--workdir=run", "What is the capital of Ghana?", cwd=here)
