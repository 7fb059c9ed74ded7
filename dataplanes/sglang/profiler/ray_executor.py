"""Trials on a Ray cluster: one front process is several profiling workers to the daemon, each with a Ray actor.

To the daemon every slot is an agent of its own, so batches, retries and the durable study stay as they are. A slot's
actor keeps the model and its prompts between trials. What goes wrong with an actor is a failed trial with the reason,
which the daemon may ask for again; the slot then makes a new actor.

    no actor --(trial)--> waiting for resources --(ready)--> measuring --(outcome)--> idle --(trial)--> measuring
                                   |                            |
                                   | cancelled, deadline        | worker died, overtime
                                   +----------------------------+--> the actor is killed: no actor

Only this module imports ray.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from controld.contract.errors import ControldError, FieldError
from controld.contract.trial import TrialOutcome, TrialStatus, TrialTask
from dataplanes.agent import Agent
from dataplanes.agent.profiling_worker import require_address
from dataplanes.agent.trials import Cancelled, Progress
from dataplanes.sglang.profiler.model_bench import ModelBench
from dataplanes.sglang.profiler.trial import TimingPlan, TrialRunner
from dataplanes.sglang.profiler.worker import Place, WorkerSettings, identity_of

_log = logging.getLogger(__name__)


LOCAL, AUTO = "local", "auto"

_POLL_S = 0.2
_START_PATIENCE_S = 300.0
_OVERTIME_S = 20.0
"""How long past its deadline a trial may sit in native code before its process is ended. The daemon waits longer."""
_CANCEL_PATIENCE_S = 20.0
_MAX_SLOTS = 1024
_REASON_CHARACTERS = 300


class RayExecutorError(ControldError):
    """Ray cannot be used. Codes: `ray.missing`, `ray.connect`, `ray.resources`, `ray.start`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayResources:
    """What one actor asks of Ray.

    Args:
        num_cpus: also the threads that the model is evaluated with.
        custom: resources by the names that nodes were started with.
    """

    num_cpus: float = 1.0
    num_gpus: float = 0.0
    memory_bytes: int = 0
    custom: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> RayResources:
        """Read `{"num_cpus": 1, "num_gpus": 0, "memory": 2000000000, "resources": {"name": 1}}`; every key may miss.

        Raises:
            FieldError: not JSON, an unknown key, or an amount that Ray cannot give.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise FieldError("resources", f"not JSON: {error}", hint='for example {"num_cpus": 1}') from error
        if not isinstance(data, dict):
            raise FieldError("resources", "not a JSON object", hint='for example {"num_cpus": 1}')
        known = ("num_cpus", "num_gpus", "memory", "resources")
        for name in data:
            if name not in known:
                raise FieldError(f"resources.{name}", "unknown key", hint=f"one of {', '.join(known)}")
        custom = data.get("resources", {})
        if not isinstance(custom, dict):
            raise FieldError("resources.resources", "not a JSON object")
        for name in ("CPU", "GPU", "memory", ""):
            if name in custom:
                raise FieldError(
                    f"resources.resources.{name}", "is no name of your own", hint="num_cpus, num_gpus or memory"
                )
        return cls(
            num_cpus=_amount(data.get("num_cpus", 1), "resources.num_cpus"),
            num_gpus=_amount(data.get("num_gpus", 0), "resources.num_gpus"),
            memory_bytes=int(_amount(data.get("memory", 0), "resources.memory")),
            custom={name: _amount(value, f"resources.resources.{name}") for name, value in custom.items()},
        )

    def options(self) -> dict[str, Any]:
        """As Ray's `options` takes them."""
        options: dict[str, Any] = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus}
        if self.memory_bytes:
            options["memory"] = self.memory_bytes
        if self.custom:
            options["resources"] = dict(self.custom)
        return options


