"""What trials measured, as the candidate store and the search want it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controld.candidates.distill import distill
from controld.candidates.measurement import TrialMeasurement
from controld.candidates.profile import Profile
from controld.candidates.stored import profile_key
from controld.candidates.video_exchange import video_records
from controld.profiling.search.observation import Observation, VariantCost
from controld.profiling.study import Study, Trial, TrialState
from controld.profiling.video_results import video_observation, video_profiles_of
from controld.store.records import ProfileRecord


def measurement(study: Study, trial: Trial) -> TrialMeasurement:
    """What a measured trial gave."""
    assert trial.outcome is not None
    return TrialMeasurement(
        lossy_part=trial.task.lossy,
        workload=trial.task.workload,
        model_fingerprint=study.model_fingerprint,
        losses=trial.outcome.losses,
        coders=trial.outcome.coders,
        sender_hardware=trial.hardware,
        receiver_hardware=trial.hardware,
        measured_unix_s=trial.finished_unix_s,
        corpus=trial.outcome.corpus,
        study_id=study.study_id,
        trial_id=trial.trial_id,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a measured trial changes in the store.

    Args:
        own: of its lossy part.
        siblings: of other parts of which it says something, too; those that are not stored any more stay away.
    """

    own: tuple[ProfileRecord, ...]
    siblings: tuple[ProfileRecord, ...] = ()


def rows_of(studies: Iterable[Study], measured: Study, trial: Trial) -> Rows:
    """See `profiles_of` and `video_profiles_of`."""
    if not measured.is_video:
        return Rows(own=tuple(profile_record(profile) for profile in profiles_of(studies, measured, trial)))
    found = video_profiles_of(studies, measured, trial)
    lossy = trial.task.lossy.items()
    own = [profile for profile in found if lossy <= profile.configuration.items()]
    return Rows(
        own=tuple(video_records(own)),
        siblings=tuple(video_records([profile for profile in found if profile not in own])),
    )


def profiles_of(studies: Iterable[Study], measured: Study, trial: Trial) -> tuple[Profile, ...]:
    """Profiles of a trial's lossy part, from every trial that measured it on the same model, texts and hardware.

    Args:
        studies: all of them, `measured` with the trial in it included.
        measured: the trial's study.
    """
    corpus = trial.outcome.corpus if trial.outcome else ""
    measurements = [
        measurement(study, other)
        for study in studies
        if study.model_fingerprint == measured.model_fingerprint
        for other in study.trials.values()
        if other.state is TrialState.MEASURED
        and other.outcome is not None
        and other.task.workload == trial.task.workload
        and other.task.lossy == trial.task.lossy
        and other.task.continuation_tokens == trial.task.continuation_tokens
        and (other.outcome.corpus, other.hardware) == (corpus, trial.hardware)
    ]
    return tuple(distill(measurements))


def observation_of(study: Study, trials: Iterable[Trial]) -> Observation | None:
    """A lossy part with all that this study's ended trials say of it.

    The loss is the mean at the worst prompt length. A part that could not be measured has a loss of NaN and no costs.

    Args:
        trials: of one lossy part, ended; None comes back where none of them says anything.
    """
    ended = [trial for trial in trials if trial.state.is_final and trial.state is not TrialState.CANCELLED]
    if not ended:
        return None
    lossy = ended[0].task.lossy
    measured = [trial for trial in ended if trial.state is TrialState.MEASURED and trial.outcome is not None]
    newest = max(measured, key=lambda trial: trial.finished_unix_s, default=None)
    together = [trial for trial in measured if newest and trial.hardware == newest.hardware]
    found = video_observation(lossy, together) if study.is_video else _kv_observation(study, together)
    return found or Observation(lossy=lossy, loss=math.nan, loss_se=0.0, segments=0, costs=())


def _kv_observation(study: Study, trials: Sequence[Trial]) -> Observation | None:
    profiles = distill(measurement(study, trial) for trial in trials)
    if not profiles:
        return None
    first = profiles[0]
    return Observation(
        lossy=trials[0].task.lossy,
        loss=first.loss_mean_nats,
        loss_se=first.loss_se_nats,
        segments=first.loss_samples,
        costs=tuple(
            VariantCost(
                variant=str(profile.configuration["code"]),
                size_ratio=profile.bytes_objective,
                seconds_per_unit=profile.latency_objective,
            )
            for profile in profiles
        ),
    )


def profile_record(profile: Profile) -> ProfileRecord:
    """As stored."""
    return ProfileRecord(key=profile_key(profile), document=profile.to_json(), updated_unix_s=profile.measured_unix_s)
