"""`python -m launch.serve_policy` as a user runs it: the policy of a run, alone and with its searches; and its mistakes."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from routerl_jax.data.atlas.world import KNOWLEDGE_BASES
from routerl_jax.training import config as schema
from tests.launch.test_ask import left_by_a_run
from tests.programs import refusal, start
from tests.training.small_run import make_config

QUESTION = "What is the capital of the country that produces the most Ruthenium?"


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    config = make_config(tmp_path_factory.mktemp("home"))
    learner = dataclasses.replace(config.learner, length_buckets=(config.engine.max_length,))
    config = dataclasses.replace(config, mesh=schema.MeshConfig(cpu_devices=1), learner=learner)
    return left_by_a_run(tmp_path_factory.mktemp("runs") / "router", config)


@contextlib.contextmanager
def served(*flags: Any) -> Iterator[tuple[str, openai.OpenAI, subprocess.Popen[str]]]:
    """What the program says of itself, a client of it, and the program."""
    process = start("launch.serve_policy", *flags, "--port=0", JAX_NUM_CPU_DEVICES="1")
    assert process.stdout is not None
    try:
        said = ""
        while not said.startswith("serving"):
            said = process.stdout.readline()
            assert said, "it ended without a word"
        url = re.findall(r"base_url='(.+?)'", said)[0]
        yield said, openai.OpenAI(base_url=url, api_key="s3cret", timeout=300, max_retries=0), process
    finally:
        process.kill()


def test_a_policy_alone_and_its_end(workdir: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    with served(f"--workdir={workdir}", f"--token_file={tmp_path / 'token'}", "--rows=4") as (said, client, process):
        assert said.startswith("serving router at http://127.0.0.1:")
        assert "(256 tokens, text alone)" in said
        reply = client.completions.create(
            model="router", prompt=f"Question: {QUESTION}\n", max_tokens=64, temperature=0
        )
        assert reply.choices[0].text.startswith("<think>")  # as it was trained to
        with pytest.raises(openai.BadRequestError, match="no chat template"):
            client.chat.completions.create(model="router", messages=[{"role": "user", "content": QUESTION}])
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert process.returncode in (0, -signal.SIGTERM)


def test_a_policy_with_its_searches(workdir: pathlib.Path) -> None:
    with served(f"--workdir={workdir}", "--with_searches", "--name=answers") as (said, client, _):
        names = sorted(KNOWLEDGE_BASES)
        assert f"searches {', '.join(names)}" in said
        reply = client.chat.completions.create(model="answers", messages=[{"role": "user", "content": QUESTION}])
        message = reply.choices[0].message
        found = message.model_extra or {}
        assert found["searches"]
        assert {one["knowledge_base"] for one in found["searches"]} <= set(names)
        assert len(message.annotations or []) == len(found["sources"]) > 0
        assert all(one["text"] for one in found["sources"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "give either --workdir, the directory of a run, or --path, a model"),
        (("--workdir=a", "--path=b"), "give either --workdir"),
        (("--workdir=/nowhere",), "/nowhere holds no run"),
        (("--path=atlas-warm-start", "--with_searches"), "--with_searches needs --workdir"),
        (("--workdir={run}", "--knowledge=text=kb"), "--knowledge needs --with_searches"),
        (("--workdir={run}", "--with_searches", "--knowledge=other=kb"), "is not NAME=PLACE with a knowledge base"),
        (("--workdir={run}", "--token_file=/nowhere"), "token_file=/nowhere: can't be read"),
        (("--workdir={run}", "--max_queue=-1"), "max_queue=-1 must not be negative"),
        (
            ("--workdir={run}", "--max_length=9999"),
            "max_length=9999 exceeds the model's context",
        ),  # not: the run's buckets
    ],
)
def test_mistakes_are_one_line(workdir: pathlib.Path, flags: tuple[str, ...], expected: str) -> None:
    assert expected in refusal("serve_policy", "--port=0", *(flag.format(run=workdir) for flag in flags))