def _amount(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise FieldError(field, f"{value!r} is not a finite non-negative number")
    if value > 1 and value != int(value):
        raise FieldError(field, f"{value!r}: above 1 Ray gives whole ones only")
    return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """What an actor makes its bench of; paths are those of the node it runs on."""

    model_dir: Path
    texts_dir: Path | None
    page_tokens: int
    frame_bytes: int
    artefacts_dir: Path | None
    timing: TimingPlan
    space_file: Path | None = None

    def bench(self) -> ModelBench:
        """Raises: ModelFolderError."""
        return ModelBench(
            self.model_dir,
            self.texts_dir,
            page_tokens=self.page_tokens,
            frame_bytes=self.frame_bytes,
            artefacts_dir=self.artefacts_dir,
            space_file=self.space_file,
        )


class TrialActor:
    """What runs on a node: one bench, one trial at a time. `look` and `cancel` are answered during a trial."""

    def __init__(self, settings: BenchSettings) -> None:
        bench = settings.bench()
        self._place = Place.here(bench)
        self._runner = TrialRunner(bench.space, bench.bank_for, bench.codec_for, settings.timing)
        self._cancelled_up_to = 0
        self._progress: TrialOutcome | None = None

    def place(self) -> Place:
        """Answered as soon as the actor is there."""
        return self._place

    def measure(self, task: TrialTask, number: int) -> TrialOutcome:
        """Measure a trial to its end, whatever that is; numbers rise from trial to trial."""
        return self._runner.run(task, self._keep, lambda: number <= self._cancelled_up_to)

    def look(self) -> TrialOutcome | None:
        """The newest progress, once."""
        progress, self._progress = self._progress, None
        return progress

    def cancel(self, number: int) -> None:
        """Have a trial end; one that has ended already is not hurt, nor is the next one."""
        self._cancelled_up_to = max(self._cancelled_up_to, number)

    def _keep(self, outcome: TrialOutcome) -> None:
        self._progress = outcome


class Cluster:
    """A connection to Ray.

    Args:
        address: "local" starts a Ray of its own on this machine, "auto" finds the one that runs, else its address.
        resources: of each actor.
        init_options: more for `ray.init`, as tests of a small machine need.

    Raises:
        RayExecutorError: ray is not installed, or there is no cluster.
    """

    def __init__(self, address: str, resources: RayResources, init_options: Mapping[str, Any] | None = None) -> None:
        # A cluster that an operator runs decides for itself; one of ours tells nobody.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # What Ray is going to do in its next release, and warns of until then.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        try:
            import ray
        except ImportError as error:
            raise RayExecutorError(
                f"ray is missing: {error}", code="ray.missing", hint='pip install "controld[ray]"'
            ) from error
        self.ray: Any = ray
        self._resources = resources
        local: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {}
        try:
            ray.init(address=address, logging_level=logging.WARNING, **{**local, **(init_options or {})})
        # The edge of Ray, which raises plain exceptions here, as when a node starts too slowly.
        except Exception as error:
            ray.shutdown()
            raise RayExecutorError(
                f"no Ray at {address}: {_one_line(error)}",
                code="ray.connect",
                hint="--ray-address local starts one on this machine",
            ) from error
        self._actor_class = ray.remote(TrialActor)

    def require_room(self) -> None:
        """Raises: RayExecutorError: no node could ever hold one actor."""
        wanted = {"CPU": self._resources.num_cpus, "GPU": self._resources.num_gpus, **self._resources.custom}
        if self._resources.memory_bytes:
            wanted["memory"] = float(self._resources.memory_bytes)
        nodes = [node["Resources"] for node in self.ray.nodes() if node["Alive"]]
        if not any(all(node.get(name, 0.0) >= amount for name, amount in wanted.items()) for node in nodes):
            asked = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items() if amount)
            raise RayExecutorError(
                f"none of {len(nodes)} Ray nodes has {asked}", code="ray.resources", hint="ask for less by --resources"
            )

    def actor(self, settings: BenchSettings) -> Any:
        """A new actor, which may still have to wait for its resources."""
        # Not restarted by Ray: a trial that takes its process down is for the daemon to count.
        return self._actor_class.options(max_concurrency=2, max_restarts=0, **self._resources.options()).remote(
            settings
        )

    def get_within(self, reference: Any, timeout_s: float) -> tuple[bool, Any]:
        """Whether the answer is there, and the answer. Raises: ray.exceptions.RayError: it will never be."""
        done, _ = self.ray.wait([reference], timeout=timeout_s)
        return (True, self.ray.get(reference)) if done else (False, None)

    def kill(self, actor: Any) -> None:
        """End an actor's process now."""
        self.ray.kill(actor, no_restart=True)

    def close(self) -> None:
        """Leave the cluster; its actors of ours end with that."""
        self.ray.shutdown()


