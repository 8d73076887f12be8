"""Atlas, the embedded world of countries and elements. It comes with the package."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, Benchmark
from routerl_jax.training.config import KnowledgeConfig

KNOWLEDGE = {
    name: KnowledgeConfig(source=f"atlas/{name}", kind=kind, index="exact")
    for name, kind in (("text", "dense_text"), ("table", "dense_table"), ("elements", "dense_text"))
}
FLAGS = KnowledgeConfig(
    source="atlas/text_image",
    kind="text_image",
    encoder="colours+all-MiniLM-L6-v2",
    index="exact",
    settings={"picture_format": "png"},
)
_GET = "Comes with the package."
_LICENCE = "facts.json in the package says where its facts are from"

for _name, _questions, _about in (
    ("atlas", "atlas/test", "countries and elements; three knowledge bases hold what the others don't"),
    ("atlas_single", "atlas/test/single", "its questions that take one search"),
    ("atlas_multi", "atlas/test/multi", "its questions that take two"),
):
    BENCHMARKS.register(_name)(
        Benchmark(questions=(_questions,), knowledge=KNOWLEDGE, about=_about, licence=_LICENCE, get=_GET)
    )
BENCHMARKS.register("atlas_flags")(
    Benchmark(
        questions=("atlas/test/visual",),
        knowledge={**KNOWLEDGE, "text_image": FLAGS},
        about="its questions that show a flag, for policies that see or with captions",
        licence=_LICENCE,
        get=_GET,
    )
)
