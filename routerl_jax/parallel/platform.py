"""Process-wide settings that must be made before JAX starts. This file must not import JAX."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import sys

_TUNABLE = "glibc.malloc.hugetlb=1"
# devices and their vendor, where JAX, too, looks for TPUs
_PCI, _GOOGLE = pathlib.Path("/sys/bus/pci/devices"), "0x1ae0"


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
    vendors = (path.read_text().strip() for path in _PCI.glob("*/vendor"))
    if _GOOGLE not in vendors and not importlib.metadata.entry_points(group="jax_plugins"):
        os.environ["JAX_PLATFORMS"] = "cpu"


def split_cpu(devices: int) -> None:
    """Makes the CPU look like `devices` devices, if JAX runs on the CPU and nobody has asked for a number yet."""
    import jax

    if devices > 1 and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", devices)
