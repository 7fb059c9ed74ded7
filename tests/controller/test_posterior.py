from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.contract.errors import FieldError
from controld.controller.knobs.base import Stage
from controld.controller.posterior import FOREIGN_PRIORS, HALF_LIFE_S, LOCAL_PRIORS, LogRatioPosterior

PRIOR = LOCAL_PRIORS[Stage.ENCODE]


def observe(posterior: LogRatioPosterior, ratios: list[float]) -> LogRatioPosterior:
    for ratio in ratios:
        posterior = posterior.observe(ratio, 0.0)
    return posterior


def test_it_starts_at_one_and_moves_to_what_is_seen() -> None:
    fresh = LogRatioPosterior.fresh(PRIOR)
    assert fresh.correction(0.0).mean_log == 0.0
    assert fresh.correction(0.0).variance == pytest.approx(PRIOR.variance)
    settled = observe(fresh, [0.3] * 60)
    assert settled.correction(0.0).mean_log == pytest.approx(0.3, abs=0.05)
    assert settled.correction(0.0).variance < PRIOR.variance / 5
    assert settled.resets == 0


def test_foreign_times_yield_faster() -> None:
    local, foreign = (
        observe(LogRatioPosterior.fresh(priors[Stage.ENCODE]), [0.5] * 2).correction(0.0).mean_log
        for priors in (LOCAL_PRIORS, FOREIGN_PRIORS)
    )
    assert foreign > 1.5 * local


def test_drift_resets_within_six_observations() -> None:
    settled = observe(LogRatioPosterior.fresh(PRIOR), [0.0, 0.1, -0.1] * 10)
    drifted = observe(settled, [math.log(4.0)] * 6)
    assert drifted.resets >= 1
    assert drifted.correction(0.0).factor == pytest.approx(4.0, rel=0.15)
    back = observe(drifted, [0.0] * 8)
    assert back.correction(0.0).factor == pytest.approx(1.0, rel=0.15)


def test_two_in_a_row_are_a_change_once_the_level_is_known() -> None:
    settled = observe(LogRatioPosterior.fresh(PRIOR), [0.0, 0.1, -0.1] * 10)
    assert observe(settled, [math.log(4.0)] * 2).resets == 1


def test_a_profile_that_two_observations_contradict_does_not_hold_them_up() -> None:
    """Four times slower than profiled: one may be an outlier, two are believed nearly as they are."""
    fresh = LogRatioPosterior.fresh(PRIOR)
    once, twice = (observe(fresh, [math.log(4.0)] * count).correction(0.0).mean_log for count in (1, 2))
    assert once < 0.5 * math.log(4.0)
    assert twice > 0.75 * math.log(4.0)
    # What the prior explains moves it as it always did.
    usual = observe(fresh, [0.2] * 2).correction(0.0).mean_log
    assert usual == pytest.approx(0.2 * 2 / (2 + 0.25**2 / 0.2**2), rel=0.1)


def test_what_is_doubted_moves_nothing_until_it_lasts() -> None:
    settled = observe(LogRatioPosterior.fresh(PRIOR), [0.0, 0.1, -0.1] * 10)
    doubted = settled
    for _ in range(2):
        doubted = doubted.observe(1.5, 0.0, doubt_log=0.7)
    assert doubted.correction(0.0) == settled.correction(0.0)
    assert doubted.resets == 0
    assert doubted.observe(1.5, 0.0, doubt_log=0.7).correction(0.0).mean_log > 1.2


def test_one_outlier_is_no_change() -> None:
    settled = observe(LogRatioPosterior.fresh(PRIOR), [0.0] * 30)
    assert observe(settled, [math.log(50.0)]).resets == 0


def test_steady_noise_seldom_resets() -> None:
    noise = np.random.default_rng(1).normal(0.0, 0.25, size=2000)
    assert observe(LogRatioPosterior.fresh(PRIOR), noise.tolist()).resets <= 4


def test_noise_is_learned() -> None:
    generator = np.random.default_rng(2)
    quiet = observe(LogRatioPosterior.fresh(PRIOR), generator.normal(0, 0.05, 100).tolist())
    loud = observe(LogRatioPosterior.fresh(PRIOR), generator.normal(0, 0.4, 100).tolist())
    assert quiet.noise_variance < PRIOR.noise_variance < loud.noise_variance


def test_evidence_that_nothing_refreshes_fades() -> None:
    slow = observe(LogRatioPosterior.fresh(PRIOR), [1.0] * 20)
    means = [slow.correction(hours * HALF_LIFE_S).mean_log for hours in (0, 2, 6, 20)]
    assert means == sorted(means, reverse=True)
    assert means[-1] == pytest.approx(0.0, abs=0.01)


@given(st.lists(st.floats(-6.9, 6.9), max_size=30), st.floats(0, 1e9))
def test_it_is_always_finite_and_survives_its_list(ratios: list[float], now: float) -> None:
    posterior = LogRatioPosterior.fresh(PRIOR)
    for ratio in ratios:
        posterior = posterior.observe(ratio, now)
        correction = posterior.correction(now)
        assert math.isfinite(correction.factor)
        assert 0 < correction.variance <= max(1.0, PRIOR.variance) * 1.0001
        assert correction.noise_variance > 0
    assert LogRatioPosterior.from_list(posterior.to_list()) == posterior


@pytest.mark.parametrize("broken", [[], [1.0] * 9, [math.nan] * 10, [-1.0] * 10, ["x"] * 10, [0.0] * 10, [True] * 10])
def test_other_lists_are_refused(broken: list[object]) -> None:
    with pytest.raises(FieldError):
        LogRatioPosterior.from_list(broken)
