"""A study service over a real store, and workers that answer by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from controld.contract.clock import ManualClock
from controld.contract.rpc.convert_trial import trial_task_to_proto
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from controld.contract.trial import CoderMeasurement, SegmentLoss, TrialOutcome, TrialStatus, TrialTask
from controld.fleet.errors import FleetError
from controld.fleet.identity import AgentIdentity
from controld.fleet.session import AgentSession
from controld.profiling.search.observation import Proposal
from controld.profiling.search_process import SearchAnswer, SearchProcessError, SearchRequest
from controld.profiling.service import StudyService
from controld.store.sqlite import SqliteStore

MODEL = "f" * 64

SPACE = StrategySpace(
    parameters=(
        Parameter(name="transform", values=("none", "hadamard")),
        Parameter(name="quantise", values=("none", "levels", "fp8_e4m3", "nvfp4")),
        Parameter(name="key_levels", values=(4, 8, 12, 16, 32), ordered=True),
        Parameter(name="key_axis", values=("channel", "token")),
        Parameter(name="key_group", values=(32, 64), ordered=True),
        Parameter(name="value_levels", values=(4, 6, 8, 16), ordered=True),
        Parameter(name="value_axis", values=("channel", "token")),
        Parameter(name="value_group", values=(32, 64), ordered=True),
        Parameter(name="code", values=("none", "bitpack", "entropy"), lossy=False),
    ),
    conditions=tuple(
        Condition(parameter=f"{part}_{knob}", parent="quantise", parent_values=("levels",))
        for part in ("key", "value")
        for knob in ("levels", "axis", "group")
    ),
    forbidden=(
        Forbidden(values={"transform": ("hadamard",), "quantise": ("none",)}, reason="nothing to transform for"),
        Forbidden(values={"code": ("bitpack",), "quantise": ("none", "fp8_e4m3")}, reason="whole bytes"),
    ),
)


def session(agent_id: str = "w0", instance_id: str = "i0", **changes: Any) -> AgentSession:
    """A connected worker, or with `connected=False` one that has left."""
    connected = changes.pop("connected", True)
    values: dict[str, Any] = {
        "deployment": "chat",
        "agent_id": agent_id,
        "instance_id": instance_id,
        "kind": "sglang",
        "role": "profiler",
        "rank": 0,
        "role_peers": 1,
        "model_name": "tiny",
        "model_fingerprint": MODEL,
        "kv_dtype": "bfloat16",
        "kv_bytes_per_token": 1024,
        "device": "cpu",
        "torch_version": "2",
        "threads": 1,
        "config_hash": "",
        "space_json": SPACE.to_json(),
        "tiers": ("pd",),
        "resource_kinds": frozenset(),
        "started_unix_s": 1.0,
        **changes,
    }
    return AgentSession(
        identity=AgentIdentity(**values),
        peer="unix:",
        connected=connected,
        connected_since_unix_s=1.0,
        attached=True,
        not_attached_reason="",
        desired_version=0,
        artefacts_held={},
        acked_version=0,
        effective_version=0,
        effective_is_known=True,
        last_failed=None,
        degraded=False,
        telemetry=None,
        telemetry_unix_s=0.0,
        effects_acked_up_to=0,
        counters={},
    )


class HandFleet:
    """The fleet's side of trials: who is connected is said by the test, what is asked is noted."""

    def __init__(self, *connected: AgentSession) -> None:
        self.connected = list(connected)
        self.requests: list[tuple[str, TrialTask]] = []
        self.cancelled: list[tuple[str, str, str]] = []

    def sessions(self) -> tuple[AgentSession, ...]:
        return tuple(self.connected)

    def request_trial(self, agent_id: str, task: TrialTask) -> None:
        if agent_id not in {one.agent_id for one in self.connected}:
            raise FleetError(f"{agent_id} is not connected", code="fleet.not_connected")
        trial_task_to_proto(task)
        self.requests.append((agent_id, task))

    def cancel_trial(self, agent_id: str, study_id: str, trial_id: str = "") -> None:
        self.cancelled.append((agent_id, study_id, trial_id))


