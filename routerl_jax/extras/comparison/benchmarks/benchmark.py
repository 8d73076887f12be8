"""The description of a benchmark, and the search for its files."""

from __future__ import annotations

import dataclasses
import glob
import os
import pathlib
from collections.abc import Mapping

from routerl_jax.core.config import checked
from routerl_jax.core.registry import Registry
from routerl_jax.data.formats.known import split_name
from routerl_jax.data.hub import PREFIX, on_this_machine
from routerl_jax.knowledge.store import MANIFEST, Manifest
from routerl_jax.training.config import KnowledgeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Benchmark:
    """Questions, and the knowledge bases that answer them.

    Attributes:
      questions: alternatives for data.readers.open_dataset; the first that exists is used. Each is `atlas/SPLIT`, or a pattern
        of files in the data directory (`hotpotqa/dev.*`), with the format before it if the keys of the rows don't show it.
      knowledge: knowledge bases by the names that agents use. A `source` is a pattern, or several patterns separated by `|`, of
        which the first that exists is used; or `atlas/NAME`; or the address of a served knowledge base. A directory with a
        built knowledge base is opened as it is, whatever its kind. `hf://datasets/ORG/NAME/FILE` is a file on the hub
        (data.hub); questions may use it, too.
      pictures: questions need their pictures. Questions whose picture is missing are left out, and counted.
      about: a description in one line.
      paper: arXiv number; "" if there is none.
      licence: licence of the data, if known.
      get: where to get the data, and how to prepare them.
    """

    questions: tuple[str, ...]
    knowledge: Mapping[str, KnowledgeConfig]
    pictures: bool = False
    about: str = ""
    paper: str = ""
    licence: str = ""
    get: str = ""


BENCHMARKS: Registry[Benchmark] = Registry("benchmark")
OWN = "own:"  # prefix of a source: the source of the benchmark's own knowledge base with the name that follows
WIKIPEDIA = KnowledgeConfig(source="wikipedia/corpus.*")  # one corpus for all benchmarks that have none of their own
GET_WIKIPEDIA = (
    "wikipedia/corpus.jsonl.gz is a corpus of Wikipedia ({id, title, text} or {id, contents} a line), such as wiki-18 of "
    "https://huggingface.co/datasets/RUC-NLPIR/FlashRAG_datasets."
)
GET_TABLES = "{id, title, header, rows} a line (docs/knowledge_bases.md)."
M_BEIR = KnowledgeConfig(
    source="mbeir/cand_pool/global/mbeir_union_test_cand_pool.jsonl|mbeir/cand_pool/local/*.jsonl|mbeir/corpus.*",
    kind="text_image",
    encoder="openai/clip-vit-large-patch14",
)
GET_M_BEIR = (
    "mbeir/ is https://huggingface.co/datasets/TIGER-Lab/M-BEIR (arXiv 2311.17136) with its pictures unpacked, or one of its "
    "pools in mbeir/cand_pool/local. R1-Router searches it with UniIR's CLIP-SF (docs/pages.md): config.picture_encoder."
)
SPLIT_TABLES = KnowledgeConfig(
    source="open_wikitable/splitted_tables.json*|open_wikitable/tables*",
    kind="dense_table",
    settings={"table_format": "open_wikitable"},
)
GET_SPLIT_TABLES = (
    "open_wikitable/splitted_tables.json is in data.tar.gz of https://github.com/sean0042/Open_WikiTable "
    "(24,680 pieces of tables)."
)


def about_pictures(*, questions: tuple[str, ...], about: str, paper: str, licence: str, get: str) -> Benchmark:
    """Questions about pictures, which Wikipedia and M-BEIR answer; `about` and `get` without these two."""
    return Benchmark(
        questions=questions,
        knowledge={"text": WIKIPEDIA, "text_image": M_BEIR},
        pictures=True,
        about=f"{about}, over Wikipedia and M-BEIR",
        paper=paper,
        licence=licence,
        get=f"{get} {GET_WIKIPEDIA} {GET_M_BEIR}",
    )


def get_pool(questions: str) -> str:
    """Says how to make a corpus from the passages in a file of questions in the data directory."""
    corpus = f"{pathlib.PurePosixPath(questions).parent}/corpus.jsonl.gz"
    return f"Its corpus is made of them: python -m launch.make_corpus --questions={questions} --output={corpus}"


