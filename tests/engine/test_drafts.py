"""Tokens copied from the conversation as drafts: the same turns in fewer steps."""

import jax
import numpy as np
import pytest

from routerl_jax.engine.cache import CacheKind, Qtype
from routerl_jax.engine.engine import Engine
from routerl_jax.engine.programs import lookup_drafts
from routerl_jax.engine.sampling import GREEDY, Sampling
from routerl_jax.models.config import ExpertsConfig
from routerl_jax.parallel.mesh import make_mesh
from tests import tiny

COLD = Sampling(temperature=0.05)  # random weights repeat themselves so, and not without exception


def by_hand(tokens: list[int], count: int) -> list[int]:
    for longest in (3, 2, 1):
        for end in range(len(tokens) - 2, longest - 2, -1):
            if longest <= len(tokens) and tokens[end - longest + 1 : end + 1] == tokens[-longest:]:
                following = tokens[end + 1 : end + 1 + count]
                return following + [-1] * (count - len(following))
    return [-1] * count


def test_what_followed_the_last_tokens_where_they_stood_before() -> None:
    assert by_hand([5, 6, 7, 8, 5, 6, 9, 6, 7], 3) == [
        8,
        5,
        6,
    ]  # two tokens match at their first place, and 7 alone nowhere else
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 40, 200)
    history = rng.integers(0, 4, (200, 40)).astype(np.int32)
    found = np.asarray(lookup_drafts(history, lengths, 5))
    for row, length, draft in zip(history, lengths, found):
        assert draft.tolist() == by_hand(row[:length].tolist(), 5)


def test_more_drafts_than_a_step_may_guess_are_refused() -> None:
    with pytest.raises(ValueError, match=r"drafts=16 must be in \[0, 15\]"):
        Engine(tiny.model(), rows=1, max_length=32, drafts=16)


def conversations(engine: Engine, sampling: Sampling, **asked) -> list:
    """Two turns of five conversations, with fewer rows than conversations."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, tiny.VOCABULARY, n).tolist() for n in (125, 17, 17, 3, 30)]
    prompts[2] = prompts[1]
    streams = [engine.open(prompt, str(i)) for i, prompt in enumerate(prompts)]
    for _ in range(2):
        for stream in streams:
            engine.request(stream, max_tokens=21, sampling=sampling, **asked)
        while engine.busy:
            engine.step()
        for stream in streams:
            engine.feed(stream, rng.integers(0, tiny.VOCABULARY, 7).tolist())
    return [stream.ledger.sequence() for stream in streams]


@pytest.mark.parametrize(
    ("kind", "qtype"),
    [
        ("segment", ""),
        pytest.param("segment", "int8", marks=pytest.mark.slow),
        pytest.param("fused", "", marks=pytest.mark.slow),
        ("fused", "int8"),
        ("paged", ""),
    ],
)
def test_turns_are_the_same_in_fewer_steps(kind: CacheKind, qtype: Qtype, interpreted: None) -> None:
    """Tokens and log-probabilities, with a windowed layer, rows and heads over four devices, and rows that are lost."""
    windows = {
        "model_type": "qwen2",
        "qkv_bias": True,
        "window": 5,
        "windowed": (True, False),
        "head_dim": 16,
        "seed": 3,
    }
    grid = make_mesh({"data": 1, "fsdp": 2, "tensor": 2}, jax.devices()[:4])
    model = tiny.model(mesh=grid, layout="tensor", **windows)
    made, engines = [], []
    for drafts in (0, 3):
        settings = {"cache": kind, "cache_qtype": qtype, "drafts": drafts}
        engines.append(Engine(model, rows=4, max_length=192, segment=6, leave_fraction=0, **settings))
        made.append(conversations(engines[-1], COLD))
    plain, drafted = engines
    assert plain.stats.decode_passes == plain.stats.decoded_tokens == drafted.stats.decoded_tokens == 2 * 5 * 21
    assert 100 < drafted.stats.decode_passes < 0.9 * plain.stats.decode_passes  # some drafts are right, others wrong
    for one, other in zip(*made):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        mask = other.loss_mask[1:]
        np.testing.assert_allclose(other.logprobs[1:][mask], one.logprobs[1:][mask], atol=1e-4)


@pytest.mark.slow
def test_a_turn_of_drafts_ends_where_it_must() -> None:
    """At a stop string, at its most tokens, at the end of the conversation; and begins with the tokens that are given."""
    model = tiny.model()

    def turns(drafts: int, **asked) -> list:
        engine = Engine(model, rows=4, max_length=60, drafts=drafts)
        streams = [engine.open([1, 2, 3, i], str(i)) for i in range(6)]
        for stream in streams:
            engine.request(
                stream, sampling=asked.get("sampling", GREEDY), **{k: v for k, v in asked.items() if k != "sampling"}
            )
        ended = {}
        while engine.busy:
            ended |= {stream.example_id: turn for stream, turn in engine.step()}
        assert all(len(stream.ledger) <= 60 for stream in streams)
        return [ended[str(i)] for i in range(6)]

    free = turns(0)
    texts = [model.tokenizer.decode(turn.tokens) for turn in free]
    stop = next(text[20:22] for text in texts if text[20:22].isascii() and len(text) > 22)
    for asked in (
        {},
        {"max_tokens": 7},
        {"stops": [stop]},
        {"given": [9, 9, 8, 7, 9, 9, 8, 7], "sampling": COLD},
        {"top": 3, "max_tokens": 12},
    ):
        for one, other in zip(turns(0, **asked), turns(4, **asked)):
            assert (one.tokens, one.stop_reason, one.stop) == (other.tokens, other.stop_reason, other.stop)
            assert [[token for token, _ in top] for top in one.tops] == [
                [token for token, _ in top] for top in other.tops
            ]


@pytest.mark.slow
def test_experts_of_drafted_tokens_are_recorded() -> None:
    sparse = {
        "model_type": "qwen3_moe",
        "qk_norm": True,
        "layers": 2,
        "experts": ExpertsConfig(count=4, chosen=2, mlp=24, normalized=True),
    }
    model = tiny.model(**sparse)
    made = [
        conversations(Engine(model, rows=4, max_length=192, segment=6, routes=True, drafts=drafts), GREEDY)
        for drafts in (0, 3)
    ]
    for one, other in zip(*made):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_array_equal(one.routes, other.routes)
