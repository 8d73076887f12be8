"""A web knowledge base as a directory: kb.json with the configuration, so that it is opened like any other."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from routerl_jax.core.config import from_config_dict
from routerl_jax.knowledge.base import KB_BUILDERS, KB_KINDS, Builder
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.store import MANIFEST, Manifest, Store
from routerl_jax.knowledge.web.config import WebConfig
from routerl_jax.knowledge.web.kb import WebKB, web_kb


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebReport:
    """What was written. `str(report)` is a table."""

    name: str
    directory: str
    changes: Mapping[str, Any]

    def __str__(self) -> str:
        changes = ", ".join(f"{key}={value!r}" for key, value in self.changes.items()) or "none"
        return f"knowledge base  {self.name} (web) at {self.directory}\nnot defaults    {changes}"


def build_web(config: WebConfig, directory: str | pathlib.Path, *, progress: bool = True) -> WebReport:
    """Writes a directory that `load_kb` opens as this web knowledge base. It holds no key.

    Raises:
      ValueError: the directory holds something else than a web knowledge base.
    """
    directory = pathlib.Path(directory).expanduser()
    if directory.exists() and any(directory.iterdir()):
        found = Manifest.read(directory)
        if found.kind != "web":
            raise ValueError(f"{directory} holds a knowledge base of kind {found.kind!r}: give another directory")
    directory.mkdir(parents=True, exist_ok=True)
    changes = _changes(WebConfig(), config)
    Manifest(
        kind="web",
        name=config.name,
        count=0,
        corpus="",
        corpus_sha256="",
        config={"kind": "web", **changes},
        settings=changes,
        stored=False,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    ).write(directory)
    return WebReport(name=config.name, directory=str(directory), changes=changes)


def open_web(
    store: Store, *, mesh: Mesh | None = None, index: str | None = None, encoder: str | TextEncoder | None = None
) -> WebKB:
    """Opens what `build_web` wrote; keys are read from their environment variables now.

    Raises:
      ValueError: an unknown key in kb.json, a variable that is not set, or an index or encoder, which the web has none of.
    """
    if index is not None or encoder is not None:
        raise ValueError(f"{store.directory}: a web knowledge base has neither index nor encoder")
    nested: dict[str, Any] = {}
    for key, value in store.manifest.settings.items():
        *sections, last = key.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return web_kb(from_config_dict(WebConfig, nested, path=f"{store.directory / MANIFEST}: settings"))


def _changes(default: Any, config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys of what differs from the defaults."""
    result: dict[str, Any] = {}
    for field in dataclasses.fields(default):
        before, after = getattr(default, field.name), getattr(config, field.name)
        if dataclasses.is_dataclass(before):
            result |= _changes(before, after, f"{prefix}{field.name}.")
        elif before != after:
            result[prefix + field.name] = json.loads(json.dumps(after, default=dict))
    return result


KB_KINDS.register("web")(open_web)
KB_BUILDERS.register("web")(Builder(WebConfig, build_web))
