"""Studies as JSON data: what REST and the command line show."""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean, stdev
from typing import Any

from controld.profiling.study import Study, StudyState, Trial, TrialState

Json = dict[str, Any]


def study_summary(study: Study, now_unix_s: float) -> Json:
    """A study without its trials. Seconds are of the wall clock; `eta_s` is null while nothing is known."""
    trials = study.trials.values()
    states = Counter(trial.state.value for trial in trials)
    return {
        "id": study.study_id,
        "state": study.state.value,
        **study.request.to_json(),
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


def study_view(study: Study, now_unix_s: float) -> Json:
    """A study with its trials."""
    return {**study_summary(study, now_unix_s), "trials": [_trial_view(trial) for trial in study.trials.values()]}


def _trial_view(trial: Trial) -> Json:
    outcome = trial.outcome
    lengths: list[Json] = []
    worst: Json = {}
    if outcome is not None:
        for tokens in sorted({loss.prompt_tokens for loss in outcome.losses}):
            values = [loss.loss_nats for loss in outcome.losses if loss.prompt_tokens == tokens]
            agreement = fmean(loss.top1_agreement for loss in outcome.losses if loss.prompt_tokens == tokens)
            error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
            lengths.append(
                {
                    "prompt_tokens": tokens,
                    "loss_nats": fmean(values),
                    "loss_se_nats": error,
                    "segments": len(values),
                    "top1_agreement": agreement,
                }
            )
        worst = max(lengths, key=lambda length: length["loss_nats"], default={})
    return {
        "id": trial.trial_id,
        "state": trial.state.value,
        "lossy": dict(trial.task.lossy),
        "lossy_id": trial.task.lossy.config_id,
        "coders": list(trial.task.coders),
        "agent": trial.agent_id,
        "attempts": trial.attempts,
        "segments_done": trial.segments_done,
        "segments_total": trial.segments_total,
        "loss_nats": worst.get("loss_nats"),
        "loss_se_nats": worst.get("loss_se_nats"),
        "lengths": lengths,
        "seconds": outcome.seconds if outcome else 0.0,
        "detail": outcome.detail if outcome else "",
        "corpus": outcome.corpus if outcome else "",
    }


def _segments_passed(trial: Trial) -> int:
    return trial.segments_total if trial.state.is_final else trial.segments_done


def _eta_s(study: Study) -> float | None:
    """Seconds to the end at the pace so far, with the workers that are at it now."""
    if study.state is not StudyState.RUNNING:
        return 0.0
    trials = list(study.trials.values())
    timed = [trial for trial in trials if trial.outcome is not None and trial.segments_done and trial.outcome.seconds]
    done = sum(trial.segments_done for trial in timed)
    if not done:
        return None
    # The first trial also prefills the prompts; what is measured after it tells the pace better.
    settled = timed[1:] if len(timed) > 1 else timed
    seconds = sum(trial.outcome.seconds for trial in settled if trial.outcome is not None)
    pace_s = seconds / sum(trial.segments_done for trial in settled)
    workers = max(sum(trial.state is TrialState.RUNNING for trial in trials), 1)
    left = sum(trial.segments_total - _segments_passed(trial) for trial in trials)
    return pace_s * left / workers
