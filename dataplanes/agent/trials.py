"""Trials of a profiling worker: each is run once, in one thread, and its outcome waits until a stream takes it."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from controld.contract.errors import ControldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert_trial import trial_task_from_proto
from controld.contract.trial import TrialOutcome, TrialStatus, TrialTask
from dataplanes.agent.counters import Counters, ErrorEdge
from dataplanes.agent.plain_text import plain_text

Progress = Callable[[TrialOutcome], None]
Cancelled = Callable[[], bool]
TrialHandler = Callable[[TrialTask, Progress, Cancelled], TrialOutcome]
"""Measures a trial; tells progress (status PROGRESS) as it likes and looks now and then whether it is cancelled."""
RunInThread = Callable[[Callable[[], None]], object]
"""Takes a function and has a worker thread call it."""

_TrialKey = tuple[str, str]


class TrialDesk:
    """Takes requests from the stream, hands them to the handler, keeps what comes out.

    A trial that is asked for again (a daemon that was restarted asks again) is not measured again: a running one goes
    on, a finished one is answered from the last `REMEMBERED` outcomes.
    """

    REMEMBERED = 256

    def __init__(self, counters: Counters, edge: ErrorEdge, wake: Callable[[], None]) -> None:
        self._counters = counters
        self._edge = edge
        self._wake = wake
        self._lock = threading.Lock()
        self._handler: TrialHandler | None = None
        self._run_in_thread: RunInThread | None = None
        self._running: dict[_TrialKey, threading.Event] = {}
        self._finished: OrderedDict[_TrialKey, TrialOutcome] = OrderedDict()
        self._outbox: OrderedDict[_TrialKey, TrialOutcome] = OrderedDict()

    def set_handler(self, handler: TrialHandler, run_in_thread: RunInThread | None) -> None:
        """Say who measures trials, and in which thread; by default one thread takes them one after another."""
        with self._lock:
            self._handler = handler
            self._run_in_thread = run_in_thread or _OneWorker().submit

    def request(self, message: pb.TrialRequest) -> None:
        """A trial was asked for. Never raises for what it holds: the answer says what is wrong."""
        key = (message.study_id, message.trial_id)
        try:
            task = trial_task_from_proto(message)
        except ControldError as error:
            self._counters.count("trial_request_refused")
            self._post(_failed(key, str(error)), final=False)
            return
        with self._lock:
            handler, run_in_thread = self._handler, self._run_in_thread
            finished = self._finished.get(key)
            known = finished is not None or key in self._running
            if handler is not None and not known:
                cancelled = self._running[key] = threading.Event()
        if finished is not None:
            self._post(finished, final=False)
        elif handler is None or run_in_thread is None:
            self._post(_failed(key, "this agent measures no trials"), final=False)
        elif not known:
            self._counters.count("trials_started")
            try:
                run_in_thread(lambda: self._run(handler, task, cancelled))
            except Exception as error:  # noqa: BLE001 - the executor is the caller's: one that is shut down refuses work
                self._edge.caught("trial", error)
                self._post(_failed(key, f"no thread for it: {error}"), final=True)

    def cancel(self, study_id: str, trial_id: str) -> None:
        """Tell a running trial, or (empty `trial_id`) all of a study, to stop."""
        with self._lock:
            for (study, trial), cancelled in self._running.items():
                if study == study_id and trial_id in ("", trial):
                    cancelled.set()

    def take(self) -> TrialOutcome | None:
        """The next outcome to send; newer progress has replaced older."""
        with self._lock:
            return self._outbox.popitem(last=False)[1] if self._outbox else None

    def _run(self, handler: TrialHandler, task: TrialTask, cancelled: threading.Event) -> None:
        key = (task.study_id, task.trial_id)
        try:
            if cancelled.is_set():
                outcome = TrialOutcome(study_id=task.study_id, trial_id=task.trial_id, status=TrialStatus.CANCELLED)
            else:
                outcome = handler(task, lambda progress: self._post(progress, final=False), cancelled.is_set)
                if not isinstance(outcome, TrialOutcome) or (outcome.study_id, outcome.trial_id) != key:
                    raise TypeError(f"the handler answered the trial {key} with {outcome!r}")
        except Exception as error:  # noqa: BLE001 - the edge of the worker: a failed trial is an answer, not the worker's end
            self._edge.caught("trial", error)
            outcome = _failed(key, f"{type(error).__name__}: {error}")
        self._post(outcome, final=True)

    def _post(self, outcome: TrialOutcome, *, final: bool) -> None:
        key = (outcome.study_id, outcome.trial_id)
        outcome = replace(outcome, detail=plain_text(outcome.detail))
        with self._lock:
            if final:
                self._running.pop(key, None)
                if outcome.status in (TrialStatus.MEASURED, TrialStatus.INFEASIBLE):
                    self._finished[key] = outcome
                while len(self._finished) > self.REMEMBERED:
                    self._finished.popitem(last=False)
            self._outbox[key] = outcome
            while len(self._outbox) > self.REMEMBERED:
                self._outbox.popitem(last=False)
                self._counters.count("trial_outcomes_dropped")
        self._wake()


def _failed(key: _TrialKey, detail: str) -> TrialOutcome:
    return TrialOutcome(study_id=key[0], trial_id=key[1], status=TrialStatus.FAILED, detail=detail)


class _OneWorker:
    """One daemon thread that calls what it is given, in order; started with the first."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="controld-trials", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        while True:
            self._work.get()()
