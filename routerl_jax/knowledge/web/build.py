"""A web knowledge base as a directory: kb.json has the configuration, so that it can be opened like any other."""

from __future__ import annotations

import dataclasses
import pathlib

from jax.sharding import Mesh

from routerl_jax.core.config import from_config_dict
from routerl_jax.knowledge.builds import Builder, BuildReport, changes, write_settings
from routerl_jax.knowledge.encoders import TextEncoder
from routerl_jax.knowledge.store import MANIFEST, Store, nested
from routerl_jax.knowledge.web.config import SnapshotConfig, WebConfig
from routerl_jax.knowledge.web.kb import WebKB, web_kb


def build_web(config: WebConfig, directory: str | pathlib.Path, *, progress: bool = True) -> BuildReport:
    """Writes a directory that `load_kb` opens as this web knowledge base. It contains no API keys.

    Raises:
      ValueError: the directory has other content than a web knowledge base.
    """
    settings = {key: value for key, value in changes(config).items() if key != "kind"}
    manifest = write_settings(config, directory, settings, overwrite=True)
    notes = {"not defaults": ", ".join(f"{key}={value!r}" for key, value in settings.items()) or "none"}
    return BuildReport(name=manifest.name, kind="web", directory=str(directory), notes=notes)


def open_web(
    store: Store,
    *,
    mesh: Mesh | None = None,
    index: str | None = None,
    encoder: str | TextEncoder | None = None,
    snapshot: SnapshotConfig | None = None,
) -> WebKB:
    """Opens a directory of `build_web`. API keys are read from their environment variables.

    Args:
      snapshot: its directory and mode replace those of kb.json.

    Raises:
      ValueError: kb.json has an unknown key, a variable is not set, or an index or encoder is given, which the web does not
        have.
    """
    if index is not None or encoder is not None:
        raise ValueError(f"{store.directory}: a web knowledge base has neither index nor encoder")
    settings = nested(store.manifest.settings)
    config = from_config_dict(WebConfig, settings, path=f"{store.directory / MANIFEST}: settings")
    if snapshot is not None:
        frozen = dataclasses.replace(config.snapshot, directory=snapshot.directory, mode=snapshot.mode)
        config = dataclasses.replace(config, snapshot=frozen)
    return web_kb(config)


BUILDER = Builder(WebConfig, build_web)
