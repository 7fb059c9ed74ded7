from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.effect import MAX_RECONSTRUCTION_ERROR
from controld.contract.errors import FieldError
from controld.controller.error_test import (
    SAMPLES_TO_LEARN,
    ErrorNorm,
    ErrorTest,
    NormLearner,
    from_document,
    to_document,
)

NORM = ErrorNorm(mean=0.03, log_sd=0.15, samples=12)
EXACT = ErrorNorm(mean=0.0, log_sd=0.0, samples=12)
errors = st.one_of(st.just(0.0), st.floats(1e-12, MAX_RECONSTRUCTION_ERROR), st.floats(0.01, 0.1))


def samples_until_broken(norm: ErrorNorm, factor: float, seed: int, most: int = 200) -> int:
    generator = np.random.default_rng(seed)
    test = ErrorTest()
    for number in range(1, most + 1):
        test = test.observe(norm.mean * factor * math.exp(norm.log_sd * generator.standard_normal()), norm)
        if test.suspicion(norm) > 1:
            return number
    return most


@pytest.mark.parametrize(("factor", "most"), [(1.25, 60.0), (1.5, 8.0), (2.0, 4.0), (4.0, 3.1), (1000.0, 3.0)])
def test_growth_is_found_within_the_stated_number_of_samples(factor: float, most: float) -> None:
    delays = [samples_until_broken(NORM, factor, seed) for seed in range(40)]
    assert min(delays) >= 3, "no two samples condemn an arm"
    assert sum(delays) / len(delays) <= most


@pytest.mark.parametrize(("log_sd", "bias"), [(0.0, 1.12), (0.15, 1.05), (0.5, 1.0)])
def test_a_healthy_arm_is_left_alone_and_so_is_one_with_a_small_bias(log_sd: float, bias: float) -> None:
    norm = ErrorNorm(mean=0.03, log_sd=log_sd, samples=12)
    generator = np.random.default_rng(1)
    test = ErrorTest()
    for draw in generator.standard_normal(3000):
        test = test.observe(0.03 * bias * math.exp(log_sd * draw), norm)
        assert test.suspicion(norm) <= 1


def test_what_comes_and_goes_is_found_too() -> None:
    """One frame in five is garbage, the others are as ever: the sum of growth alone would forget it each time."""
    test, number = ErrorTest(), 0
    while test.suspicion(NORM) <= 1:
        number += 1
        test = test.observe(0.5 if number % 5 == 0 else 0.03, NORM)
        assert number < 40
    assert number >= 15


def test_an_exact_arm_may_not_change_anything() -> None:
    test = ErrorTest()
    for error, suspected in ((0.0, False), (1e-9, False), (0.0, False), (1e-9, False), (1e-9, True)):
        test = test.observe(error, EXACT)
        assert (test.suspicion(EXACT) > 1) == suspected


def test_a_chunk_stored_raw_neither_accuses_nor_acquits() -> None:
    suspected = ErrorTest().observe(0.3, NORM)
    after = suspected.observe(0.0, NORM)
    assert (after.growth, after.gross, after.samples) == (suspected.growth, suspected.gross, 2)


def test_few_segments_are_trusted_less() -> None:
    few, many = (ErrorNorm(mean=0.03, log_sd=0.02, samples=n) for n in (2, 50))
    assert few.spread > 1.5 * many.spread >= 1.5 * 0.05
    assert few.slack_log > 1.5 * many.slack_log
    wide, narrow = (ErrorNorm(mean=0.03, log_sd=sd, samples=50) for sd in (0.6, 0.05))
    assert wide.growth_limit > 2 * narrow.growth_limit


def test_what_is_normal_is_learned_where_nobody_says_so() -> None:
    learner = NormLearner()
    for number in range(SAMPLES_TO_LEARN):
        assert learner.norm() is None
        learner = learner.observe(0.02 if number % 2 else 0.08)
    norm = learner.norm()
    assert norm is not None
    assert norm.learned
    assert norm.mean == pytest.approx(0.04)
    assert norm.log_sd == pytest.approx(math.log(2), rel=0.05)
    exact = NormLearner(exact=SAMPLES_TO_LEARN).norm()
    assert exact is not None
    assert exact.is_exact


@pytest.mark.parametrize("changes", [{"mean": -1.0}, {"mean": math.nan}, {"log_sd": math.inf}, {"samples": 0}])
def test_an_impossible_norm_is_refused_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(FieldError, match=next(iter(changes))):
        ErrorNorm(**{"mean": 0.1, "log_sd": 0.1, "samples": 3, **changes})  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(st.lists(errors, max_size=30), st.sampled_from([NORM, EXACT, ErrorNorm(mean=1e-6, log_sd=2.0, samples=1)]))
def test_whatever_comes_the_state_is_finite_repeatable_and_survives_json(seen: list[float], norm: ErrorNorm) -> None:
    states = []
    for _ in range(2):
        test, learner = ErrorTest(), NormLearner()
        for error in seen:
            test, learner = test.observe(error, norm), learner.observe(error)
        states.append((test, learner))
    assert states[0] == states[1]
    test, learner = states[0]
    assert math.isfinite(test.suspicion(norm))
    assert test.growth >= 0 <= test.gross
    assert test.samples == len(seen) == learner.samples
    assert from_document(ErrorTest, json.loads(json.dumps(to_document(test)))) == test
    assert from_document(NormLearner, json.loads(json.dumps(to_document(learner)))) == learner


@pytest.mark.parametrize("change", [{"growth": math.nan}, {"gross": -1.0}, {"samples": True}, {"other": 1}])
def test_a_state_that_no_test_has_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(FieldError):
        from_document(ErrorTest, {**to_document(ErrorTest()), **change})
    with pytest.raises(FieldError):
        from_document(ErrorTest, [])  # type: ignore[arg-type]
