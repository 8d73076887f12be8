"""WebQA (Chang et al., CVPR 2022): the questions that pictures answer, as R1-Router asks them."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, about_pictures

BENCHMARKS.register("webqa")(
    about_pictures(
        questions=(
            "webqa/webqa_val.jsonl*",
            "webqa/questions_dev.*",
        ),
        about="questions that pictures answer, answers are sentences",
        paper="2109.00590",
        licence="CC0 (its repository)",
        get=(
            "webqa/webqa_val.jsonl is R1-Router's thousand, datasets/ of https://github.com/OpenBMB/R1-Router; the pictures "
            "are in imgs.tsv of https://github.com/WebQnA/WebQA: put them at webqa/images/IMAGE_ID.jpg."
        ),
    )
)
