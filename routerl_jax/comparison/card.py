"""What numbers depend on, pinned: corpora, indexes, prompts, metrics, decoding, versions."""

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
from routerl_jax.rewards.metrics import ANSWER_METRICS
from routerl_jax.rewards.normalize import NORMALIZERS
from routerl_jax.training.config import KnowledgeConfig
from routerl_jax.training.knowledge import cache_place, kb_place

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "scipy", "tokenizers", "transformers", "scann")


def digest(value: Any) -> str:
    """Sixteen hexadecimal digits of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def questions_digest(examples: Iterable[Example]) -> str:
    """Of questions with their ids and answers, in order."""
    return digest([[one.id, one.question, list(one.answers)] for one in examples])


def prompts_digest(records: Iterable[Mapping[str, Any]]) -> str:
    """Of what the policy was first asked at each question, in order: task, worked examples, documents where there are some."""
    return digest([record["prompt"] for record in records])


def knowledge_settings(name: str, spec: KnowledgeConfig) -> dict[str, str]:
    """How a knowledge base is made and of what, without opening it: equal ones find the same."""
    said = {
        key: getattr(spec, key) for key in ("kind", "encoder", "index", "source", "directory") if getattr(spec, key)
    }
    if spec.directory or spec.source.startswith(("http://", "https://")) or spec.kind in ("tool", "hybrid"):
        return said
    return said | {"built": cache_place(name, spec).name}  # its name is a digest of content and settings


def knowledge_card(name: str, spec: KnowledgeConfig) -> dict[str, Any]:
    """What is known of a knowledge base that has been opened: digest of the corpus, number of passages, encoder, index."""
    said: dict[str, Any] = {"kind": spec.kind, "source": spec.source}
    if spec.source.startswith(("http://", "https://")) or spec.kind in ("tool", "hybrid"):
        return said
    directory = kb_place(name, spec)
    if not (directory / MANIFEST).is_file():
        return said
    manifest = Manifest.read(directory)
    encoder = manifest.embedding and {
        "encoder": _short(manifest.embedding.encoder),
        "encoder digest": manifest.embedding.digest,
    }
    index = {"index": str(manifest.index["backend"])} if "backend" in manifest.index else {}
    updates = {"updates": manifest.updates} if manifest.updates else {}
    corpus = {"corpus sha256": manifest.corpus_sha256, "passages": manifest.count}
    return said | {"kind": manifest.kind} | corpus | (encoder or {}) | index | updates


def metric_definitions(metrics: Sequence[str], normalizer: str) -> dict[str, str]:
    """What metrics are, and how answers are normalised, as their functions say it."""
    said = {name: _first_lines(ANSWER_METRICS[name]) for name in metrics if name in ANSWER_METRICS}
    return said | {f"normalizer {normalizer}": _first_lines(NORMALIZERS.get(normalizer))}


def versions() -> dict[str, str]:
    """Of this package, Python, what it computes with, and the machine."""
    found = {"routerl_jax": routerl_jax.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    devices = jax.devices()
    return found | {"machine": platform.machine(), "devices": f"{len(devices)} x {devices[0].device_kind}"}


def _first_lines(function: Any) -> str:
    """The first paragraph of what a function says of itself."""
    return " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())


def _short(encoder: str) -> str:
    return pathlib.PurePath(encoder).name if "/" in encoder and encoder.startswith("/") else encoder