class HandSearch:
    """A search that proposes the parts of the space in their order, or what a test puts into `next`."""

    def __init__(self) -> None:
        self.requests: list[SearchRequest] = []
        self.next: list[Proposal] = []
        self.error: SearchProcessError | None = None
        self.parts_left: int | None = None
        self.detail = ""
        self.stopped = False
        self.held: dict[str, asyncio.Event] = {}
        """Studies whose answers wait."""

    async def propose(self, request: SearchRequest) -> SearchAnswer:
        self.requests.append(request)
        if request.study_id in self.held:
            await self.held[request.study_id].wait()
        if self.error is not None:
            raise self.error
        if self.next:
            proposals, self.next = self.next[: request.count], self.next[request.count :]
            return SearchAnswer(proposals=tuple(proposals), seconds=0.5)
        taken = {one.lossy for one in request.observations} | set(request.pending)
        free = (part for part in StrategySpace.from_json(request.space_json).enumerate(lossy_only=True))
        wanted = request.count if self.parts_left is None else min(request.count, self.parts_left - len(taken))
        chosen = list(itertools.islice((part for part in free if part not in taken), max(wanted, 0)))
        return SearchAnswer(
            proposals=tuple(Proposal(lossy=part, segments=request.segments, source="model") for part in chosen),
            seconds=0.5,
            detail=self.detail,
        )

    async def stop(self) -> None:
        self.stopped = True


def outcome_of(
    task: TrialTask,
    status: TrialStatus = TrialStatus.MEASURED,
    *,
    loss_nats: float = 0.01,
    segments: int | None = None,
    corpus: str = "texts#1",
    detail: str = "",
    seconds: float | None = None,
) -> TrialOutcome:
    """What a worker would say of a task."""
    count = task.segments_per_length if segments is None else segments
    measured = status in (TrialStatus.MEASURED, TrialStatus.PROGRESS)
    segments_of = range(task.first_segment, task.first_segment + count)
    places = [(tokens, segment) for tokens in task.prompt_tokens for segment in segments_of] if measured else []
    return TrialOutcome(
        study_id=task.study_id,
        trial_id=task.trial_id,
        status=status,
        detail=detail,
        losses=tuple(
            SegmentLoss(
                prompt_tokens=tokens, segment=segment, loss_nats=loss_nats * (1 + 0.1 * segment), top1_agreement=0.9
            )
            for tokens, segment in places
        ),
        coders=tuple(
            CoderMeasurement(
                code=code,
                prompt_tokens=tokens,
                segment=segment,
                raw_bytes=tokens * 1024,
                wire_bytes=tokens * 256,
                encode_s=tokens * 1e-5,
                decode_s=tokens * 2e-5,
            )
            for code in task.coders
            for tokens, segment in places
        ),
        seconds=seconds if seconds is not None else 2.0 if measured else 0.0,
        corpus=corpus if measured else "",
    )


class Bench:
    """A service with its store, its fleet and its clock."""

    session = staticmethod(session)
    outcome_of = staticmethod(outcome_of)

    def __init__(self, directory: Path, store: SqliteStore, fleet: HandFleet, clock: ManualClock) -> None:
        self.directory = directory
        self.store = store
        self.fleet = fleet
        self.clock = clock
        self.new_profiles = 0
        self.search = HandSearch()
        self.service = self.make_service()

    def make_service(self) -> StudyService:
        """Another process's service over what is stored."""
        return StudyService(
            self.store,
            self.fleet,
            self.clock,
            on_profiles=self._count,
            review_s=3600.0,
            search=self.search,
            events_apart_s=0.001,
        )

    async def review(self) -> None:
        """What the service does by itself: choose trials, give them out."""
        await self.service.search()
        await self.service.trials.dispatch()

    def _count(self) -> None:
        self.new_profiles += 1

    async def answer_all(self, worker: AgentSession | None = None, **values: Any) -> int:
        """Measure everything that is asked until nothing is; returns how many trials that were."""
        answered = 0
        await self.review()
        while self.fleet.requests:
            agent_id, task = self.fleet.requests.pop(0)
            await self.service.trials.on_trial_result(worker or session(agent_id), outcome_of(task, **values))
            answered += 1
            await self.review()
        return answered


@pytest.fixture
def space() -> StrategySpace:
    return SPACE


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    clock = ManualClock()
    store = await SqliteStore.open(tmp_path / "state", clock=clock)
    yield Bench(tmp_path / "state", store, HandFleet(session()), clock)
    await store.close()
