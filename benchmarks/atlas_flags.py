"""How often the right flag of Atlas comes first, or among two, for the questions that show one.

python -m benchmarks.atlas_flags
"""

from __future__ import annotations

import argparse

from configs import r1_router_small
from routerl_jax.data.atlas.questions import PICTURES, SHOWN
from routerl_jax.data.readers import open_dataset
from routerl_jax.knowledge.base import with_picture
from routerl_jax.training.knowledge import open_knowledge_bases


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    flags = open_knowledge_bases({PICTURES: r1_router_small.KNOWLEDGE[PICTURES]})[PICTURES]
    print("| split | questions | first | among two |\n|---|---:|---:|---:|")
    for split in ("train", "validation", "test"):
        source = open_dataset(f"atlas/{split}/visual")
        examples = [source[i] for i in range(len(source))]
        results = flags.search([with_picture(SHOWN, example.images) for example in examples], 2)
        gold = [example.metadata["path"][0]["passage_id"] for example in examples]
        first, two = (
            sum(right in [passage.id for passage in passages[:k]] for right, passages in zip(gold, results)) / len(gold)
            for k in (1, 2)
        )
        print(f"| {split} | {len(examples)} | {100 * first:.1f} % | {100 * two:.1f} % |")


if __name__ == "__main__":
    main()
