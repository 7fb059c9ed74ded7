"""Studies as JSON data: what REST and the command line show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Any

from controld.contract.configuration_label import configuration_label
from controld.contract.variant import with_variant
from controld.profiling.progress import FrontPoint, StudyProgress, end_reason, measuring_s, time_split
from controld.profiling.searching import search_detail
from controld.profiling.study import Study, StudyState, Trial, TrialState

Json = dict[str, Any]

_LATEST_SHOWN = 16


def study_summary(study: Study, now_unix_s: float) -> Json:
    """A study without its trials. Seconds are of the wall clock; `eta_s` is null while nothing is known."""
    trials = study.trials.values()
    states = Counter(trial.state.value for trial in trials)
    return {
        "id": study.study_id,
        "state": study.state.value,
        **study.request.to_json(),
        "medium": "video" if study.is_video else "kv",
        "model": study.model_fingerprint,
        "model_name": study.model_name,
        "created_unix_s": study.created_unix_s,
        "trials_total": len(study.trials),
        "trials_done": sum(trial.state.is_final for trial in trials),
        "trials_by_state": dict(sorted(states.items())),
        "segments_total": sum(trial.segments_total for trial in trials),
        "segments_done": sum(_segments_passed(trial) for trial in trials),
        "eta_s": _eta_s(study),
        "age_s": max(now_unix_s - study.created_unix_s, 0.0),
    }


def study_view(study: Study, progress: StudyProgress, now_unix_s: float) -> Json:
    """A study with its progress and its trials.

    Args:
        progress: has followed the study.
    """
    trials = [_trial_view(trial) for trial in study.trials.values()]
    return {**_overview(study, progress, now_unix_s), "trials": trials}


def study_event(study: Study, progress: StudyProgress, now_unix_s: float) -> Json:
    """As `study_view`, with the open trials and the latest ended ones only: small, however long the study is."""
    ended = [trial for trial in study.trials.values() if trial.state.is_final]
    latest = sorted(ended, key=lambda trial: trial.finished_unix_s)[-_LATEST_SHOWN:]
    shown = {trial.trial_id for trial in (*study.open_trials[:_LATEST_SHOWN], *latest)}
    trials = [_trial_view(trial) for trial in study.trials.values() if trial.trial_id in shown]
    return {**_overview(study, progress, now_unix_s), "trials": trials}


def study_comparison(study: Study, progress: StudyProgress, now_unix_s: float) -> Json:
    """What studies are compared by."""
    overview = _overview(study, progress, now_unix_s)
    names = (
        "id",
        "state",
        "method",
        "workload",
        "model",
        "model_name",
        "trials_done",
        "hypervolume",
        "hypervolume_by_trial",
        "front_size",
        "seconds",
        "stop_reason",
    )
    return {name: overview[name] for name in names}


def _overview(study: Study, progress: StudyProgress, now_unix_s: float) -> Json:
    curve = progress.hypervolume_by_trial
    front = progress.front
    split = time_split(study, now_unix_s)
    reason = end_reason(study, progress)
    return {
        **study_summary(study, now_unix_s),
        "hypervolume": curve[-1] if curve else 0.0,
        "hypervolume_by_trial": list(curve),
        "front_size": len(front),
        "front": [_front_view(point, is_video=study.is_video) for point in front],
        "seconds": {"measuring": split.measuring_s, "search": split.search_s, "waiting": split.waiting_s},
        "stop_reason": reason.value if reason else "",
        "detail": search_detail(study),
    }


def _front_view(point: FrontPoint, *, is_video: bool) -> Json:
    observation, cost = point.observation, point.cost
    whole = with_variant(observation.lossy, cost.variant)
    place = {"label": configuration_label(whole), "config_id": whole.config_id, "segments": observation.segments}
    if is_video:
        return {
            **place,
            "loss": observation.loss,
            "loss_se": observation.loss_se,
            "memory_ratio": cost.size_ratio,
            "seconds_per_frame": cost.seconds_per_unit,
        }
    return {
        **place,
        "loss_nats": observation.loss,
        "loss_se_nats": observation.loss_se,
        "ratio": 1.0 / cost.size_ratio if cost.size_ratio else None,
        "seconds_per_byte": cost.seconds_per_unit,
    }


def _trial_view(trial: Trial) -> Json:
    outcome = trial.outcome
    losses = _clip_losses(trial) if trial.task.clip_chunks else _prompt_losses(trial)
    return {
        "id": trial.trial_id,
        "state": trial.state.value,
        "source": trial.source.value,
        "lossy": dict(trial.task.lossy),
        "lossy_id": trial.task.lossy.config_id,
        "coders": list(trial.task.coders),
        "agent": trial.agent_id,
        "attempts": trial.attempts,
        "first_segment": trial.task.first_segment,
        "segments_done": trial.segments_done,
        "segments_total": trial.segments_total,
        **losses,
        "seconds": outcome.seconds if outcome else 0.0,
        "lost_seconds": trial.lost_s,
        "detail": outcome.detail if outcome else "",
        "corpus": outcome.corpus if outcome else "",
    }


def _clip_losses(trial: Trial) -> Json:
    """The loss at the worst clip length, and at each."""
    clips = trial.outcome.clips if trial.outcome else ()
    lengths: list[Json] = []
    for chunks in sorted({clip.chunks for clip in clips}):
        values = [clip.loss for clip in clips if clip.chunks == chunks]
        lengths.append(
            {"clip_chunks": chunks, "loss": fmean(values), "loss_se": _standard_error(values), "segments": len(values)}
        )
    worst: Json = max(lengths, key=lambda length: length["loss"], default={})
    return {"loss": worst.get("loss"), "loss_se": worst.get("loss_se"), "lengths": lengths}


def _prompt_losses(trial: Trial) -> Json:
    """The loss at the worst prompt length, and at each."""
    outcome = trial.outcome
    lengths: list[Json] = []
    worst: Json = {}
    if outcome is not None:
        for tokens in sorted({loss.prompt_tokens for loss in outcome.losses}):
            values = [loss.loss_nats for loss in outcome.losses if loss.prompt_tokens == tokens]
            agreement = fmean(loss.top1_agreement for loss in outcome.losses if loss.prompt_tokens == tokens)
            answers = [
                loss.answer_nats
                for loss in outcome.losses
                if loss.prompt_tokens == tokens and loss.answer_nats is not None
            ]
            lengths.append(
                {
                    "prompt_tokens": tokens,
                    "loss_nats": fmean(values),
                    "loss_se_nats": _standard_error(values),
                    "segments": len(values),
                    "top1_agreement": agreement,
                    "answer_nats": fmean(answers) if answers else None,
                    "answer_se_nats": _standard_error(answers),
                }
            )
        worst = max(lengths, key=lambda length: length["loss_nats"], default={})
    return {
        "loss_nats": worst.get("loss_nats"),
        "loss_se_nats": worst.get("loss_se_nats"),
        "lengths": lengths,
    }


def _standard_error(values: Sequence[float]) -> float | None:
    """Of their mean; None for fewer than two."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _segments_passed(trial: Trial) -> int:
    return trial.segments_total if trial.state.is_final else trial.segments_done


def _eta_s(study: Study) -> float | None:
    """Seconds to the end (of the budget) at the pace so far, with the workers that are at it now."""
    if not study.state.is_open:
        return 0.0
    trials = list(study.trials.values())
    workers = max(sum(trial.state is TrialState.RUNNING for trial in trials), 1)
    budget = study.request.budget
    if budget is not None and budget.seconds is not None:
        return max(budget.seconds - measuring_s(study), 0.0) / workers
    timed = [trial for trial in trials if trial.outcome is not None and trial.segments_done and trial.outcome.seconds]
    done = sum(trial.segments_done for trial in timed)
    if not done or study.state is StudyState.PAUSED:
        return None
    # The first trial also prefills the prompts; what is measured after it tells the pace better.
    settled = timed[1:] if len(timed) > 1 else timed
    seconds = sum(trial.outcome.seconds for trial in settled if trial.outcome is not None)
    pace_s = seconds / sum(trial.segments_done for trial in settled)
    left = float(sum(trial.segments_total - _segments_passed(trial) for trial in trials))
    if budget is not None and budget.trials is not None and trials:
        left += (budget.trials - len(trials)) * sum(trial.segments_total for trial in trials) / len(trials)
    return pace_s * left / workers
