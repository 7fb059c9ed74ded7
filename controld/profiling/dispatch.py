"""Who measures what: assignments of trials to workers, and when an assignment is given up. Pure.

A worker has one trial at a time. An assignment ends by its result, or is given up because

    another process answers under the worker's name    at once, counts as an attempt: the trial may have killed it
    the worker is gone for `ABSENCE_S`                 counts as an attempt
    the trial's deadline has passed by `OVERTIME_S`    counts as an attempt

A worker that comes back as the same process in time is asked again: it goes on, or sends the result that got lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from controld.contract.trial import TrialOutcome, TrialStatus, TrialTask
from controld.profiling.profilers import Profiler
from controld.profiling.study import Study, StudyState, Trial, TrialState

ABSENCE_S = 30.0
OVERTIME_S = 60.0
MAX_ATTEMPTS = 3

TrialKey = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One worker at one trial.

    Args:
        gone_since_s: when the worker was first missed; None while it is here.
    """

    study_id: str
    trial_id: str
    agent_id: str
    instance_id: str
    started_s: float
    deadline_s: float
    gone_since_s: float | None = None

    @property
    def key(self) -> TrialKey:
        """The trial."""
        return self.study_id, self.trial_id

    def worked_s(self, now_s: float) -> float:
        """For how long the worker was at it: until now, or until it was missed."""
        return (now_s if self.gone_since_s is None else self.gone_since_s) - self.started_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done now.

    Args:
        kept: assignments that go on, those that are asked for again included.
        given_up: trials whose assignment ended without a result, with the reason.
        asked_again: of `kept`, those whose worker has come back.
        started: new assignments with their tasks.
    """

    kept: tuple[Assignment, ...]
    given_up: tuple[tuple[Assignment, str], ...]
    asked_again: tuple[Assignment, ...]
    started: tuple[tuple[Assignment, TrialTask], ...]


def plan_assignments(
    studies: Iterable[Study],
    assignments: Iterable[Assignment],
    profilers: Iterable[Profiler],
    now_s: float,
) -> Plan:
    """Review the assignments and give free workers the next trials: older studies first, trials in their order."""
    present = {profiler.agent_id: profiler for profiler in profilers}
    kept: list[Assignment] = []
    given_up: list[tuple[Assignment, str]] = []
    asked_again: list[Assignment] = []
    for assignment in assignments:
        reason = _reason_to_give_up(assignment, present.get(assignment.agent_id), now_s)
        if reason:
            given_up.append((assignment, reason))
        elif assignment.agent_id not in present:
            since_s = assignment.gone_since_s if assignment.gone_since_s is not None else now_s
            kept.append(replace(assignment, gone_since_s=since_s))
        elif assignment.gone_since_s is not None:
            back = replace(assignment, gone_since_s=None)
            kept.append(back)
            asked_again.append(back)
        else:
            kept.append(assignment)
    busy = {assignment.agent_id for assignment in kept}
    taken = {assignment.key for assignment in kept}
    # What was just given up waits for the next round, in which its attempts are counted.
    taken |= {assignment.key for assignment, _ in given_up}
    free = [profiler for profiler in present.values() if profiler.agent_id not in busy]
    started: list[tuple[Assignment, TrialTask]] = []
    for study in sorted(studies, key=lambda study: (study.created_unix_s, study.study_id)):
        if study.state is not StudyState.RUNNING:
            continue
        for trial in _open_trials(study, taken):
            worker = next((profiler for profiler in free if fits(profiler, study)), None)
            if worker is None:
                break
            free.remove(worker)
            assignment = Assignment(
                study_id=study.study_id,
                trial_id=trial.trial_id,
                agent_id=worker.agent_id,
                instance_id=worker.instance_id,
                started_s=now_s,
                deadline_s=trial.task.deadline_s,
            )
            started.append((assignment, trial.task))
    return Plan(kept=tuple(kept), given_up=tuple(given_up), asked_again=tuple(asked_again), started=tuple(started))


def after_giving_up(trial: Trial, reason: str, spent_s: float) -> Trial:
    """The trial with one more attempt that came to nothing: pending again, or failed for good.

    Args:
        spent_s: seconds of a worker that the attempt took.
    """
    attempts = trial.attempts + 1
    state = TrialState.PENDING if attempts < MAX_ATTEMPTS else TrialState.FAILED
    outcome = TrialOutcome(
        study_id=trial.task.study_id, trial_id=trial.trial_id, status=TrialStatus.FAILED, detail=reason
    )
    return replace(trial, state=state, agent_id="", attempts=attempts, lost_s=trial.lost_s + spent_s, outcome=outcome)


def _open_trials(study: Study, taken: set[TrialKey]) -> list[Trial]:
    return [
        trial
        for trial in study.trials.values()
        if trial.state is TrialState.PENDING and (study.study_id, trial.trial_id) not in taken
    ]


def fits(profiler: Profiler, study: Study) -> bool:
    """Whether this worker can measure for this study."""
    request = study.request
    return (
        profiler.kind == request.plane
        and profiler.model_fingerprint == study.model_fingerprint
        and request.deployment in ("", profiler.deployment)
        and study.hardware in ("", profiler.hardware)
    )


def _reason_to_give_up(assignment: Assignment, profiler: Profiler | None, now_s: float) -> str:
    if profiler is not None and profiler.instance_id != assignment.instance_id:
        return f"the worker {assignment.agent_id} was restarted"
    if profiler is None and assignment.gone_since_s is not None and now_s - assignment.gone_since_s > ABSENCE_S:
        return f"the worker {assignment.agent_id} is gone"
    if assignment.deadline_s and now_s - assignment.started_s > assignment.deadline_s + OVERTIME_S:
        return f"no result within {assignment.deadline_s:g} s"
    return ""
