"""The circuit breaker by a clock that the test sets, and the arithmetic of patience."""

import random

import pytest

from routerl_jax.knowledge.client.transport import CircuitBreaker, Retries, Timeouts
from routerl_jax.services.http import retry_after


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fail(breaker: CircuitBreaker) -> None:
    breaker.begin()
    breaker.failed()


def test_it_opens_half_opens_and_closes() -> None:
    clock = Clock()
    breaker = CircuitBreaker(threshold=3, cool_down=2, longest=6, clock=clock)
    fail(breaker)
    fail(breaker)
    breaker.begin()
    breaker.succeeded()  # in a row is what counts
    fail(breaker)
    fail(breaker)
    assert (breaker.state, breaker.passes) == ("closed", True)
    fail(breaker)
    assert (breaker.state, breaker.passes, breaker.wait) == ("open", False, 2)
    clock.now = 2
    assert (breaker.state, breaker.passes) == ("half_open", True)
    breaker.begin()
    assert not breaker.passes  # one trial at a time
    breaker.failed()
    assert breaker.wait == 4
    clock.now += 4
    fail(breaker)
    assert breaker.wait == 6  # twice as long, up to the longest
    clock.now += 6
    breaker.begin()
    breaker.succeeded()
    assert (breaker.state, breaker.passes) == ("closed", True)
    fail(breaker)
    assert breaker.state == "closed"


def test_a_trial_that_was_called_off_leaves_room_for_another() -> None:
    clock = Clock()
    breaker = CircuitBreaker(threshold=1, clock=clock)
    fail(breaker)
    clock.now = 100
    breaker.begin()
    breaker.dropped()
    assert breaker.passes


def test_pauses_are_jittered_and_bounded() -> None:
    rng, retries = random.Random(0), Retries(base=1, cap=8)
    for failures, most in ((0, 1), (1, 2), (2, 4), (3, 8), (9, 8), (10_000, 8)):
        pauses = [retries.pause(failures, rng) for _ in range(300)]
        assert 0 <= min(pauses) < 0.1 * most
        assert 0.9 * most < max(pauses) <= most


@pytest.mark.parametrize(
    ("header", "low", "high"),
    [
        ("3", 3, 3),
        ("0.5", 0.5, 0.5),
        ("-1", 0, 0),
        ("", 0, 0),
        ("soon", 0, 0),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        ("Wed, 21 Oct 2099 07:28:00 GMT", 60, 60),  # no server keeps a client waiting for years
        ("31536000", 60, 60),
        ("inf", 60, 60),
        ("nan", 0, 0),
    ],
)
def test_retry_after_is_a_number_or_a_date(header: str, low: float, high: float) -> None:
    assert low <= (retry_after(header) or 0.0) <= high


@pytest.mark.parametrize("wrong", [{"total": 0}, {"read": -1}, {"connect": float("nan")}])
def test_impossible_timeouts(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"must be (above 0|a finite number)"):
        Timeouts(**wrong)
