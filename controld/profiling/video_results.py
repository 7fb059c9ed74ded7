"""What trials of a video engine measured, as the candidate store and the search want it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev

from controld.candidates.video_profile import STEPS, Source, VideoMemory, VideoProfile
from controld.contract.configuration import Configuration
from controld.contract.trial import ClipLoss, EngineMeasurement
from controld.contract.variant import with_variant
from controld.controller.knobs.video import predict
from controld.profiling.search.observation import Observation, VariantCost
from controld.profiling.study import Study, Trial, TrialState


def video_profiles_of(studies: Iterable[Study], measured: Study, trial: Trial) -> tuple[VideoProfile, ...]:
    """Profiles of a trial's lossy part, from every trial that measured it on the same model, clips and hardware.

    A pass does not depend on the number of steps, so settings that differ in nothing else have equal times: those of
    the least disturbed measurement. The profiles of all of them come back, for the trial may have been that one.

    Args:
        studies: all of them, `measured` with the trial in it included.
        measured: the trial's study.
    """
    assert trial.outcome is not None
    parts: dict[Configuration, list[tuple[Study, Trial]]] = defaultdict(list)
    for study in studies:
        if not study.is_video or study.model_fingerprint != measured.model_fingerprint:
            continue
        for other in study.trials.values():
            if _is_of(other, trial):
                parts[other.task.lossy].append((study, other))
    passes = _least(measurement for trials in parts.values() for _, other in trials for measurement in _engine(other))
    return tuple(profile for trials in parts.values() for profile in _profiles(trials, passes))


def video_observation(lossy: Configuration, trials: Sequence[Trial]) -> Observation | None:
    """A lossy part with all that measured trials on one hardware say of it; None where they say nothing."""
    worst = _worst_length(trials)
    if worst is None:
        return None
    mean, error, samples = worst
    costs = []
    least = _least(measurement for trial in trials for measurement in _engine(trial))
    for measured in _newest(trials):
        profile = _profile_of(trials[0], measured, least[measured.variant], worst)
        costs.append(
            VariantCost(
                variant=measured.variant,
                size_ratio=_total(profile) / measured.reference_bytes,
                seconds_per_unit=predict(profile).chunk_s / profile.frames_per_chunk,
            )
        )
    return Observation(lossy=lossy, loss=mean, loss_se=error, segments=samples, costs=tuple(costs))


def _is_of(other: Trial, trial: Trial) -> bool:
    """Whether one trial says something of another's setting, or of one that differs in the number of steps only."""
    assert trial.outcome is not None
    return (
        other.state is TrialState.MEASURED
        and other.outcome is not None
        and other.task.workload == trial.task.workload
        and _pass_of(other.task.lossy) == _pass_of(trial.task.lossy)
        and (other.outcome.corpus, other.hardware) == (trial.outcome.corpus, trial.hardware)
    )


def _pass_of(lossy: Configuration) -> dict[str, object]:
    return {name: value for name, value in lossy.items() if name != STEPS}


def _engine(trial: Trial) -> tuple[EngineMeasurement, ...]:
    return trial.outcome.engine if trial.outcome is not None else ()


def _least(measurements: Iterable[EngineMeasurement]) -> dict[str, tuple[float, float]]:
    """Seconds of a pass and of decoding by variant: what else the machine does makes both longer, never shorter."""
    found: dict[str, tuple[float, float]] = {}
    for measured in measurements:
        forward_s, vae_s = found.get(measured.variant, (math.inf, math.inf))
        found[measured.variant] = min(forward_s, measured.forward_s), min(vae_s, measured.vae_s or math.inf)
    return {variant: (forward_s, 0.0 if vae_s == math.inf else vae_s) for variant, (forward_s, vae_s) in found.items()}


def _newest(trials: Iterable[Trial]) -> list[EngineMeasurement]:
    """One for each variant."""
    ordered = sorted(trials, key=lambda trial: trial.finished_unix_s)
    return list({measured.variant: measured for trial in ordered for measured in _engine(trial)}.values())


def _worst_length(trials: Iterable[Trial]) -> tuple[float, float, int] | None:
    """Mean, standard error and number of clips at the length that loses most; a clip measured twice counts once."""
    newest: dict[tuple[int, int], ClipLoss] = {}
    for trial in sorted(trials, key=lambda trial: trial.finished_unix_s):
        newest |= {(clip.chunks, clip.segment): clip for clip in (trial.outcome.clips if trial.outcome else ())}
    by_length: dict[int, list[float]] = defaultdict(list)
    for clip in newest.values():
        by_length[clip.chunks].append(clip.loss)
    if not by_length:
        return None
    values = max(by_length.values(), key=fmean)
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0, len(values)


def _profiles(trials: Sequence[tuple[Study, Trial]], passes: dict[str, tuple[float, float]]) -> list[VideoProfile]:
    """Of one lossy part, one for each variant."""
    study, last = max(trials, key=lambda pair: pair[1].finished_unix_s)
    only = [trial for _, trial in trials]
    worst = _worst_length(only)
    if worst is None:
        return []
    return [
        _profile_of(last, measured, passes[measured.variant], worst, study.model_fingerprint)
        for measured in _newest(only)
    ]


def _profile_of(
    trial: Trial,
    measured: EngineMeasurement,
    seconds: tuple[float, float],
    loss: tuple[float, float, int],
    model_fingerprint: str = "",
) -> VideoProfile:
    """One variant, with the date and the place of a trial."""
    memory = measured.memory
    return VideoProfile(
        configuration=with_variant(trial.task.lossy, measured.variant),
        source=Source.MEASURED,
        forward_s=seconds[0],
        vae_s=seconds[1],
        frames_per_chunk=measured.frames_per_chunk,
        workload=trial.task.workload,
        model_fingerprint=model_fingerprint,
        hardware=trial.hardware,
        loss_mean=loss[0],
        loss_se=loss[1],
        loss_samples=loss[2],
        memory=VideoMemory(
            weights_bytes=memory.weights_bytes,
            kv_bytes=memory.kv_bytes,
            activation_bytes=memory.activation_bytes,
            session_bytes=measured.session_bytes,
        ),
        drift=measured.drift,
        motion=measured.motion,
        measured_unix_s=trial.finished_unix_s,
        provenance=f"study {trial.task.study_id}, trial {trial.trial_id}",
    )


def _total(profile: VideoProfile) -> int:
    assert profile.memory is not None
    return profile.memory.total(1)
