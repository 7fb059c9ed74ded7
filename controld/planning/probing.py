"""Probes: now and then an idle profiling worker measures an arm in use again, and the quality guard hears of it.

At most one probe a policy is under way, of a few segments at one length, and one begins each `guard.probe_every` at
most: that is the budget. Studies come first. A worker is asked like for a study's trial, for segments that were not
measured before as far as its texts go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from controld.candidates.profile import Profile
from controld.contract.clock import Clock
from controld.contract.trial import SegmentLoss, TrialOutcome, TrialStatus, TrialTask
from controld.controller.plan import Plan
from controld.controller.probes import ProbedArm, next_probe
from controld.fleet.errors import FleetError
from controld.fleet.published import Selector
from controld.fleet.session import AgentSession
from controld.obs.metrics import Metrics
from controld.planning.plane import selector_of
from controld.policy.model import Policy, PolicySet
from controld.profiling.profilers import Profiler, TrialFleet
from controld.profiling.review import keep_reviewing

_log = logging.getLogger(__name__)

PROBE_STUDY: Final = "guard-probe"
"""Names no study: the results of these trials are the guard's."""

SEGMENTS: Final = 2
DEADLINE_S: Final = 900.0
REVIEW_S: Final = 10.0


class Workers(Protocol):
    """Who has profiling workers to lend."""

    def lend(self, kind: str, model_fingerprint: str) -> Profiler | None:
        """A worker that no study has use for, kept free until it is given back."""
        ...

    def give_back(self, agent_id: str) -> None:
        """It may work for studies again."""
        ...


class Guarded(Protocol):
    """Whose arms are probed."""

    @property
    def plans(self) -> Mapping[Selector, Plan]:
        """What is in force."""
        ...

    def profiles_in_use(self, selector: Selector) -> Sequence[Profile]:
        """The profiles of the model that is served."""
        ...

    def probed_segments(self, selector: Selector, arm_id: str) -> int:
        """How many segments of an arm's probes count already, an earlier process's, too."""
        ...

    async def take_probe(self, policy: Policy, profile: Profile, losses: Sequence[SegmentLoss]) -> None:
        """Raises: StoreError: it is not durable yet."""
        ...


@dataclass(frozen=True, slots=True)
class _Probe:
    """One under way."""

    task: TrialTask
    profile: Profile
    worker: Profiler
    asked_s: float