def with_knowledge(name: str, benchmark: Benchmark, knowledge: Mapping[str, KnowledgeConfig]) -> Benchmark:
    """The benchmark with `knowledge` instead of its own knowledge bases; unchanged if `knowledge` is empty.

    Args:
      knowledge: new knowledge bases. A source `own:NAME` is the source of the benchmark's own knowledge base NAME.

    Raises:
      ValueError: the benchmark has no knowledge base of that name.
    """
    if not knowledge:
        return benchmark
    replaced = {}
    for kb, spec in knowledge.items():
        if spec.source.startswith(OWN):
            own = spec.source.removeprefix(OWN)
            if own not in benchmark.knowledge:
                raise ValueError(
                    f"config.knowledge.{kb}.source={spec.source!r}: benchmark {name!r} has the knowledge bases "
                    f"{', '.join(benchmark.knowledge)}"
                )
            spec = dataclasses.replace(spec, source=benchmark.knowledge[own].source)
        replaced[kb] = spec
    get = f"{benchmark.get} config.knowledge says what is asked in the place of its own knowledge bases.".strip()
    return dataclasses.replace(benchmark, knowledge=replaced, get=get)


def listing() -> list[tuple[str, str, str, str, str, str]]:
    """(name, paper, names of the knowledge bases, description, licence, where to get the data) of every benchmark, sorted by
    name."""
    entries = [(name, BENCHMARKS.get(name)) for name in BENCHMARKS]
    return [
        (name, benchmark.paper, ", ".join(benchmark.knowledge), benchmark.about, benchmark.licence, benchmark.get)
        for name, benchmark in entries
    ]


class NoData(ValueError):
    """Files of a benchmark are not there."""


def located(name: str, benchmark: Benchmark, data: str) -> Benchmark:
    """The benchmark with existing files instead of patterns, and a single name of questions.

    Args:
      data: directory in which patterns are searched for; "": the working directory.

    Raises:
      NoData: the questions or the source of a knowledge base do not exist. The message says where they were searched for, and
        where to get them.
    """
    questions = next((match for pattern in benchmark.questions if (match := _first_match(pattern, data))), None)
    if questions is None:
        raise _lacking(name, benchmark, data, "questions", benchmark.questions)
    knowledge = {}
    for kb, spec in benchmark.knowledge.items():
        fixed = spec.directory or spec.kind in ("tool", "hybrid")
        patterns = (spec.source,) if fixed else tuple(spec.source.split("|"))
        source = (
            spec.source
            if fixed
            else next((match for pattern in patterns if (match := _first_match(pattern, data))), None)
        )
        if source is None:
            raise _lacking(name, benchmark, data, f"knowledge base {kb!r}", patterns)
        source = on_this_machine(source)
        built = not fixed and (pathlib.Path(source) / MANIFEST).is_file()
        knowledge[kb] = _as_built(source) if built else dataclasses.replace(spec, source=source)
    questions += "[pictures]" if benchmark.pictures else ""
    return dataclasses.replace(benchmark, questions=(questions,), knowledge=knowledge)


def _as_built(directory: str) -> KnowledgeConfig:
    return KnowledgeConfig(directory=directory, kind=Manifest.read(pathlib.Path(directory)).kind)


def _first_match(pattern: str, data: str) -> str | None:
    """The first file, by name, that matches a pattern; None if there is none. A name of another kind is returned unchanged."""
    form, files = split_name(pattern)
    if files.startswith(("atlas/", "http://", "https://", PREFIX)) or (":" in files and "/" not in files):
        return pattern
    paths = sorted(glob.glob(os.path.join(_root(data), os.path.expanduser(files))))
    return f"{form}:{paths[0]}" if paths and form else next(iter(paths), None)


def _root(data: str) -> str:
    return os.path.expanduser(data) if data else ""


def _lacking(name: str, benchmark: Benchmark, data: str, part: str, patterns: tuple[str, ...]) -> NoData:
    names = [str(pathlib.Path(_root(data)) / split_name(pattern)[1]) for pattern in patterns]
    searched = f"looked for {' or '.join(names)}"
    if not data:
        searched += " (config.data is empty: name the directory with the files of benchmarks)"
    advice = f". {benchmark.get}" if benchmark.get else ""
    advice += f" Licence: {benchmark.licence}." if benchmark.licence else ""
    are = "are" if part == "questions" else "is"
    return NoData(
        f"benchmark {name!r}: its {part} {are} not there; {searched}{advice} --benchmarks without it does the others alone."
    )
