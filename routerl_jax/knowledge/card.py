"""The card of a knowledge base (README.md in its directory): what it holds, how it was built, how to open it."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping

from routerl_jax.core.files import write_atomic
from routerl_jax.core.packages import code_version
from routerl_jax.core.text import markdown_cell, without_directories
from routerl_jax.knowledge.store import Manifest
from routerl_jax.knowledge.writer import LEFT_OUT, left_out

CARD = "README.md"


def write_card(directory: str | pathlib.Path) -> None:
    """Writes the card from the manifest in the same directory. Of paths on this machine it names only the last part, or what is
    below the working directory."""
    path = pathlib.Path(directory).expanduser()
    manifest = Manifest.read(path)
    passages = f"{manifest.count:,}"
    if manifest.delta:
        passages += f" of the corpus; since then {manifest.delta.added:,} added, {manifest.delta.deleted:,} deleted"
    rows = {
        "kind": manifest.kind,
        "passages": passages if manifest.stored else "none of its own; it asks others",
        "corpus": without_directories(manifest.corpus) or ("passages in memory" if manifest.stored else ""),
        "corpus sha256": manifest.corpus_sha256,
        "made": manifest.created,
        "left out of the corpus": f"{missing} files or pages ({LEFT_OUT})" if (missing := len(left_out(path))) else "",
        "times updated": str(manifest.updates or ""),
    }
    if embedding := manifest.embedding:
        rows |= {
            "encoder": f"{without_directories(embedding.encoder)}, {embedding.dim} wide, {embedding.dtype}",
            "encoder digest": embedding.digest,
            "put before queries": json.dumps(embedding.query_prefix) if embedding.query_prefix else "",
            "put before passages": json.dumps(embedding.passage_prefix) if embedding.passage_prefix else "",
        }
    rows["index"] = str(manifest.index.get("backend", ""))
    rows["card written with"] = ", ".join(f"{name} {value}" for name, value in code_version().items())
    here = path.resolve().is_relative_to(pathlib.Path.cwd())
    place = (path.resolve().relative_to(pathlib.Path.cwd()) if here else pathlib.Path(path.resolve().name)).as_posix()
    lines = [
        "---",
        "tags: [routerl_jax, retrieval, knowledge-base]",
        "---",
        "",
        f"# {manifest.name}",
        "",
        f"A knowledge base that routerl_jax searches{'' if here else ', from the directory that holds it'}:",
        "",
        "```python",
        "import routerl_jax as rj",
        "",
        f'rj.load_kb("{place}").search(["..."], k=5)',
        "```",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {markdown_cell(value)} |" for key, value in rows.items() if value),
        "",
        *(["Settings that are not the defaults:", "", *_block(manifest.config), ""] if manifest.config else []),
        *(["Passages are the corpus's: its licence is theirs."] if manifest.stored else []),
    ]
    write_atomic(path / CARD, "\n".join(lines) + "\n")


def _block(settings: Mapping[str, object]) -> list[str]:
    lines = [f"{key} = {without_directories(json.dumps(value, ensure_ascii=False))}" for key, value in settings.items()]
    return ["```", *lines, "```"]
