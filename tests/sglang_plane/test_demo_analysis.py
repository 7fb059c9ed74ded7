"""Figures are functions of the logs: known logs give known figures, and a run that proves nothing is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controld.contract.errors import ControldError
from dataplanes.sglang.demo.analysis import Sample, bootstrap_ratio, enough_pairs, ratios_by_phase, summarise
from dataplanes.sglang.demo.plan import ARMS, DEMO, EVIDENCE
from dataplanes.sglang.demo.policies import choose_separating_phase

FACTORS = {"raw": 3.0, "static-1": 1.2, "static-2": 1.1, "static-3": 1.5, "controld": 1.0}


def samples(phases: tuple[str, ...] = ("fast", "slow"), pairs: int = 30, noise: float = 0.02) -> list[Sample]:
    rng = np.random.default_rng(3)
    return [
        Sample(
            phase=phase, pair=pair, arm=arm, prompt_tokens=512,
            ttft_s=(1 + pair / 10) * factor * math.exp(rng.normal(0, noise)), jct_s=2 * factor,
        )
        for phase in phases for pair in range(pairs) for arm, factor in FACTORS.items()
    ]  # fmt: skip


def effects(arm: str = "controld", path: str = "coded") -> list[dict[str, Any]]:
    common = {"phase": "slow", "reason": "", "explored": False, "raw_bytes": 100, "arm_id": "a1"}
    return [
        {**common, "arm": arm, "path": path, "wire_bytes": 25},
        {**common, "arm": "raw", "path": "raw", "wire_bytes": 100},
    ]


def summary(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "seed": 1, "max_quality_loss_nats": 0.02, "quality": {"controld": {"mean": 0.015, "se": 0.001, "prompts": 9}},
        "static_configurations": {}, "separating_phase": "slow", "attached": True,
    }  # fmt: skip
    logged = changes.pop("effects", effects())
    return summarise(changes.pop("samples", samples()), logged, **{**arguments, **changes})


def test_the_ratio_of_pairs_is_found_whatever_the_prompts_cost() -> None:
    found = ratios_by_phase(samples(), "raw", "controld", "ttft_s", seed=1)
    for phase in ("fast", "slow", "overall"):
        assert found[phase].ratio == pytest.approx(3.0, rel=0.02)
        assert found[phase].low < 3.0 < found[phase].high
    assert found["overall"].pairs == 60


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(5)
    covered = 0
    for trial in range(200):
        ratio = bootstrap_ratio([rng.normal(0.1, 0.2, (8, 4)).tolist()], seed=trial)
        covered += ratio.low <= math.exp(0.1) <= ratio.high
    assert 175 <= covered <= 199


def test_the_spread_between_prompt_lengths_is_no_noise() -> None:
    mixed = [
        Sample(phase="slow", pair=pair, arm=arm, prompt_tokens=length, ttft_s=ttft_s, jct_s=1.0)
        for pair, length in enumerate([64, 2048] * 6)
        for arm, ttft_s in (("controld", 1.0), ("raw", 1.1 if length == 64 else 5.0))
    ]
    found = ratios_by_phase(mixed, "raw", "controld", "ttft_s", seed=1)["slow"]
    assert found.ratio == pytest.approx(math.sqrt(5.5))
    assert found.half_width < 1e-9
    thin = ratios_by_phase(mixed[:10], "raw", "controld", "ttft_s", seed=1)["slow"]
    assert thin.half_width > 0.1, "two prompts of a length say nothing of its noise"


def test_a_noisy_phase_goes_on_and_a_quiet_one_stops() -> None:
    limits = {"min_pairs": 24, "max_pairs": 60, "half_width": 0.04, "seed": 1}
    assert not enough_pairs(samples(pairs=23), "slow", **limits)
    assert enough_pairs(samples(pairs=24, noise=0.02), "slow", **limits)
    assert not enough_pairs(samples(pairs=30, noise=0.5), "slow", **limits)
    assert enough_pairs(samples(pairs=60, noise=0.5), "slow", **limits)


def test_the_summary_names_the_best_static_and_holds_its_verdicts() -> None:
    result = summary()
    assert result["best_static"] == "static-2"
    assert result["ttft_best_static_over_controld"]["overall"]["ratio"] == pytest.approx(1.1, rel=0.02)
    assert result["jct_raw_over_controld"]["slow"]["ratio"] == pytest.approx(3.0)
    assert all(verdict["holds"] for verdict in result["verdicts"].values())
    assert result["wire_bytes"]["controld"]["ratio"] == 4.0


def test_the_best_fixed_arm_is_found_phase_by_phase() -> None:
    reversed_arms = {"raw": "static-2", "static-2": "raw"}
    mixed = [
        replace(sample, arm=reversed_arms.get(sample.arm, sample.arm)) if sample.phase == "fast" else sample
        for sample in samples()
    ]
    found = summary(samples=mixed)["ttft_best_arm_of_phase_over_controld"]
    assert {phase: best["arm"] for phase, best in found.items()} == {"fast": "raw", "slow": "static-2"}
    assert found["fast"]["ratio"] == pytest.approx(1.1, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"quality": {"controld": {"mean": 0.03, "se": 0.001, "prompts": 9}}}, "quality_within_limit"),
        ({"quality": None}, "quality_within_limit"),
        ({"samples": [s for s in samples() if s.phase == "fast"]}, "slow_faster_than_raw"),
    ],
)
def test_a_missed_claim_is_said(changes: dict[str, Any], failing: str) -> None:
    assert not summary(**changes)["verdicts"][failing]["holds"]


@pytest.mark.parametrize(
    "changes", [{"attached": False}, {"effects": effects(path="raw")}, {"effects": effects(arm="static-1")}]
)
def test_a_run_that_proves_nothing_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ControldError, match="proves nothing"):
        summary(**changes)


def test_plans_cover_the_prescribed_work() -> None:
    assert [phase.name for phase in EVIDENCE.phases] == ["fast", "medium", "slow", "recovering"]
    assert EVIDENCE.min_pairs >= 24
    assert EVIDENCE.max_pairs == 60
    assert min(EVIDENCE.prompt_tokens) == 64
    assert max(EVIDENCE.prompt_tokens) == 2048
    assert EVIDENCE.phases[0].rates_bits_per_s[0] >= 1e9
    for plan in (EVIDENCE, DEMO):
        assert set(plan.arm_order("slow", 3)) == set(ARMS)
        assert plan.arm_order("slow", 3) == plan.arm_order("slow", 3)
    recovering = EVIDENCE.phases[3]
    rates = [recovering.rate_at(done, 24) for done in range(30)]
    assert rates == sorted(rates)
    assert len(set(rates)) == 3


def candidate(ratio: float, seconds_per_byte: float) -> dict[str, Any]:
    stage = {"a_s": 0.001, "b_s_per_byte": seconds_per_byte}
    return {
        "configuration": {"transform": "none", "ratio": ratio}, "config_id": f"{ratio}", "loss_upper_nats": 0.01,
        "ratio": ratio, "encode": stage, "decode": stage,
    }  # fmt: skip


def test_the_separating_phase_is_where_no_static_arm_is_the_best() -> None:
    quick, small, between = candidate(2, 1e-9), candidate(25, 3e-8), candidate(4, 5e-9)
    statics = {"static-1": small, "static-2": small, "static-3": small}
    assert choose_separating_phase([quick, small, between], statics, EVIDENCE, 23_040) == "fast"
    statics = {"static-1": quick, "static-2": between, "static-3": between}
    assert choose_separating_phase([quick, small, between], statics, EVIDENCE, 23_040) == "slow"
    unmeasured = {**small, "loss_upper_nats": None}
    assert choose_separating_phase([quick, unmeasured], {"static-1": quick}, EVIDENCE, 23_040) != "slow"