class Prober:
    """A daemon component. Times are monotonic seconds.

    Args:
        policies: the policy set in force.
        guarded: plans are read from it, results given to it.
        workers, fleet: who measures, and how they are asked.
    """

    def __init__(
        self,
        policies: Callable[[], PolicySet],
        guarded: Guarded,
        workers: Workers,
        fleet: TrialFleet,
        metrics: Metrics,
        clock: Clock,
        *,
        review_s: float = REVIEW_S,
    ) -> None:
        self._policies = policies
        self._guarded = guarded
        self._workers = workers
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._review_s = review_s
        self._began_s = clock.monotonic_s()
        self._asked_s: dict[Selector, float] = {}
        self._under_way: dict[Selector, _Probe] = {}
        self._probed_s: dict[tuple[Selector, ProbedArm], float] = {}
        self._next_segment: dict[ProbedArm, int] = {}
        self._number = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to look."""
        self._task = asyncio.create_task(keep_reviewing(self.review, self._wake, every_s=self._review_s), name="probes")

    async def stop(self) -> None:
        """Ask for nothing more; what is under way is forgotten."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        for selector in list(self._under_way):
            self._end(selector, "stopped", cancel=True)

    async def review(self) -> None:
        """Give up what is lost, and begin what is due."""
        now_s = self._clock.monotonic_s()
        present = {s.agent_id: s.identity.instance_id for s in self._fleet.sessions() if s.connected}
        for selector, probe in list(self._under_way.items()):
            if present.get(probe.worker.agent_id) != probe.worker.instance_id:
                self._end(selector, "worker_gone")
            elif now_s - probe.asked_s > DEADLINE_S:
                self._end(selector, "too_late", cancel=True)
        for policy in self._policies().policies:
            selector, every_s = selector_of(policy), policy.guard.probe_every_s
            due_s = self._asked_s.get(selector, self._began_s) + (every_s or 0.0)
            if every_s is not None and selector not in self._under_way and now_s >= due_s:
                self._begin(selector, now_s)

    def _begin(self, selector: Selector, now_s: float) -> None:
        plan = self._guarded.plans.get(selector)
        probed = {arm: at_s for (of, arm), at_s in self._probed_s.items() if of == selector}
        profile = None if plan is None else next_probe(plan, self._guarded.profiles_in_use(selector), probed)
        if profile is None:
            return
        worker = self._workers.lend(selector.kind, profile.model_fingerprint)
        if worker is None:
            return
        self._number += 1
        arm = (profile.workload, profile.arm_id)
        # Any number is another trial than what an earlier process asked the same worker for.
        trial_id = f"{self._clock.unix_s():.0f}-{self._number}"
        # Segments that count already say nothing new.
        fresh = profile.loss_samples + self._guarded.probed_segments(selector, profile.arm_id)
        first = self._next_segment.get(arm, fresh)
        task = TrialTask(
            study_id=PROBE_STUDY,
            trial_id=trial_id,
            workload=profile.workload,
            lossy=profile.configuration.lossy_part,
            coders=(str(profile.configuration.get("code", "none")),),
            prompt_tokens=(profile.worst_prompt_tokens,),
            segments_per_length=SEGMENTS,
            first_segment=first,
            deadline_s=DEADLINE_S,
        )
        try:
            self._fleet.request_trial(worker.agent_id, task)
        except FleetError as error:
            _log.info("a probe waits: %s", error)
            self._workers.give_back(worker.agent_id)
            return
        self._asked_s[selector] = self._probed_s[selector, arm] = now_s
        self._under_way[selector] = _Probe(task, profile, worker, now_s)

    async def on_trial_result(self, session: AgentSession, outcome: TrialOutcome) -> None:
        """What a worker says of a probe. Late, repeated and unknown results change nothing.

        Raises:
            StoreError: what it measured counts, but is not durable yet.
        """
        found = next((s for s, probe in self._under_way.items() if probe.task.trial_id == outcome.trial_id), None)
        if found is None or outcome.status is TrialStatus.PROGRESS:
            return
        probe = self._under_way[found]
        if session.agent_id != probe.worker.agent_id:
            return
        self._end(found, outcome.status.value)
        task, arm = probe.task, (probe.profile.workload, probe.profile.arm_id)
        if outcome.status is not TrialStatus.MEASURED:
            _log.warning("a probe of %s came to nothing: %s", probe.profile.arm_id, outcome.detail)
            # The texts may have no more segments: begin with the first again.
            self._next_segment[arm] = 0
            return
        self._next_segment[arm] = task.first_segment + task.segments_per_length
        asked = range(task.first_segment, task.first_segment + task.segments_per_length)
        losses = {
            one.segment: one
            for one in outcome.losses
            if one.prompt_tokens in task.prompt_tokens and one.segment in asked
        }
        policy = next((each for each in self._policies().policies if selector_of(each) == found), None)
        if policy is not None:
            await self._guarded.take_probe(policy, probe.profile, [losses[segment] for segment in sorted(losses)])

    def _end(self, selector: Selector, how: str, *, cancel: bool = False) -> None:
        probe = self._under_way.pop(selector)
        self._metrics.probes.labels(how).inc()
        self._workers.give_back(probe.worker.agent_id)
        if cancel:
            try:
                self._fleet.cancel_trial(probe.worker.agent_id, PROBE_STUDY, probe.task.trial_id)
            except FleetError as error:
                _log.info("a probe cannot be cancelled: %s", error)
