"""Dyn-VQA (Li et al., ICLR 2025; OmniSearch): questions about pictures whose answers change, in English."""

from __future__ import annotations

from routerl_jax.comparison.benchmarks.benchmark import (
    BENCHMARKS,
    GET_M_BEIR,
    GET_WIKIPEDIA,
    M_BEIR,
    WIKIPEDIA,
    Benchmark,
)

BENCHMARKS.register("dyn_vqa")(
    Benchmark(
        questions=(
            "dyn_vqa/DynVQA_en.202502.jsonl*",
            "dyn_vqa/DynVQA_en.202412.jsonl*",
            "dyn_vqa/questions_dev.*",
        ),
        knowledge={"text": WIKIPEDIA, "text_image": M_BEIR},
        pictures=True,
        about="questions about pictures whose answers change, over Wikipedia and M-BEIR",
        paper="2411.02937",
        licence="not stated",
        get=(
            "dyn_vqa/DynVQA_en.202502.jsonl is dataset/DynVQA_en/ of https://github.com/Alibaba-NLP/OmniSearch (R1-Router asks "
            "DynVQA_en.202412.jsonl). Its rows name pictures by their URLs, which are not fetched here: put them at "
            f"dyn_vqa/images/QUESTION_ID.jpg. {GET_WIKIPEDIA} {GET_M_BEIR}"
        ),
    )
)
