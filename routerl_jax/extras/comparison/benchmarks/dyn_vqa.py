"""Dyn-VQA (Li et al., ICLR 2025; OmniSearch): questions about pictures whose answers change, in English."""

from __future__ import annotations

from routerl_jax.extras.comparison.benchmarks.benchmark import BENCHMARKS, about_pictures

BENCHMARKS.register("dyn_vqa")(
    about_pictures(
        questions=(
            "dyn_vqa/DynVQA_en.202502.jsonl*",
            "dyn_vqa/DynVQA_en.202412.jsonl*",
            "dyn_vqa/questions_dev.*",
        ),
        about="questions about pictures whose answers change",
        paper="2411.02937",
        licence="not stated",
        get=(
            "dyn_vqa/DynVQA_en.202502.jsonl is dataset/DynVQA_en/ of https://github.com/Alibaba-NLP/OmniSearch (R1-Router asks "
            "DynVQA_en.202412.jsonl). Its rows name pictures by their URLs, which are not fetched here: put them at "
            "dyn_vqa/images/QUESTION_ID.jpg."
        ),
    )
)
