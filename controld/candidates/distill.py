"""From what trials measured to profiles, and from profiles to the candidates of one place."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from controld.candidates.measurement import TrialMeasurement
from controld.candidates.pareto import non_dominated
from controld.candidates.profile import Profile, fit_stage_time, objective_matrix
from controld.candidates.statistics import upper_bound_95
from controld.contract.trial import CoderMeasurement, SegmentLoss


def distill(trials: Iterable[TrialMeasurement], *, median_transfer_bytes: float | None = None) -> list[Profile]:
    """One profile for each (model, workload, lossy part, coder, hardware pair), in a fixed order.

    Trials of one lossy part (successive fidelities) are put together; a segment measured twice counts once, the
    newest. A configuration without a loss or without a usable measurement of its coder gives no profile.

    Args:
        median_transfer_bytes: V* of the workload; None takes the median of the measured prompts' raw bytes.
    """
    groups: dict[tuple[str, str, str, str, str], list[TrialMeasurement]] = defaultdict(list)
    for trial in trials:
        groups[
            trial.model_fingerprint,
            trial.workload,
            trial.lossy_part.config_id,
            trial.sender_hardware,
            trial.receiver_hardware,
        ].append(trial)
    profiles: list[Profile] = []
    for key in sorted(groups):
        ordered = sorted(groups[key], key=lambda trial: trial.measured_unix_s)
        losses = {(loss.prompt_tokens, loss.segment): loss for trial in ordered for loss in trial.losses}
        coders = {
            (coder.code, coder.prompt_tokens, coder.segment): coder for trial in ordered for coder in trial.coders
        }
        by_code: dict[str, list[CoderMeasurement]] = defaultdict(list)
        for coder in coders.values():
            if _usable(coder):
                by_code[coder.code].append(coder)
        worst = _worst_length(losses.values())
        if worst is None:
            continue
        errors = _errors(losses.values())
        for code in sorted(by_code):
            profile = _profile(ordered[-1], code, by_code[code], worst, median_transfer_bytes)
            profiles.append(replace(profile, **errors))  # type: ignore[arg-type]
    return profiles


def _usable(coder: CoderMeasurement) -> bool:
    seconds = (coder.encode_s, coder.decode_s)
    return coder.raw_bytes > 0 and coder.wire_bytes > 0 and all(math.isfinite(s) and s >= 0 for s in seconds)


def _errors(losses: Iterable[SegmentLoss]) -> dict[str, float]:
    """What the segments say of the reconstruction error, as fields of a profile.

    The prompt length with the largest errors counts: a codec that treats a request's ends apart errs less on short
    prompts, and served ones may all be long. Exact segments beside inexact ones are those that it had to keep as they
    were: they say nothing of it.
    """
    logs: dict[int, list[float]] = defaultdict(list)
    exact = 0
    for loss in losses:
        if loss.reconstruction_error:
            logs[loss.prompt_tokens].append(math.log(loss.reconstruction_error))
        elif loss.reconstruction_error is not None:
            exact += 1
    if not logs:
        return {"error_samples": exact}
    worst = max((values for _, values in sorted(logs.items())), key=fmean)
    log_sd = stdev(worst) if len(worst) > 1 else 0.0
    return {"error_mean": math.exp(fmean(worst)), "error_log_sd": log_sd, "error_samples": len(worst)}


class _Worst:
    """Loss at the worst prompt length, and the largest upper bound over all lengths."""

    __slots__ = ("mean", "prompt_tokens", "samples", "standard_error", "upper")

    def __init__(self, prompt_tokens: int, values: Sequence[float]) -> None:
        self.prompt_tokens = prompt_tokens
        self.samples = len(values)
        self.mean = fmean(values)
        self.standard_error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
        self.upper = upper_bound_95(self.mean, self.standard_error, self.samples)


def _worst_length(losses: Iterable[SegmentLoss]) -> _Worst | None:
    by_length: dict[int, list[float]] = defaultdict(list)
    for loss in losses:
        # A KL divergence is not negative; rounding may make it so by some 1e-9.
        by_length[loss.prompt_tokens].append(max(loss.loss_nats, 0.0))
    if not by_length:
        return None
    lengths = [_Worst(tokens, values) for tokens, values in sorted(by_length.items())]
    worst = max(lengths, key=lambda length: length.mean)
    worst.upper = max(length.upper for length in lengths)
    return worst


def _profile(
    trial: TrialMeasurement,
    code: str,
    measurements: Sequence[CoderMeasurement],
    worst: _Worst,
    median_transfer_bytes: float | None,
) -> Profile:
    raw_bytes = [m.raw_bytes for m in measurements]
    return Profile(
        configuration=trial.lossy_part.with_coder(code),
        workload=trial.workload,
        model_fingerprint=trial.model_fingerprint,
        loss_mean_nats=worst.mean,
        loss_se_nats=worst.standard_error,
        loss_samples=worst.samples,
        loss_upper_nats=worst.upper,
        worst_prompt_tokens=worst.prompt_tokens,
        ratio=sum(raw_bytes) / sum(m.wire_bytes for m in measurements),
        encode=fit_stage_time(raw_bytes, [m.encode_s for m in measurements]),
        decode=fit_stage_time(raw_bytes, [m.decode_s for m in measurements]),
        median_transfer_bytes=median_transfer_bytes or float(median(raw_bytes)),
        sender_hardware=trial.sender_hardware,
        receiver_hardware=trial.receiver_hardware,
        measured_unix_s=trial.measured_unix_s,
        corpus=trial.corpus,
        provenance=f"study {trial.study_id}, trial {trial.trial_id}",
    )


def select_profiles(
    profiles: Iterable[Profile],
    *,
    model_fingerprint: str,
    workload: str,
    sender_hardware: str,
    receiver_hardware: str,
) -> list[Profile]:
    """For each configuration the profile that fits this place best; sorted by arm id.

    Quality never comes from another model or workload. Times may come from other hardware (they are priors then):
    profiles of both machines first, then of one of them, then the newest.
    """
    best: dict[str, tuple[tuple[int, float], Profile]] = {}
    for profile in profiles:
        if (profile.model_fingerprint, profile.workload) != (model_fingerprint, workload):
            continue
        fit = int(profile.sender_hardware == sender_hardware) + int(profile.receiver_hardware == receiver_hardware)
        rank = (fit, profile.measured_unix_s)
        if profile.arm_id not in best or rank > best[profile.arm_id][0]:
            best[profile.arm_id] = (rank, profile)
    return [best[arm_id][1] for arm_id in sorted(best)]


def pareto_front(profiles: Sequence[Profile]) -> list[Profile]:
    """The profiles that no other one beats in loss, latency and bytes together; input order is kept."""
    mask = non_dominated(objective_matrix(profiles))
    return [profile for profile, keep in zip(profiles, mask, strict=True) if keep]
