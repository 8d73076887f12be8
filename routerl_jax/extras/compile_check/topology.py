"""TPU slices that are not attached: their devices, by name, to compile for on any machine with the libtpu wheel."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import importlib.util
import os
import re
from typing import Any

from routerl_jax.core.packages import install_hint

# GiB that a program may use on one device of each kind: the available memory that the TPU compiler of libtpu 0.0.52 reports
# when a program does not fit. The chip has more, because the runtime keeps some. In a v4 topology, the two cores of a chip are
# separate devices with half of its memory each.
HBM_GIB = {
    "TPU v4": 15.25,
    "TPU v5 lite": 15.75,  # v5e
    "TPU v5": 95.73,  # v5p
    "TPU v6 lite": 31.24,  # v6e
    "TPU7x": 94.74,
}


def topology_devices(name: str) -> list[Any]:
    """The devices of a TPU slice, such as `v5e:16x16` or `v5p:4x4x4`, for compiling only.

    Set JAX_PLATFORMS=cpu before JAX starts where no TPU is attached.

    Raises:
      ValueError: there is no such slice, or libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(f"compiling for TPUs needs the libtpu wheel: run {install_hint('compile_check')}")
    # Without these, libtpu asks a cloud machine's metadata server for its location, and waits.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # jaxlib raises its own types, by version
        raise ValueError(
            f"--topology={name}: the TPU compiler knows no such slice ({error}); examples: v4:2x2x2, v5e:16x16, v5p:4x4x4, "
            f"v6e:16x16"
        ) from error


def compiler() -> str:
    """Which TPU compiler and JAX this Python has, for reports. Says so if a TPU install of this JAX has another compiler."""
    jax, libtpu = (importlib.metadata.version(package) for package in ("jax", "libtpu"))
    asked = re.search(r"libtpu==([\d.*]+)", " ".join(importlib.metadata.requires("jax") or ()))
    same = asked is None or fnmatch.fnmatch(f"{libtpu}.0", asked[1])
    other = "" if same or asked is None else f", with which a TPU install has libtpu {asked[1]}"
    return f"libtpu {libtpu}, jax {jax}{other}"


def hbm_gib(device: Any) -> float:
    """Memory of a device that programs can use, in GiB. Raises ValueError for a kind that is not in `HBM_GIB`."""
    if device.device_kind not in HBM_GIB:
        raise ValueError(f"memory of {device.device_kind!r} is unknown; known: {', '.join(HBM_GIB)}")
    return HBM_GIB[device.device_kind]
