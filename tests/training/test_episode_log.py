"""What a step records: which episodes, and what learning made of their tokens."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from routerl_jax.core.ledger import Ledger
from routerl_jax.core.types import Episode, Example
from routerl_jax.training.credit import Credit
from routerl_jax.training.episode_log import log_episodes, token_texts
from tests.training.small_policy import small_policy

BYTES = [b"The ", b"lion", "é".encode()[:1], "é".encode()[1:], b"<eos>"]


def episode(question: str, sample: int, sequences: int = 1) -> Episode:
    ledger = Ledger()
    ledger.feed([0, 1])
    ledger.sample([2, 3, 4], [-0.5, -0.25, -1.23456], 0)
    made = [ledger.sequence() for _ in range(sequences)]
    example = Example(id=question, question="?", answers=("x",))
    return Episode(example=example, sample=sample, answer="x", turns=[], sequences=made, rewards={"total": 1.0})


EPISODES = [episode(f"q{i // 4}", i % 4, sequences=1 + (i == 5)) for i in range(12)]
SEQUENCES = 13
MASK = EPISODES[0].sequences[0].loss_mask
CREDIT = Credit([np.where(MASK, float(i), 0.0) for i in range(SEQUENCES)], np.asarray([0, 6]), {})


def records(tmp_path: pathlib.Path, episodes: list[Episode] = EPISODES, **settings) -> list[dict]:
    config = dataclasses.replace(small_policy(), **settings)
    log_episodes(tmp_path, 3, episodes, CREDIT, config, BYTES)
    file = tmp_path / "episodes" / "step-000003.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def chosen(found: list[dict]) -> list[str]:
    return [f"{record['id']}:{record['sample']}" for record in found]


def test_a_spread_or_whole_groups(tmp_path: pathlib.Path) -> None:
    assert chosen(records(tmp_path / "a", log_episodes=3)) == ["q0:0", "q1:0", "q2:0"]
    whole = records(tmp_path / "b", log_episodes=9, log_groups=True)
    assert chosen(whole) == [f"q{q}:{sample}" for q in (0, 1) for sample in range(4)]
    assert len(records(tmp_path / "c", log_episodes=1, log_groups=True)) == 4  # one question at least
    assert records(tmp_path / "d", log_episodes=0, log_groups=True) == records(tmp_path / "e", log_episodes=0) == []


def test_forked_attempts_are_recorded_whole(tmp_path: pathlib.Path) -> None:
    """Four attempts of three branches each: what does not fit is left out, and not cut."""
    forked = [episode(f"q{i // 6}", i // 3 % 2) for i in range(12)]
    assert chosen(records(tmp_path / "a", forked, log_episodes=8)) == ["q0:0"] * 3 + ["q0:1"] * 3
    assert chosen(records(tmp_path / "b", forked, log_episodes=6)) == ["q0:0"] * 3 + ["q1:0"] * 3
    assert chosen(records(tmp_path / "c", forked, log_episodes=2)) == ["q0:0"] * 3  # one attempt at least


def test_what_learning_made_of_it(tmp_path: pathlib.Path) -> None:
    found = records(tmp_path, log_episodes=12)
    assert [record["trained"] for record in found] == [
        i in (0, 5) for i in range(12)
    ]  # sequence 6 is the second of episode 5
    assert found[4]["advantage"] == 4.0
    assert found[5]["advantage"] == pytest.approx(5.5)  # over all its sampled tokens
    assert found[6]["advantage"] == 7.0
    assert all("tokens" not in record and record["step"] == 3 for record in found)


def test_every_token(tmp_path: pathlib.Path) -> None:
    found = records(tmp_path, log_episodes=12, log_tokens=True)
    assert len(found[5]["tokens"]) == 2
    assert found[1]["tokens"] == [
        {
            "text": ["The ", "lion", "", "é", "<eos>"],
            "sampled": [0, 0, 1, 1, 1],
            "logprob": [0.0, 0.0, -0.5, -0.25, -1.2346],
            "advantage": [0.0, 0.0, 1.0, 1.0, 1.0],
        }
    ]


def test_texts_of_tokens_add_up() -> None:
    letters = ["é".encode()[:1], "é".encode()[1:], b"a", b"\xff", "日".encode()]
    assert token_texts([2, 0, 1, 4], letters) == ["a", "", "é", "日"]
    assert token_texts([3, 2], letters) == ["�", "a"]
    assert token_texts([99], letters) == ["�"]  # a padded vocabulary's
