"""Running programs from tests: in a Python of their own, as users do, or, for messages alone, in this one."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from absl import flags, logging

from launch.command import read_config_dict
from launch.command import start as start_program
from routerl_jax.core.config import from_config_dict, to_config_dict

ROOT = pathlib.Path(__file__).parents[1]


def start(module: str, *arguments: Any, **environment: str) -> subprocess.Popen[str]:
    """Starts `python -m module` in the repository's root; standard error joins standard output."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], status: int = 0, timeout: float = 900) -> str:
    """Waits for a started program, which must end with this exit status (minus the signal's number if killed)."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == status, output[-3000:]
    return output


def two_processes(module: str, *arguments: Any, workdir: pathlib.Path, **environment: str) -> tuple[str, str]:
    """The output of two processes of one `jax.distributed` job, which find each other at a port that was free a moment ago.

    Where another program takes that port first, `workdir` is emptied and they start again.
    """
    for attempt in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{probe.getsockname()[1]}", "JAX_NUM_PROCESSES": "2"}
        pair = [start(module, *arguments, **environment, **job, JAX_PROCESS_ID=str(i)) for i in range(2)]
        try:
            main, _ = pair[0].communicate(timeout=900)
            if attempt < 2 and pair[0].returncode and "Failed to add port" in main:
                shutil.rmtree(workdir, ignore_errors=True)
                continue
            assert pair[0].returncode == 0, main[-3000:]
            return main, finish(pair[1])
        finally:
            for process in pair:
                process.kill()
    raise AssertionError("no port was free")


def launch(program: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Runs `python -m launch.program` to its end, with as many devices as it asks for."""
    command = [sys.executable, "-m", f"launch.{program}", *map(str, arguments)]
    env = {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=900, check=False)


def fine(done: subprocess.CompletedProcess[str]) -> str:
    """The output of a program that must have gone well."""
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def launch_here(program: str, *arguments: Any) -> Any:
    """Runs a launch program in this process, which has no Python and no JAX to start; returns what it exits with."""
    known, verbosity = set(flags.FLAGS), logging.get_verbosity()
    module = importlib.import_module(f"launch.{program}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"launch/{program}.py", *map(str, arguments)])
        patch.chdir(ROOT)
        patch.delitem(
            sys.modules, "config_config", raising=False
        )  # a file of --config: the next is loaded into its module
        try:
            with pytest.raises(SystemExit) as stopped:
                start_program(
                    module.main,
                    module.define_flags,
                    getattr(module, "schemas", None),
                    arguments=program == "ask",
                )
        finally:
            logging.set_verbosity(verbosity)
            for name in set(flags.FLAGS) - known:
                if not _of_a_library(name):
                    delattr(flags.FLAGS, name)
    return stopped.value.code


def read_by(program: str, words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a launch program reads of its --config and the settings after it, None without one. The program does nothing."""
    from routerl_jax.extras.comparison.config import ComparisonConfig
    from routerl_jax.knowledge.builds import KB_BUILDERS
    from routerl_jax.training.config import TrainConfig

    module, read = importlib.import_module(f"launch.{program}"), []

    def main(_: Sequence[str]) -> None:
        if not any(word.startswith("--config") for word in words):
            read.append(None)
            return
        settings = read_config_dict()
        jobs = module.schemas()
        schema = {
            "build_kb": lambda: KB_BUILDERS.get(str(settings.get("kind", "dense_text"))).config,
            "construct_data": lambda: jobs[f"A job: {settings.job}"],
            "evaluate": lambda: ComparisonConfig if "benchmarks" in settings else TrainConfig,
        }.get(program, lambda: next(iter(jobs.values())))()
        read.append(from_config_dict(schema, settings))

    monkeypatch.setattr(module, "main", main)
    assert launch_here(program, *words) in (None, 0)
    return read[0]


def _of_a_library(name: str) -> bool:
    """Whether a flag is of a package that a program imports: only once in a process, so that the flag must stay."""
    module = flags.FLAGS.find_module_defining_flag(name) or ""
    return module.partition(".")[0] not in ("launch", "ml_collections", "absl")


def refusal(program: str, *arguments: Any) -> str:
    """The line with which a program refuses its arguments."""
    message = launch_here(program, *arguments)
    assert isinstance(message, str), f"the program ended with {message!r}, without a complaint"
    assert "\n" not in message
    return message


def write_config(config: Any, path: pathlib.Path) -> pathlib.Path:
    """A file for --config that holds this configuration, of a run or of whatever a program takes."""
    schema, text = type(config), json.dumps(to_config_dict(config).to_dict())
    path.write_text(_CONFIG.format(text=text, module=schema.__module__, schema=schema.__name__))
    # Python takes a file of the same second and size for the one that it compiled.
    pathlib.Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    return path


_CONFIG = """
import json
from routerl_jax.core.config import from_config_dict, to_config_dict
from {module} import {schema}

def get_config():
    return to_config_dict(from_config_dict({schema}, json.loads({text!r})))
"""
