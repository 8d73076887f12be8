"""A learner whose devices are out of memory goes on with smaller micro-batches, or says what to lower."""

import dataclasses
import logging
from typing import Any

import jax
import numpy as np
import pytest

from routerl_jax.learning.batch import BatchLayout
from routerl_jax.learning.learner import Learner
from routerl_jax.learning.losses import LossConfig, token_weights
from routerl_jax.learning.optimizer import OptimizerConfig
from routerl_jax.parallel.devices import OutOfMemory
from routerl_jax.parallel.mesh import single_device_mesh
from tests import tiny
from tests.memory import needs_too_much

SEQUENCES = tiny.random_sequences(8)


def make_learner(micro_tokens: int) -> Learner:
    mesh = single_device_mesh()
    layout = BatchLayout(mesh, [128], micro_tokens)
    return Learner(tiny.model(mesh=mesh), OptimizerConfig(lr=1e-2).build(10), LossConfig(), layout)


def limit(learner: Learner, width: int, *, takes_weights: bool = False) -> None:
    """From now on programs with wider micro-batches than this need more memory than there is.

    On a TPU they fail when they are compiled, on a GPU when their scratch is allocated: they have not taken the weights then.
    On a CPU they have.
    """
    whole = learner._programs

    def update(*, state: Any, batch: Any, **rest: Any) -> Any:
        if batch.tokens.shape[-1] > width:
            return needs_too_much(state if takes_weights else ())
        return whole.update(state=state, batch=batch, **rest)

    def logprobs(params: Any, frozen: Any, batch: Any) -> Any:
        return needs_too_much() if batch.tokens.shape[-1] > width else whole.logprobs(params, frozen, batch)

    learner._programs = dataclasses.replace(whole, update=update, logprobs=logprobs)


def step(learner: Learner) -> np.ndarray:
    weights = token_weights([s.loss_mask for s in SEQUENCES], "token", 1.0)
    batch, index = learner.layout.build(SEQUENCES, weights, [1.0, -1.0] * 4)
    return np.concatenate(index.split(learner.update(batch)[1]))


def test_it_goes_on_as_if_micro_batches_had_been_small_from_the_start(caplog: pytest.LogCaptureFixture) -> None:
    small, large = make_learner(256), make_learner(1024)
    limit(large, 256)
    with caplog.at_level(logging.WARNING):
        scores = [large.within_memory(lambda: step(large)) for _ in range(2)]
    np.testing.assert_array_equal(scores, [step(small) for _ in range(2)])
    jax.tree.map(np.testing.assert_array_equal, large.state.params, small.state.params)
    assert large.layout.width == small.layout.width == 256
    told = [record.getMessage() for record in caplog.records if "out of device memory in the learner" in record.message]
    assert [message.partition("going on with ")[2].partition(";")[0] for message in told] == [
        "config.learner.micro_tokens=512",
        "config.learner.micro_tokens=256",
    ]


def test_log_probabilities_too(caplog: pytest.LogCaptureFixture) -> None:
    large = make_learner(1024)
    expected = large.logprobs(SEQUENCES)
    limit(large, 512)
    for row, other in zip(large.logprobs(SEQUENCES), expected):
        np.testing.assert_allclose(row, other, atol=1e-5)
    assert "config.learner.micro_tokens=512" in caplog.text


def test_what_cannot_be_smaller_is_refused_with_what_to_lower() -> None:
    learner = make_learner(128)
    limit(learner, 64)
    with pytest.raises(OutOfMemory, match=r"out of device memory in the learner .*lower config.learner.micro_tokens"):
        learner.within_memory(lambda: step(learner))


def test_weights_that_went_with_the_program_are_not_gone_on_with() -> None:
    learner = make_learner(1024)
    limit(learner, 256, takes_weights=True)
    with pytest.raises(OutOfMemory, match="a run may be resumed with either"):
        learner.within_memory(lambda: step(learner))
    assert learner.layout.width == 1024
