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

from routerl_jax.core.cache_directory import cache_directory

_TUNABLE = "glibc.malloc.hugetlb=1"
# devices and their vendor, where JAX, too, looks for TPUs
_PCI, _GOOGLE = pathlib.Path("/sys/bus/pci/devices"), "0x1ae0"
_CPU = pathlib.Path("/proc/cpuinfo")
_MAX_COMPILATIONS = 4 * 2**30  # bytes; the programs that were not used for longest go


def tune_process() -> None:
    """Restarts this Python once with transparent huge pages for malloc.

    XLA on the CPU allocates its temporaries afresh at every call; with 4 KiB pages a small model's training step spends
    half its time in page faults (measured: 15k -> 28k tokens/s). glibc reads the setting only at process start. Does
    nothing elsewhere, or if GLIBC_TUNABLES is set already (set it empty to opt out).
    """
    if not sys.platform.startswith("linux") or "GLIBC_TUNABLES" in os.environ:
        return
    os.environ["GLIBC_TUNABLES"] = _TUNABLE
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def skip_absent_tpu() -> None:
    """Keeps JAX from looking for a TPU where libtpu is installed, for `launch.compile_check` say, and none is attached.

    Each start would print libtpu's errors otherwise. JAX_PLATFORMS is set, to the CPU, only where nothing else could be
    meant: it is not set yet, no chip is on the PCI bus, no plug-in for other devices is installed. Call it before JAX is
    imported.
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
    """Makes JAX keep what it compiles in `xla/` of `cache_directory`, where the next run, a control or a resumed run finds it.

    Programs that compile in under a fifth of a second are not kept. Programs for a CPU are made for its kind, so that each
    kind has a directory: the cache may be on a disk that several machines share. Does nothing if JAX_COMPILATION_CACHE_DIR is
    set (set it empty to keep nothing). Call it before JAX is imported.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(cache_directory() / "xla" / _kind_of_cpu())
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(_MAX_COMPILATIONS))


def _kind_of_cpu() -> str:
    """A digest of what the CPU is called and can do."""
    told = [platform.machine(), platform.processor()]
    if _CPU.exists():
        lines = _CPU.read_text().splitlines()
        told += sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:12]


def split_cpu(devices: int) -> None:
    """Makes the CPU look like `devices` devices, if JAX runs on the CPU and nobody has asked for a number yet."""
    import jax

    if devices > 1 and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", devices)
