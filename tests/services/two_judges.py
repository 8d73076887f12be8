"""One of two processes with a judge: python -m tests.services.two_judges URL. Prints one JSON line of what it heard."""

from __future__ import annotations

import json
import sys

from routerl_jax.core.types import Episode, Example
from routerl_jax.parallel import multihost
from routerl_jax.services.cache import MemoryCache
from routerl_jax.services.config import JudgeConfig
from routerl_jax.services.judge import open_judge


def refusal(config: JudgeConfig) -> str:
    try:
        open_judge(config, cache=MemoryCache())
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    multihost.initialize()
    config = JudgeConfig(model="m", base_url=sys.argv[1])
    example = Example(id="1", question="?", answers=("Paris",))
    episodes = [
        Episode(example=example, sample=i, answer=answer, turns=[], sequences=[])
        for i, answer in enumerate(("Paris", "Rome", None))
    ]
    verdicts = open_judge(config, cache=MemoryCache())(episodes)
    found = {
        "kinds": [verdict.kind for verdict in verdicts],
        "refused": refusal(JudgeConfig(model="m", base_url=sys.argv[1], api_key_env="JUDGE_KEY")),
        "engine": refusal(JudgeConfig(model="m", kind="engine")),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
