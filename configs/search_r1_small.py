"""Search-R1 with a real model on one GPU: SmolLM2-135M-Instruct on questions and a corpus of yours."""

import dataclasses

import ml_collections

from configs.smollm2_search import smollm2_run
from routerl_jax.core.config import to_config_dict
from routerl_jax.recipes import search_r1
from routerl_jax.training.config import StageConfig

# Worked examples: a model of this size that is told the protocol in words does not search (configs/smollm2_search.py).
PROMPT = """Each question is worked out in steps: think, search for what is missing, read what comes back, answer.

Question: Which language is spoken by most people in the country where the Bialowieza forest lies, east of Warsaw?
<think>The forest lies in Poland, I believe. I will look it up.</think>
<search>country of the Bialowieza forest</search>

<information>Doc 1(Title: Bialowieza) Bialowieza is a primeval forest on the border of Poland and Belarus.</information>

<think>East of Warsaw, on the Polish side. I need the language.</think>
<search>language of Poland</search>

<information>Doc 1(Title: Poland) Poland is a country in Central Europe. Nearly all of its people speak Polish.</information>

<think>Most people in Poland speak Polish.</think>
<answer>Polish</answer>

Question: Did the Eiffel Tower and the Atomium open in the same century?
<think>I need the year in which the Eiffel Tower opened.</think>
<search>Eiffel Tower opening year</search>

<information>Doc 1(Title: Eiffel Tower) The Eiffel Tower opened to visitors in May 1889.</information>

<think>That is the nineteenth century. Now the Atomium.</think>
<search>Atomium opening year</search>

<information>Doc 1(Title: Atomium) The Atomium was built for the world fair of 1958 in Brussels.</information>

<think>1958 is in the twentieth century, so no.</think>
<answer>no</answer>

Question: {question}
"""


def get_config() -> ml_collections.ConfigDict:
    """As configs/smollm2_search.py, whose files, ranges and advice for CPUs hold here; Search-R1's grammar, and EM alone.

    python -m launch.train --config=configs/search_r1_small.py --workdir=runs/search_r1 \
        --config.data.train=questions.jsonl --config.knowledge.text.source=corpus.jsonl

    config.knowledge.text.source may also be the address of a retrieval server, http://host:8000/retrieve. It has not been run
    to its end yet.
    """
    run = smollm2_run()
    return to_config_dict(
        dataclasses.replace(
            run,
            agent=dataclasses.replace(run.agent, grammar="search_r1", prompt=PROMPT, prompt_suffix=""),
            stages={"main": StageConfig(reward=dict(search_r1.REWARD))},
            learner=dataclasses.replace(run.learner, loss=dataclasses.replace(run.learner.loss, clip_high=0.2)),
            evaluation=dataclasses.replace(run.evaluation, normalizer="search_r1"),
        )
    )
