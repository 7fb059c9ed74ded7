"""Figures from logs: paired ratios with bootstrap intervals, decisions counted, verdicts on the claims.

Everything here is a pure function of the client's and the effects' logs, so `--recompute` gives the same figures.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controld.contract.errors import ControldError
from dataplanes.sglang.demo.plan import CONTROLD, RAW, STATICS
from dataplanes.sglang.demo.policies import is_published

RESAMPLES = 10_000
STRATUM = 3
OVERALL = "overall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request as the client saw it. Seconds; `pair` numbers the prompt within its phase."""

    phase: str
    pair: int
    arm: str
    prompt_tokens: int
    ttft_s: float
    jct_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A geometric mean of per-prompt ratios with its 95 % bootstrap interval."""

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def half_width(self) -> float:
        """Half the interval, as a fraction of the ratio."""
        return (self.high - self.low) / 2 / self.ratio

    def to_json(self) -> dict[str, float]:
        return {"ratio": self.ratio, "low": self.low, "high": self.high, "pairs": self.pairs}


def paired_log_ratios(
    samples: Iterable[Sample], numerator: str, denominator: str, metric: str
) -> dict[str, list[list[float]]]:
    """log(numerator / denominator) of one metric for every prompt that both arms served, by phase and prompt length.

    A length is a stratum of its own only where every length has at least `STRATUM` prompts; else all are one.
    """
    seen: dict[tuple[str, int], dict[str, Sample]] = defaultdict(dict)
    for sample in samples:
        seen[sample.phase, sample.pair][sample.arm] = sample
    by_length: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for (phase, _), by_arm in seen.items():
        if numerator in by_arm and denominator in by_arm:
            ratio = math.log(getattr(by_arm[numerator], metric) / getattr(by_arm[denominator], metric))
            by_length[phase][by_arm[numerator].prompt_tokens].append(ratio)
    result = {}
    for phase, lengths in by_length.items():
        strata = list(lengths.values())
        thin = any(len(stratum) < STRATUM for stratum in strata)
        result[phase] = [[value for stratum in strata for value in stratum]] if thin else strata
    return result


def bootstrap_ratio(phases: Sequence[Sequence[Sequence[float]]], seed: int) -> Ratio:
    """Geometric mean over phases of equal weight, over strata of equal weight in each, resampled within each stratum.

    The mix of prompt lengths is chosen, not sampled; so its spread is no part of the interval. Residuals are widened by
    sqrt(n / (n - 1)), without which resampling few values would understate their variance.

    Args:
        phases: log ratios by phase and stratum; no stratum is empty.
        seed: of the resampling.

    Raises:
        ValueError: there is nothing to average.
    """
    if not phases or any(not phase or not all(phase) for phase in phases):
        raise ValueError("a phase without pairs has no ratio")
    rng = np.random.default_rng(seed)
    means, centre = np.zeros(RESAMPLES), 0.0
    for phase in phases:
        for stratum in phase:
            values = np.asarray(stratum)
            count, mean = len(values), float(values.mean())
            widened = mean + (values - mean) * math.sqrt(count / (count - 1) if count > 1 else 1.0)
            weight = 1 / len(phase) / len(phases)
            means += widened[rng.integers(0, count, (RESAMPLES, count))].mean(axis=1) * weight
            centre += mean * weight
    low, high = np.exp(np.quantile(means, (0.025, 0.975)))
    pairs = sum(len(stratum) for phase in phases for stratum in phase)
    return Ratio(ratio=math.exp(centre), low=float(low), high=float(high), pairs=pairs)


def ratios_by_phase(
    samples: Sequence[Sample], numerator: str, denominator: str, metric: str, seed: int
) -> dict[str, Ratio]:
    """The ratio of each phase, and `overall` with phases weighted equally."""
    logs = paired_log_ratios(samples, numerator, denominator, metric)
    result = {phase: bootstrap_ratio([strata], seed) for phase, strata in logs.items()}
    if logs:
        result[OVERALL] = bootstrap_ratio(list(logs.values()), seed)
    return result


def best_static(samples: Sequence[Sample], seed: int, arms: Iterable[str] = STATICS) -> str:
    """The one of some static arms with the lowest TTFT over the whole schedule, known only in hindsight.

    Raises:
        ControldError: none of them served a prompt.
    """
    overall = {
        arm: ratios_by_phase(samples, arm, RAW, "ttft_s", seed)[OVERALL].ratio for arm in arms if _served(samples, arm)
    }
    if not overall:
        raise ControldError("no static arm served a prompt", code="evidence.no_static")
    return min(overall, key=lambda arm: overall[arm])


def best_arm_by_phase(samples: Sequence[Sample], seed: int) -> dict[str, dict[str, Any]]:
    """The fixed arm, raw included, with the lowest TTFT of each phase, known only in hindsight, over controld.

    Below 1 by controld's regret. The least of several noisy means is too low on average, so this overstates the regret.
    """
    result: dict[str, dict[str, Any]] = {}
    for arm in (RAW, *STATICS):
        for phase, ratio in ratios_by_phase(samples, arm, CONTROLD, "ttft_s", seed).items():
            if phase != OVERALL and (phase not in result or ratio.ratio < result[phase]["ratio"]):
                result[phase] = {"arm": arm, **ratio.to_json()}
    return result


def _served(samples: Sequence[Sample], arm: str) -> bool:
    return any(sample.arm == arm for sample in samples)


def enough_pairs(
    samples: Sequence[Sample], phase: str, *, min_pairs: int, max_pairs: int, half_width: float, seed: int
) -> bool:
    """Whether a phase may end: all intervals against controld narrow enough, or the most pairs done."""
    mine = [sample for sample in samples if sample.phase == phase]
    done = len({sample.pair for sample in mine})
    if done < min_pairs:
        return False
    if done >= max_pairs:
        return True
    others = [arm for arm in (RAW, *STATICS) if _served(mine, arm)]
    widths = [ratios_by_phase(mine, arm, CONTROLD, "ttft_s", seed)[phase].half_width for arm in others]
    return max(widths) < half_width


def summarise(
    samples: Sequence[Sample],
    effects: Sequence[Mapping[str, Any]],
    *,
    seed: int,
    max_quality_loss_nats: float,
    quality: Mapping[str, Any] | None,
    static_configurations: Mapping[str, Any],
    separating_phase: str,
    attached: bool,
) -> dict[str, Any]:
    """The summary that the page, the table and the documents read.

    Args:
        samples: what the client saw.
        effects: the sender's halves of all transfers, as the daemon stored them, with the client's `phase` and `arm`.
        quality: the re-measured loss on the served prompts, by arm; None where it was not measured.
        static_configurations: arm name to configuration.
        separating_phase: where controld should beat the best static arm, chosen before the run.
        attached: whether the plane said from inside that it is attached.

    Raises:
        ControldError: the plane was not attached, or nothing was compressed: such a run proves nothing.
    """
    coded = [effect for effect in effects if effect["path"] == "coded"]
    if not attached:
        raise ControldError("the plane was not attached; this run proves nothing", code="evidence.not_attached")
    if not any(effect["arm"] == CONTROLD for effect in coded):
        raise ControldError("controld compressed nothing; this run proves nothing", code="evidence.nothing_compressed")
    static = best_static(samples, seed)
    published = [arm for arm, configuration in static_configurations.items() if is_published(configuration)]
    compared = {"raw": RAW, "best_static": static}
    if published:
        compared["best_published"] = best_static(samples, seed, published)
    summary: dict[str, Any] = {
        "best_static": static,
        "best_published": compared.get("best_published"),
        "static_configurations": dict(static_configurations),
        "separating_phase": separating_phase,
        "max_quality_loss_nats": max_quality_loss_nats,
        "quality_loss_nats": quality["controld"] if quality else None,
        "quality": dict(quality) if quality else None,
    }
    for metric in ("ttft", "jct"):
        for name, arm in compared.items():
            ratios = ratios_by_phase(samples, arm, CONTROLD, f"{metric}_s", seed)
            summary[f"{metric}_{name}_over_controld"] = {phase: ratio.to_json() for phase, ratio in ratios.items()}
    summary["ttft_best_arm_of_phase_over_controld"] = best_arm_by_phase(samples, seed)
    summary["ttft_s"] = _medians(samples)
    summary["decisions"] = _decisions(effects)
    summary["wire_bytes"] = _bytes(effects)
    summary["verdicts"] = verdicts(summary)
    return summary


def _medians(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    grouped: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        grouped[sample.phase][sample.arm].append(sample.ttft_s)
    return {
        phase: {arm: float(np.median(values)) for arm, values in sorted(by_arm.items())}
        for phase, by_arm in grouped.items()
    }


def _decisions(effects: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    mine = [effect for effect in effects if effect["arm"] == CONTROLD]
    by_phase: dict[str, Counter[str]] = defaultdict(Counter)
    for effect in mine:
        by_phase[effect["phase"]][effect["arm_id"]] += 1
    return {
        "by_arm": dict(Counter(effect["arm_id"] for effect in mine)),
        "by_phase": {phase: dict(counts) for phase, counts in by_phase.items()},
        "by_path": dict(Counter(effect["path"] for effect in mine)),
        "by_reason": dict(Counter(effect["reason"] or "as decided" for effect in mine)),
        "explored": sum(bool(effect["explored"]) for effect in mine),
    }


def _bytes(effects: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for effect in effects:
        totals[effect["arm"]][0] += effect["raw_bytes"]
        totals[effect["arm"]][1] += effect["wire_bytes"]
    return {
        arm: {"raw_bytes": raw, "wire_bytes": wire, "ratio": raw / wire if wire else 0.0}
        for arm, (raw, wire) in sorted(totals.items())
    }


def loaded_latencies(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The loaded run: median and 90th percentile of TTFT by arm, and requests that failed."""
    result: dict[str, Any] = {}
    for record in records:
        if record["kind"] == "loaded":
            entry = result.setdefault(record["arm"], {"ttft_s": [], "failed": 0})
            if "error" in record:
                entry["failed"] += 1
            else:
                entry["ttft_s"].append(record["ttft_s"])
    for entry in result.values():
        times = sorted(entry.pop("ttft_s"))
        if times:
            entry["ttft_median_s"] = times[len(times) // 2]
            entry["ttft_p90_s"] = times[min(len(times) - 1, len(times) * 9 // 10)]
        entry["requests"] = len(times)
    return result


def verdicts(summary: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each claim with its figure and whether it holds; a claim whose figure is missing does not hold."""
    raw, static = summary["ttft_raw_over_controld"], summary["ttft_best_static_over_controld"]
    loss, limit = summary["quality_loss_nats"], summary["max_quality_loss_nats"]

    def verdict(claim: str, holds: bool, figure: Any) -> dict[str, Any]:
        return {"claim": claim, "holds": bool(holds), "figure": figure}

    slow, fast, overall = raw.get("slow"), raw.get("fast"), static.get(OVERALL)
    phase = summary["separating_phase"]
    separating = static.get(phase)
    return {
        "slow_faster_than_raw": verdict(
            "slow link: raw over controld above 1 with the whole interval", slow is not None and slow["low"] > 1, slow
        ),
        "fast_no_worse_than_raw": verdict(
            "fast link: raw over controld at least 0.95", fast is not None and fast["ratio"] >= 0.95, fast
        ),
        "no_worse_than_best_static": verdict(
            "whole schedule: best static over controld at least 0.98",
            overall is not None and overall["ratio"] >= 0.98,
            overall,
        ),
        "faster_than_best_static_somewhere": verdict(
            f"{phase} link (chosen before the run): best static over controld above 1 with the whole interval",
            separating is not None and separating["low"] > 1,
            separating,
        ),
        "quality_within_limit": verdict(
            f"loss re-measured on the served prompts at most {limit} nats",
            loss is not None and loss["mean"] <= limit,
            loss,
        ),
    }
