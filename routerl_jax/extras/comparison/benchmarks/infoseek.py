"""InfoSeek (Chen et al., EMNLP 2023): facts about what a picture shows that are not in the picture."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, about_pictures

BENCHMARKS.register("infoseek")(
    about_pictures(
        questions=(
            "infoseek/infoseek_val.jsonl*",
            "infoseek/questions_dev.*",
        ),
        about="facts about what a picture shows",
        paper="2302.11713",
        licence="Apache-2.0 (its repository); the pictures are OVEN's",
        get=(
            "infoseek/infoseek_val.jsonl is had at https://github.com/open-vision-language/infoseek (R1-Router's thousand of "
            "them: datasets/infoseek_val.jsonl of https://github.com/OpenBMB/R1-Router), its pictures with OVEN's "
            "(https://github.com/open-vision-language/oven): put them at infoseek/images/IMAGE_ID.jpg."
        ),
    )
)
