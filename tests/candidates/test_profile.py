from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.candidates.profile import (
    MAX_RATIO,
    MAX_STAGE_A_S,
    MAX_STAGE_B_S_PER_BYTE,
    MAX_TRANSFER_BYTES,
    MAX_UNIX_S,
    MIN_RATIO,
    MIN_TRANSFER_BYTES,
    Profile,
    StageTime,
    fit_stage_time,
)
from controld.candidates.statistics import normal_cdf, t_quantile_95, upper_bound_95
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError

CONFIGURATION = Configuration({"transform": "hadamard", "key_levels": 12, "code": "bits"})


def profile(**changes: object) -> Profile:
    values: dict[str, object] = {
        "configuration": CONFIGURATION,
        "workload": "dialogue",
        "model_fingerprint": "f",
        "loss_mean_nats": 0.01,
        "loss_se_nats": 0.001,
        "loss_samples": 8,
        "worst_prompt_tokens": 2048,
        "ratio": 4.0,
        "encode": StageTime(1e-3, 2e-9),
        "decode": StageTime(2e-3, 1e-9),
        "median_transfer_bytes": 1e7,
    }
    return Profile(**{**values, **changes})  # type: ignore[arg-type]


@given(a=st.floats(0, 1), b=st.floats(0, 1e-6))
def test_an_exact_line_is_found(a: float, b: float) -> None:
    volumes = np.array([1e6, 5e6, 2e7, 4e7])
    fitted = fit_stage_time(volumes, a + b * volumes)
    assert fitted.seconds(1e7) == pytest.approx(a + b * 1e7, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.floats(1e5, 1e9), st.floats(0, 10)), min_size=1, max_size=20))
def test_no_coefficient_is_ever_negative(pairs: list[tuple[float, float]]) -> None:
    fitted = fit_stage_time([v for v, _ in pairs], [s for _, s in pairs])
    assert fitted.a_s >= 0
    assert fitted.b_s_per_byte >= 0


def test_a_falling_line_becomes_a_constant_and_a_negative_intercept_a_ray() -> None:
    assert fit_stage_time([1e6, 2e6], [2.0, 1.0], weights=[1.0, 1.0]) == StageTime(1.5, 0.0)
    fitted = fit_stage_time([1e6, 2e6], [0.5, 2.0], weights=[1.0, 1.0])
    assert fitted.a_s == 0.0
    assert fitted.b_s_per_byte == pytest.approx((0.5e6 + 4e6) / (1e12 + 4e12))


def test_one_size_says_nothing_of_the_intercept() -> None:
    fitted = fit_stage_time([1e6, 1e6], [0.1, 0.3])
    assert fitted.a_s == 0
    assert fitted.b_s_per_byte == pytest.approx(0.2e-6)


def test_useless_pairs_are_left_out_and_nothing_left_is_an_error() -> None:
    assert fit_stage_time([1e6, 2e6, 0.0, 3e6], [1.0, 2.0, 5.0, math.nan]).seconds(3e6) == pytest.approx(3.0)
    with pytest.raises(FieldError):
        fit_stage_time([0.0, 1e6], [1.0, math.inf])


def test_the_bound_needs_two_samples_and_fails_closed() -> None:
    assert upper_bound_95(0.01, 0.001, 8) == pytest.approx(0.01 + 1.895 * 0.001)
    assert upper_bound_95(0.01, 0.0, 1) == math.inf
    assert upper_bound_95(math.nan, 0.0, 9) == math.inf
    assert t_quantile_95(10_000) == pytest.approx(1.645, abs=1e-3)
    assert t_quantile_95(31) == pytest.approx(1.6955, abs=1e-3)


def test_the_normal_distribution() -> None:
    assert normal_cdf(np.array([0.0, 1.6448536, -1.6448536, -40.0])) == pytest.approx([0.5, 0.95, 0.05, 0.0], abs=1e-6)


def test_objectives_follow_their_definitions() -> None:
    p = profile()
    assert p.objectives == pytest.approx((0.01, (3e-3 + 3e-2) / 1e7, 0.25))
    assert p.loss_upper_nats == pytest.approx(0.011895)
    assert p.arm_id == CONFIGURATION.config_id


@pytest.mark.parametrize("samples", [1, 8])
def test_json_round_trip(samples: int) -> None:
    p = profile(loss_samples=samples)
    assert Profile.from_json(p.to_json()) == p


@pytest.mark.parametrize(
    "changes",
    [
        {"ratio": 0.0},
        {"ratio": math.inf},
        {"loss_mean_nats": math.nan},
        {"loss_se_nats": -1.0},
        {"arm_id": "0123456789abcdef"},
        {"loss_upper_nats": 0.001},
        {"error_mean": math.nan},
        {"error_mean": 1e9},
        {"error_log_sd": math.inf},
        {"error_samples": -1},
        {"error_samples": 2**31},
        {"loss_samples": 10**400},
        {"loss_mean_nats": 1e308},
        {"loss_se_nats": 1e308},
        {"error_log_sd": 1e4},
        {"ratio": 5e-324},
        {"ratio": 1e308},
        {"median_transfer_bytes": 5e-324},
        {"median_transfer_bytes": 1e300},
        {"encode": StageTime(1e308, 0.0)},
        {"decode": StageTime(0.0, 1e308)},
        {"measured_unix_s": 1e308},
    ],
)
def test_impossible_profiles_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FieldError):
        profile(**changes)


def test_whatever_is_let_in_has_finite_objectives() -> None:
    slow, free = StageTime(MAX_STAGE_A_S, MAX_STAGE_B_S_PER_BYTE), StageTime(0.0, 0.0)
    for ratio in (MIN_RATIO, MAX_RATIO):
        for volume in (MIN_TRANSFER_BYTES, MAX_TRANSFER_BYTES):
            for stage in (slow, free):
                made = profile(ratio=ratio, median_transfer_bytes=volume, encode=stage, decode=stage)
                assert np.isfinite(made.objectives).all()
                assert math.isfinite(stage.seconds(volume))
    shown = time.gmtime(profile(measured_unix_s=MAX_UNIX_S).measured_unix_s)
    assert shown.tm_year == 9999


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "loss_upper_nats": 1}'])
def test_other_documents_are_refused(text: str) -> None:
    with pytest.raises(FieldError):
        Profile.from_json(text)


def test_a_document_of_before_reconstruction_errors_is_a_profile_without_any() -> None:
    whole = profile(error_mean=0.03, error_log_sd=0.1, error_samples=12)
    assert Profile.from_json(whole.to_json()) == whole
    document = whole.to_document()
    for name in ("error_mean", "error_log_sd", "error_samples"):
        del document[name]
    old = Profile.from_document(document)
    assert old.error_samples == 0
    assert (old.arm_id, old.quality_key, old.objectives) == (whole.arm_id, whole.quality_key, whole.objectives)
