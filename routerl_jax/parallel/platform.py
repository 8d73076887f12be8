"""Process-wide settings that must be made before JAX starts. This file must not import JAX."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import sys

from routerl_jax.core.files import cache_directory

_TUNABLE = "glibc.malloc.hugetlb=1"
# PCI devices and the vendor's id; JAX looks for TPUs in the same place
_PCI, _GOOGLE = pathlib.Path("/sys/bus/pci/devices"), "0x1ae0"
_CPU = pathlib.Path("/proc/cpuinfo")
_MAX_COMPILATIONS = 4 * 2**30  # bytes; the least recently used programs are removed


def tune_process() -> None:
    """Restarts this Python once with transparent huge pages for malloc.

    XLA on the CPU allocates its temporaries anew in every call. With 4 KiB pages, a small model's training step spends half its
    time in page faults (measured: 15k -> 28k tokens/s). glibc reads the setting only when a process starts. Does nothing on
    other systems, or if GLIBC_TUNABLES is already set (set it empty to opt out).
    """
    if not sys.platform.startswith("linux") or "GLIBC_TUNABLES" in os.environ:
        return
    os.environ["GLIBC_TUNABLES"] = _TUNABLE
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def skip_absent_tpu() -> None:
    """Keeps JAX from looking for a TPU if libtpu is installed (as for `launch.compile_check`) but no TPU is attached.

    Otherwise each start would print libtpu's errors. JAX_PLATFORMS is set to the CPU only if nothing else could be meant: it is
    not set yet, no chip is on the PCI bus, and no plug-in for other devices is installed. Call it before JAX is imported.
    """
    if any(name in os.environ for name in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH")):
        return
    if importlib.util.find_spec("libtpu") is None or importlib.util.find_spec("jax_plugins") is not None:
        return
    if not _tpu_attached() and not importlib.metadata.entry_points(group="jax_plugins"):
        os.environ["JAX_PLATFORMS"] = "cpu"


def _tpu_attached() -> bool:
    return any(path.read_text().strip() == _GOOGLE for path in _PCI.glob("*/vendor"))


def extra_for_devices() -> str:
    """The extra of this package that brings JAX for this machine's devices: "tpu", "cuda12", or "" on a CPU.

    For programs that install the package themselves, such as the first cell of a notebook. A GPU counts where its driver's
    `nvidia-smi` is installed.
    """
    if _tpu_attached():
        return "tpu"
    return "cuda12" if shutil.which("nvidia-smi") else ""


def keep_compilations() -> None:
    """Makes JAX keep compiled programs in `xla/` of `cache_directory`, for later runs, controls and resumed runs.

    Programs that compile in less than a fifth of a second are not kept. A program for a CPU is specific to its model, so each
    model has its own directory (machines may share the cache's disk). Does nothing if JAX_COMPILATION_CACHE_DIR is set (set it
    empty to keep nothing). Call it before JAX is imported.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_directory() / "xla" / _kind_of_cpu())
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(_MAX_COMPILATIONS))


def _kind_of_cpu() -> str:
    """A digest of the CPU's name and features."""
    description = [platform.machine(), platform.processor()]
    if _CPU.exists():
        lines = _CPU.read_text().splitlines()
        description += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(description).encode()).hexdigest()[:12]


def split_cpu(devices: int) -> None:
    """Splits the CPU into `devices` virtual devices, if JAX runs on the CPU and their number is not set otherwise."""
    import jax

    if devices > 1 and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", devices)
