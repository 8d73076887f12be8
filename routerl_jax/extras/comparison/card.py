"""Records everything that the numbers depend on: corpora, indexes, prompts, metrics, decoding, versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import pathlib
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

import routerl_jax
from routerl_jax.core.types import Example
from routerl_jax.knowledge.store import MANIFEST, Manifest
from routerl_jax.rewards.metrics import ANSWER_METRICS, NORMALIZERS
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import kb_cache_directory, kb_directory

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "scipy", "tokenizers", "transformers", "scann")


def digest(value: Any) -> str:
    """A digest of a JSON value: sixteen hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def questions_digest(examples: Iterable[Example]) -> str:
    """A digest of questions with their ids and answers, in order."""
    return digest([[example.id, example.question, list(example.answers)] for example in examples])


def prompts_digest(records: Iterable[Mapping[str, Any]]) -> str:
    """A digest of the first prompt of each question, in order: task, worked examples, and documents if there are any."""
    return digest([record["prompt"] for record in records])


def knowledge_settings(name: str, spec: KnowledgeConfig) -> dict[str, str]:
    """How a knowledge base is built, and from what, without opening it. Those with equal settings find the same."""
    settings = {
        key: getattr(spec, key) for key in ("kind", "encoder", "index", "source", "directory") if getattr(spec, key)
    }
    if spec.directory or spec.source.startswith(("http://", "https://")) or spec.kind in ("tool", "hybrid"):
        return settings
    return settings | {
        "built": kb_cache_directory(name, spec).name
    }  # the directory's name is a digest of content and settings


def knowledge_card(name: str, spec: KnowledgeConfig) -> dict[str, Any]:
    """Facts about a knowledge base that has been opened: digest of the corpus, number of passages, encoder, index."""
    facts: dict[str, Any] = {"kind": spec.kind, "source": spec.source}
    if spec.source.startswith(("http://", "https://")) or spec.kind in ("tool", "hybrid"):
        return facts
    directory = kb_directory(name, spec)
    if not (directory / MANIFEST).is_file():
        return facts
    manifest = Manifest.read(directory)
    encoder = manifest.embedding and {
        "encoder": _short(manifest.embedding.encoder),
        "encoder digest": manifest.embedding.digest,
    }
    index = {"index": str(manifest.index["backend"])} if "backend" in manifest.index else {}
    updates = {"updates": manifest.updates} if manifest.updates else {}
    corpus = {"corpus sha256": manifest.corpus_sha256, "passages": manifest.count}
    return facts | {"kind": manifest.kind} | corpus | (encoder or {}) | index | updates


def metric_definitions(metrics: Sequence[str], normalizer: str) -> dict[str, str]:
    """Definitions of the metrics and of the normaliser, from the docstrings of their functions."""
    definitions = {name: _first_lines(ANSWER_METRICS[name]) for name in metrics if name in ANSWER_METRICS}
    return definitions | {f"normalizer {normalizer}": _first_lines(NORMALIZERS.get(normalizer))}


def versions(devices: bool = True) -> dict[str, str]:
    """Versions of this package, Python and the main libraries, and the machine and, if asked for, its devices."""
    entries = {"routerl_jax": routerl_jax.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            entries[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    entries["machine"] = platform.machine()
    if devices:
        entries["devices"] = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    return entries


def _first_lines(function: Any) -> str:
    """The first paragraph of a function's docstring, in one line."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


def _short(encoder: str) -> str:
    return pathlib.PurePath(encoder).name if "/" in encoder and encoder.startswith("/") else encoder
