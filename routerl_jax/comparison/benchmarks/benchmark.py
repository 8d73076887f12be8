"""What a benchmark is, and how its files are found."""

from __future__ import annotations

import dataclasses
import glob
import os
import pathlib
from collections.abc import Mapping

from routerl_jax.core.checked import checked
from routerl_jax.core.registry import Registry
from routerl_jax.data.formats.known import split_name
from routerl_jax.data.hub import PREFIX, on_this_machine
from routerl_jax.knowledge.store import MANIFEST, Manifest
from routerl_jax.training.config import KnowledgeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class Benchmark:
    """Questions and the knowledge bases that they are asked over.

    Attributes:
      questions: what data.readers.open_dataset takes, of which the first that is there counts: `atlas/SPLIT`, or a pattern of
        files in the data directory (`hotpotqa/dev.*`), with the format before it where the rows' keys don't tell.
      knowledge: by the names that agents use; a `source` is a pattern, too, or several with `|` between them, of which the
        first that is there counts, or `atlas/NAME`, or the address of a served one. A directory with a built knowledge base is
        opened as it is, of whatever kind. `hf://datasets/ORG/NAME/FILE`, for questions too, is a file on the hub (data.hub).
      pictures: questions are about their pictures: those without one that is there are left out, and counted.
      about: a line.
      paper: its arXiv number, "" for none.
      licence: of the data, as far as it is known.
      get: where the data are had, and what is to be made of them.
    """

    questions: tuple[str, ...]
    knowledge: Mapping[str, KnowledgeConfig]
    pictures: bool = False
    about: str = ""
    paper: str = ""
    licence: str = ""
    get: str = ""


BENCHMARKS: Registry[Benchmark] = Registry("benchmark")
OWN = "own:"  # before a name in the source of a knowledge base: what the benchmark's own one is made of
WIKIPEDIA = KnowledgeConfig(source="wikipedia/corpus.*")  # one corpus for all benchmarks that bring none along
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


def get_pool(questions: str) -> str:
    """How a corpus is made of the passages that come with a file of questions in the data directory."""
    corpus = f"{pathlib.PurePosixPath(questions).parent}/corpus.jsonl.gz"
    return f"Its corpus is made of them: python -m launch.make_corpus --questions={questions} --output={corpus}"


def with_knowledge(name: str, benchmark: Benchmark, knowledge: Mapping[str, KnowledgeConfig]) -> Benchmark:
    """The benchmark with other knowledge bases in the place of its own, if there are any.

    Args:
      knowledge: a source `own:NAME` is what the benchmark's own knowledge base of that name is made of.

    Raises:
      ValueError: it has none of that name.
    """
    if not knowledge:
        return benchmark
    found = {}
    for kb, spec in knowledge.items():
        if spec.source.startswith(OWN):
            own = spec.source.removeprefix(OWN)
            if own not in benchmark.knowledge:
                raise ValueError(
                    f"config.knowledge.{kb}.source={spec.source!r}: benchmark {name!r} has the knowledge bases "
                    f"{', '.join(benchmark.knowledge)}"
                )
            spec = dataclasses.replace(spec, source=benchmark.knowledge[own].source)
        found[kb] = spec
    get = f"{benchmark.get} config.knowledge says what is asked in the place of its own knowledge bases.".strip()
    return dataclasses.replace(benchmark, knowledge=found, get=get)


def listing() -> list[tuple[str, str, str, str, str]]:
    """(name, paper, names of the knowledge bases, a line, where the data are had) of every benchmark, sorted by name."""
    entries = [(name, BENCHMARKS.get(name)) for name in BENCHMARKS]
    return [(name, one.paper, ", ".join(one.knowledge), one.about, one.get) for name, one in entries]


def located(name: str, benchmark: Benchmark, data: str) -> Benchmark:
    """The benchmark with the files that are there in the place of patterns, and one name of questions.

    Args:
      data: the directory in which patterns are looked for; "": the working directory.

    Raises:
      ValueError: questions or what a knowledge base is built from are not there; says where they were looked for and had.
    """
    questions = next((found for one in benchmark.questions if (found := _found(one, data))), None)
    if questions is None:
        raise _lacking(name, benchmark, data, "questions", benchmark.questions)
    knowledge = {}
    for kb, spec in benchmark.knowledge.items():
        given = spec.directory or spec.kind in ("tool", "hybrid")
        patterns = (spec.source,) if given else tuple(spec.source.split("|"))
        source = spec.source if given else next((found for one in patterns if (found := _found(one, data))), None)
        if source is None:
            raise _lacking(name, benchmark, data, f"knowledge base {kb!r}", patterns)
        source = on_this_machine(source)
        built = not given and (pathlib.Path(source) / MANIFEST).is_file()
        knowledge[kb] = _as_built(source) if built else dataclasses.replace(spec, source=source)
    questions += "[pictures]" if benchmark.pictures else ""
    return dataclasses.replace(benchmark, questions=(questions,), knowledge=knowledge)


def _as_built(directory: str) -> KnowledgeConfig:
    return KnowledgeConfig(directory=directory, kind=Manifest.read(pathlib.Path(directory)).kind)


def _found(pattern: str, data: str) -> str | None:
    """What is there of a pattern, the first by name; what is no file's name as it is; None where nothing is there."""
    form, files = split_name(pattern)
    if files.startswith(("atlas/", "http://", "https://", PREFIX)) or (":" in files and "/" not in files):
        return pattern
    places = sorted(glob.glob(os.path.join(_root(data), os.path.expanduser(files))))
    return f"{form}:{places[0]}" if places and form else next(iter(places), None)


def _root(data: str) -> str:
    return os.path.expanduser(data) if data else ""


def _lacking(name: str, benchmark: Benchmark, data: str, what: str, patterns: tuple[str, ...]) -> ValueError:
    names = [str(pathlib.Path(_root(data)) / split_name(pattern)[1]) for pattern in patterns]
    where = f"looked for {' or '.join(names)}"
    if not data:
        where += " (config.data is empty: name the directory with the files of benchmarks)"
    had = f". {benchmark.get}" if benchmark.get else ""
    return ValueError(
        f"benchmark {name!r}: its {what} is not there; {where}{had}".replace("questions is", "questions are")
    )
