"""Knowledge bases of the embedded world, which `config.knowledge.NAME.source="atlas/..."` names."""

from __future__ import annotations

import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from routerl_jax.core.files import cache_directory, write_atomic
from routerl_jax.core.progress import Bar
from routerl_jax.core.types import Passage
from routerl_jax.training.config import KnowledgeConfig

ATLAS = "atlas/"


def atlas_passages(spec: KnowledgeConfig) -> list[Passage] | None:
    """The passages of a source `atlas/...`; None for a file."""
    if not spec.source.startswith(ATLAS):
        return None
    from routerl_jax.data.atlas.known import FACTS, FLAGS, fact_passages, flag_passages
    from routerl_jax.data.atlas.pages import page_passages
    from routerl_jax.data.atlas.questions import PICTURES, picture_passages
    from routerl_jax.data.atlas.register import REGISTER, register_passages
    from routerl_jax.data.atlas.world import passages_of

    if print_size := atlas_pages(spec):
        return page_passages(print_size)
    name = spec.source.removeprefix(ATLAS)
    makers = {PICTURES: picture_passages, FACTS: fact_passages, FLAGS: flag_passages, REGISTER: register_passages}
    return makers[name]() if name in makers else passages_of(name)


def atlas_pages(spec: KnowledgeConfig) -> int:
    """The size of print of the pages of a source `atlas/pages` or `atlas/pages/PIXELS`, in pixels; 0 for any other source."""
    from routerl_jax.data.atlas.pages import PAGES, PRINT

    match = re.fullmatch(rf"{ATLAS}{PAGES}(?:/([1-9]\d*))?", spec.source)
    return int(match[1] or PRINT) if match else 0


def shows_pages(spec: KnowledgeConfig) -> bool:
    """Whether the passages of a source are page images: `atlas/pages`, `atlas/register`."""
    from routerl_jax.data.atlas.register import REGISTER

    return bool(atlas_pages(spec)) or spec.source == f"{ATLAS}{REGISTER}"


def _drawings(spec: KnowledgeConfig) -> list[tuple[str, Callable[[], bytes]]]:
    """The pictures of a source's pages: file names, and functions that draw the files' content."""
    from routerl_jax.data.atlas import pages, register

    if print_size := atlas_pages(spec):
        return [(page.file, functools.partial(pages.encoded, page)) for page in pages.all_pages(print_size)]
    return [(page.file, functools.partial(register.encoded, page)) for page in register.register_pages()]


def atlas_triples(spec: KnowledgeConfig) -> dict[str, str]:
    """Settings that give a graph Atlas's own facts as triples; {} if the settings already name a source of triples."""
    if "extractor" in spec.settings:
        return {}
    from routerl_jax.data.atlas.world import triples_of

    rows = triples_of(spec.source.removeprefix(ATLAS))
    return {"extractor": "given", "triples": _written_rows(f"{spec.source}.triples.jsonl", rows)}


def written_passages(spec: KnowledgeConfig, passages: Sequence[Passage], progress: bool) -> str:
    """The path of a corpus file in the cache with a source's passages. Pictures of Atlas's pages are drawn once, beside it."""
    name, rows = f"{spec.source}.jsonl", [_row(passage) for passage in passages]
    if shows_pages(spec) and not (path := _written_place(name, _lines(rows))).is_file():
        for file, draw in Bar(_drawings(spec), "drawing pages", len(rows), unit="page", disable=not progress):
            if not (picture := path.parent / file).is_file():
                write_atomic(picture, draw(), shared=True)
    return _written_rows(name, rows)


def _row(passage: Passage) -> dict[str, str]:
    """A passage as a row of a corpus."""
    row = {"id": passage.id, "title": passage.title, "text": passage.text}
    return row | {"image": passage.image} if passage.image else row


def _written_rows(name: str, rows: list[dict[str, Any]]) -> str:
    """The path of a file with these rows in the cache. It is written once, and its name depends on its content."""
    path = _written_place(name, content := _lines(rows))
    if not path.is_file():
        write_atomic(path, content, shared=True)
    return str(path)


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _written_place(name: str, content: str) -> pathlib.Path:
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return cache_directory() / "knowledge" / "sources" / digest / pathlib.Path(name).name
