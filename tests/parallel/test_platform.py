"""Process settings, each in a Python of its own."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.programs import ROOT


def python(*arguments: str, unset: tuple[str, ...] = (), **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(ROOT), **settings}
    outcome = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return outcome.stdout


# Prints a line at every start and one when it gets past tune_process.
PROGRAM = """
import json, os, sys
print(json.dumps(["start", os.getpid(), sys.argv[1:], os.environ.get("GLIBC_TUNABLES")]), flush=True)
from routerl_jax.parallel.platform import tune_process
tune_process()
assert "jax" not in sys.modules
print(json.dumps(["on", os.getpid(), sys.flags.optimize, os.environ.get("GLIBC_TUNABLES")]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's setting")
def test_tune_process_restarts_once(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    for start in ([str(file)], ["-c", PROGRAM]):  # the interpreter's own options survive too
        output = python("-O", *start, "an argument", "--flag=1", unset=("GLIBC_TUNABLES",))
        first, second, last = map(json.loads, output.splitlines())
        arguments = ["an argument", "--flag=1"]
        assert first[2:] == [arguments, None]
        assert second[2:] == [arguments, "glibc.malloc.hugetlb=1"]
        assert last[2:] == [1, "glibc.malloc.hugetlb=1"]
        assert first[1] == second[1] == last[1]  # replaced, not left waiting behind a child


@pytest.mark.parametrize("value", ["", "glibc.malloc.arena_max=2"])
def test_tune_process_leaves_a_choice_alone(value: str) -> None:
    output = python("-c", PROGRAM, GLIBC_TUNABLES=value)
    assert [line[0] for line in map(json.loads, output.splitlines())] == ["start", "on"]
    assert json.loads(output.splitlines()[1])[3] == value


TPU = """
import os, pathlib, sys
given = os.environ.get("JAX_PLATFORMS")
from routerl_jax.parallel import platform  # looks at this machine's own devices
os.environ.pop("JAX_PLATFORMS", None)
os.environ.update({"JAX_PLATFORMS": given} if given else {})
platform._PCI = pathlib.Path(sys.argv[1])
platform.skip_absent_tpu()
assert "jax" not in sys.modules
print(os.environ.get("JAX_PLATFORMS"))
"""


@pytest.mark.parametrize(
    ("installed", "vendor", "environment", "expected"),
    [
        (("libtpu",), "0x8086", {}, "cpu"),
        (("libtpu",), "0x1ae0", {}, "None"),  # a TPU (or another device of its maker): JAX looks for itself
        (("libtpu", "jax_plugins"), "0x8086", {}, "None"),  # those of GPUs
        (("libtpu",), "0x8086", {"JAX_PLATFORMS": "tpu,cpu"}, "tpu,cpu"),
        (("libtpu",), "0x8086", {"JAX_FORCE_TPU_INIT": "1"}, "None"),
    ],
)
def test_an_absent_tpu_is_not_looked_for(
    installed: tuple[str, ...], vendor: str, environment: dict[str, str], expected: str, tmp_path: pathlib.Path
) -> None:
    for package in installed:
        (tmp_path / "site" / package).mkdir(parents=True)
    device = tmp_path / "pci" / "0000:00:04.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    unset = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH")
    path = f"{ROOT}{os.pathsep}{tmp_path / 'site'}"
    output = python("-c", TPU, str(tmp_path / "pci"), unset=unset, **{"PYTHONPATH": path, **environment})
    assert output.strip() == expected


def test_libraries_that_import_jax_are_quiet_where_there_is_no_tpu() -> None:
    """bm25s calls JAX when it is imported, and the TPU compiler's wheel would print errors."""
    pytest.importorskip("libtpu", reason="needs the TPU compiler (the extra compile_check)")
    pytest.importorskip("bm25s", reason="needs the extra bm25")
    program = "import routerl_jax, bm25s, jax; print(jax.default_backend())"
    given = ("JAX_", "TPU_")  # by this process's own settings, or by JAX, which sets some when it is imported
    env = {name: value for name, value in os.environ.items() if not name.startswith(given)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("cpu", "")


EXTRA = """
import pathlib, sys
from routerl_jax.parallel import platform
platform._PCI = pathlib.Path(sys.argv[1])
assert "jax" not in sys.modules
print(platform.extra_for_devices() or "none")
"""


@pytest.mark.parametrize(
    ("vendor", "driver", "expected"),
    [("0x8086", False, "none"), ("0x1ae0", False, "tpu"), ("0x10de", True, "cuda12"), ("0x10de", False, "none")],
)
def test_the_extra_that_a_machine_takes(vendor: str, driver: bool, expected: str, tmp_path: pathlib.Path) -> None:
    device, programs = tmp_path / "pci" / "0000:00:04.0", tmp_path / "bin"
    device.mkdir(parents=True)
    programs.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    if driver:
        (programs / "nvidia-smi").write_text("#!/bin/sh\n")
        (programs / "nvidia-smi").chmod(0o755)
    assert python("-c", EXTRA, str(tmp_path / "pci"), PATH=str(programs)).strip() == expected


COUNT = "from routerl_jax.parallel.platform import split_cpu; split_cpu({}); import jax; print(jax.device_count())"


@pytest.mark.parametrize(
    ("asked", "environment", "devices"), [(3, {}, 3), (0, {}, 1), (1, {}, 1), (3, {"JAX_NUM_CPU_DEVICES": "2"}, 2)]
)
def test_split_cpu(asked: int, environment: dict[str, str], devices: int) -> None:
    output = python("-c", COUNT.format(asked), unset=("JAX_NUM_CPU_DEVICES",), JAX_PLATFORMS="cpu", **environment)
    assert int(output) == devices


KEEP = """
from routerl_jax.parallel.platform import keep_compilations
keep_compilations()
import os, sys
assert "jax" not in sys.modules
import jax
slow = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda i, y: jax.numpy.linalg.svd(y)[0] @ jax.numpy.sort(y), x))
slow(jax.numpy.ones((8, 8))).block_until_ready()
print(os.environ["JAX_COMPILATION_CACHE_DIR"])
"""


@pytest.mark.slow
def test_what_is_compiled_is_kept_for_the_next_program(tmp_path: pathlib.Path) -> None:
    unset = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
    settings = {
        "ROUTERL_CACHE": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    place = pathlib.Path(python("-c", KEEP, unset=unset, **settings).strip())
    assert place.parent == tmp_path / "xla"
    kept = {file.name: file.stat().st_mtime_ns for file in place.glob("*-cache")}
    assert kept
    again = pathlib.Path(python("-c", KEEP, unset=unset, **settings).strip())
    assert again == place
    assert {file.name: file.stat().st_mtime_ns for file in place.glob("*-cache")} == kept  # read, not written anew


@pytest.mark.parametrize("value", ["", "elsewhere"])
def test_a_choice_of_where_compilations_are_kept_is_left_alone(value: str, tmp_path: pathlib.Path) -> None:
    place = str(tmp_path / value) if value else ""
    program = (
        "from routerl_jax.parallel import platform as p; p.keep_compilations(); import os; print(os.environ['{}'])"
    )
    output = python("-c", program.format("JAX_COMPILATION_CACHE_DIR"), JAX_COMPILATION_CACHE_DIR=place)
    assert output == f"{place}\n"