class RaySlot:
    """One trial at a time on one actor, which is made when needed and replaced when lost.

    Args:
        cluster, settings: where, and of what.

    Attributes:
        place: what the first actor said of itself; None until then.
    """

    def __init__(self, cluster: Cluster, settings: BenchSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._actor: Any = None
        self._trials = 0
        self.place: Place | None = None

    def prepare(self, stopped: Cancelled, patience_s: float = _START_PATIENCE_S) -> None:
        """Make the actor and learn where it is.

        Raises:
            RayExecutorError: it does not start, not in time, or it was stopped meanwhile.
        """
        reason = self._make(stopped, time.monotonic() + patience_s)
        if reason:
            raise RayExecutorError(f"no actor: {reason}", code="ray.start")

    def run(self, task: TrialTask, progress: Progress, cancelled: Cancelled) -> TrialOutcome:
        """Measure a trial; a loss of its process, and an exception in it, is a failed trial with the reason."""
        started_s = time.monotonic()

        def ended(status: TrialStatus, detail: str) -> TrialOutcome:
            return TrialOutcome(
                study_id=task.study_id,
                trial_id=task.trial_id,
                status=status,
                detail=detail,
                seconds=time.monotonic() - started_s,
            )

        deadline_s = started_s + task.deadline_s if task.deadline_s else math.inf
        if self._actor is None:
            reason = self._make(cancelled, deadline_s)
            if reason:
                status = TrialStatus.CANCELLED if cancelled() else TrialStatus.FAILED
                return ended(status, f"ray.start: no actor: {reason}")
        try:
            outcome = self._measure(task, progress, cancelled, deadline_s)
        except self._cluster.ray.exceptions.RayTaskError as error:
            # The runner makes outcomes of what trials raise; after anything else nobody knows what the actor is at.
            self._drop()
            return ended(TrialStatus.FAILED, f"ray.task_raised: {_cause(error)}")
        except self._cluster.ray.exceptions.RayError as error:
            self._drop()
            return ended(TrialStatus.FAILED, f"ray.worker_lost: the Ray worker died in the trial: {_one_line(error)}")
        if outcome is None:
            self._drop()
            status = TrialStatus.CANCELLED if cancelled() else TrialStatus.FAILED
            return ended(status, "ray.overtime: the Ray worker did not stop in time and was ended")
        return outcome

    def close(self) -> None:
        """End the actor."""
        self._drop()

    def _make(self, stopped: Cancelled, give_up_s: float) -> str:
        """Make an actor that is ready; empty, or why there is none."""
        self._actor = self._cluster.actor(self._settings)
        reason, place = self._wait_for_place(stopped, give_up_s)
        if place is not None and self.place is not None:
            # What it measures would be kept under the model and hardware that the daemon was told.
            others = [
                field.name for field in fields(Place) if getattr(place, field.name) != getattr(self.place, field.name)
            ]
            if others:
                reason = (
                    f"the new one differs in {', '.join(others)} ({place.device}); --resources can keep nodes apart"
                )
        if reason:
            self._drop()
        elif self.place is None:
            self.place = place
        return reason

    def _wait_for_place(self, stopped: Cancelled, give_up_s: float) -> tuple[str, Place | None]:
        answer = self._actor.place.remote()
        while True:
            try:
                ready, place = self._cluster.get_within(answer, _POLL_S)
            except self._cluster.ray.exceptions.RayError as error:
                return _one_line(error), None
            if ready:
                return "", place
            if stopped():
                return "stopped", None
            if time.monotonic() > give_up_s:
                return "no Ray node had the resources for it in time", None

    def _measure(
        self, task: TrialTask, progress: Progress, cancelled: Cancelled, deadline_s: float
    ) -> TrialOutcome | None:
        """The outcome; None where the process does not come to an end. Raises: ray.exceptions.RayError: it was lost."""
        self._trials += 1
        outcome_answer = self._actor.measure.remote(task, self._trials)
        look_answer = self._actor.look.remote()
        end_s = deadline_s + _OVERTIME_S
        told = False
        while True:
            ready, outcome = self._cluster.get_within(outcome_answer, _POLL_S)
            if ready:
                assert isinstance(outcome, TrialOutcome)
                return outcome
            if cancelled() and not told:
                told = True
                self._actor.cancel.remote(self._trials)
                end_s = min(end_s, time.monotonic() + _CANCEL_PATIENCE_S)
            looked, news = self._cluster.get_within(look_answer, 0)
            if looked:
                if isinstance(news, TrialOutcome):
                    progress(news)
                look_answer = self._actor.look.remote()
            if time.monotonic() > end_s:
                return None

    def _drop(self) -> None:
        if self._actor is not None:
            self._cluster.kill(self._actor)
            self._actor = None


def serve_on_ray(
    connect: Callable[[], Cluster], bench: BenchSettings, settings: WorkerSettings, *, slots: int
) -> NoReturn:
    """Measure until SIGTERM or SIGINT, then end the process.

    A slot connects to the daemon once its actor is placed, so the daemon sees as many workers as the cluster has room
    for. The first one must start; others wait for their resources.

    Args:
        slots: trials at once.

    Raises:
        WorkerError: no address.
        FieldError: an impossible number of slots.
        RayExecutorError: no cluster, or no actor can be started.
    """
    require_address(settings.address)
    if not 1 <= slots <= _MAX_SLOTS:
        raise FieldError("trials_at_once", f"{slots} is not from 1 to {_MAX_SLOTS}")
    cluster = connect()
    cluster.require_room()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    made = [RaySlot(cluster, bench) for _ in range(slots)]
    made[0].prepare(stop.is_set)
    threads = [
        threading.Thread(target=_serve_slot, args=(index, slot, settings, stop), name=f"ray-slot-{index}", daemon=True)
        for index, slot in enumerate(made)
    ]
    for thread in threads:
        thread.start()
    stop.wait()
    for thread in threads:
        thread.join(5.0)
    for slot in made:
        slot.close()
    cluster.close()
    logging.shutdown()
    os._exit(0)


def _serve_slot(index: int, slot: RaySlot, settings: WorkerSettings, stop: threading.Event) -> None:
    while slot.place is None and not stop.is_set():
        try:
            slot.prepare(stop.is_set)
        except RayExecutorError as error:
            _log.warning("slot %d waits: %s", index, error)
            stop.wait(1.0)
    if slot.place is None:
        return
    agent = Agent(identity_of(slot.place, settings, index), settings.address)
    agent.on_trial(lambda task, progress, cancelled: slot.run(task, progress, lambda: cancelled() or stop.is_set()))
    agent.attached()
    agent.start()
    _log.info("slot %d measures on %s", index, slot.place.device)
    stop.wait()
    agent.close()


def _cause(error: Any) -> str:
    """What a task raised, without Ray's pages around it."""
    text = f"{type(error.cause).__name__}: {error.cause}"
    return " ".join(text.split())[:_REASON_CHARACTERS]


def _one_line(error: BaseException) -> str:
    """Ray's errors are pages with tracebacks in them: the first line says what happened, the last one why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    ends = [line[:_REASON_CHARACTERS] for line in dict.fromkeys(lines[:1] + lines[-1:])]
    return " ".join(ends) or type(error).__name__
