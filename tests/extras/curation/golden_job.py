"""A job of golden trajectories as a program, whose language model is a server, for tests that kill it:

python -m tests.extras.curation.golden_job WORKDIR QUESTIONS URL
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys

from routerl_jax.extras.curation import golden
from routerl_jax.services.openai import OpenAIModel
from tests.extras.curation.teacher import Facts, job


def run(workdir: pathlib.Path, questions: str, url: str) -> golden.ConstructReport:
    config = job(questions, concurrency=2)
    config = dataclasses.replace(config, llm=dataclasses.replace(config.llm, base_url=url))
    model = OpenAIModel("scripted", url, retries=0)
    return golden.construct(config, workdir, lambda: (model, {"text": Facts(), "table": Facts()}), progress=False)


if __name__ == "__main__":
    run(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3])
