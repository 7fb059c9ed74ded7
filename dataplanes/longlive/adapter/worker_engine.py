"""Any video engine in a process of its own: what kills the engine does not kill its owner, and the other way round."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch

from controld.contract.clock import Clock, SystemClock
from controld.contract.configuration import Configuration
from controld.contract.video import Applied, MemorySplit, Transition, TransitionPlan
from dataplanes.longlive.adapter.worker_process import WorkerGoneError, WorkerProcess, WorkerSettings
from dataplanes.longlive.engine import (
    ChunkResult,
    EngineCapabilities,
    EngineError,
    LoadSpec,
    SessionSpec,
)


class WorkerDiedError(EngineError):
    """The worker is gone and took its sessions with it; `load` starts a fresh one.

    Args:
        lost_sessions: ids of the sessions that were open.
    """

    def __init__(self, message: str, *, lost_sessions: tuple[str, ...] = ()) -> None:
        lost = f"; lost sessions: {', '.join(lost_sessions)}" if lost_sessions else ""
        super().__init__(f"{message}{lost}", code="engine.worker_died", hint="load again: that starts a fresh worker")
        self.lost_sessions = lost_sessions


@dataclass(slots=True)
class _Session:
    """An open clip as its owner knows it; outlives a worker that is replaced on purpose."""

    spec: SessionSpec
    prompt: str
    pushed: list[tuple[int, str, bool]]
    chunks_before: int = 0
    """Chunks made by earlier workers."""
    chunks: int = 0
    has_frames: bool = False
    waiting: tuple[torch.Tensor, ...] = ()
    """Frames that the replaced worker's decoder still held."""

    @property
    def is_done(self) -> bool:
        """Whether all its chunks are made: a further step is refused, and the session stays open to be closed."""
        return 0 < self.spec.chunks <= self.chunks_before + self.chunks


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A setting that needs another process."""

    setting: Configuration
    version: int


class WorkerEngine:
    """A `VideoEngine` whose work is done by another `VideoEngine` in a worker process.

    Also carries out what no engine can do for itself: a change that reaches `Transition.RESTART` and keeps no history
    starts a new worker at the begin of the next step and opens the sessions there again. An engine whose plan says that
    it keeps the history (its ranks are processes of their own) does it by itself.

    Args:
        settings: how the worker is started, and its deadlines.
        clock: for what a restart took.
    """

    def __init__(self, settings: WorkerSettings, *, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._lock = threading.RLock()
        self._process: WorkerProcess | None = None
        self._capabilities: EngineCapabilities | None = None
        self._spec: LoadSpec | None = None
        self._sessions: dict[str, _Session] = {}
        self._failures: dict[str, EngineError] = {}
        """Why sessions were lost while another one was stepped, until somebody asks for them."""
        self._version = 0
        self._setting: Configuration | None = None
        self._queued: Configuration | None = None
        self._restart: _Waiting | None = None
        self._restarted: Applied | None = None
        self._is_replacing = False
        """Sessions wait for another worker: that there is none is no loss."""
        self._chunk = 0
        self._chunks_before = 0
        self.lost_sessions: tuple[str, ...] = ()

    def __enter__(self) -> WorkerEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.shut_down()

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, None while there is none."""
        return None if self._process is None else self._process.pid

    def is_running(self) -> bool:
        """Whether there is a worker that has not ended."""
        process = self._process
        return process is not None and process.is_running()

    def kill(self) -> None:
        """End the worker now, from any thread; a call under way raises `WorkerDiedError`."""
        process = self._process
        if process is not None:
            process.kill()

    def shut_down(self) -> None:
        """End the worker; sessions are gone."""
        with self._lock:
            self._drop()
            self._forget_all()

    def capabilities(self) -> EngineCapabilities:
        """What the engine can do here; starts a worker if there never was one."""
        with self._lock:
            if self._capabilities is None:
                if self._process is None:
                    self._process = self._start()
                self._capabilities = self._call("capabilities", deadline_s=self._settings.start_deadline_s)
            return self._capabilities

    def load(self, spec: LoadSpec) -> MemorySplit:
        """Load weights; starts a worker if there is none that runs. See `VideoEngine.load`."""
        with self._lock:
            if not self.is_running():
                self._drop()
                process = self._start()
                self._forget_all()
                self._process = process
                # A fresh engine counts its chunks from 0; ours go on.
                self._chunks_before = self._chunk
                self._spec = None
            try:
                held: MemorySplit = self._call("load", spec, deadline_s=self._settings.load_deadline_s)
            except EngineError as error:
                if error.code == "engine.already_loaded":
                    raise
                self._spec = None
                self._forget_all()
                if error.code == "engine.out_of_memory":
                    # Whatever the engine could not free, ending its process does.
                    self._drop()
                raise
            self._forget_all()
            self._spec, self._setting = spec, spec.setting
            self._restart, self._queued, self._restarted, self.lost_sessions = None, None, None, ()
            self._version = 0
            return held

    def unload(self) -> MemorySplit:
        """Free everything. A worker that is gone holds nothing."""
        with self._lock:
            self._spec = None
            self._forget_all()
            if not self.is_running():
                self._drop()
                return MemorySplit()
            held: MemorySplit = self._call("unload", deadline_s=self._settings.load_deadline_s)
            return held

    def plan(self, current: Configuration, wanted: Configuration) -> TransitionPlan:
        """What changing would take, as the engine says."""
        with self._lock:
            plan: TransitionPlan = self._call("plan", current, wanted, deadline_s=self._settings.deadline_s)
            return plan

    def apply(self, wanted: Configuration, version: int) -> None:
        """Queue a setting for the begin of the next step. See `VideoEngine.apply`."""
        with self._lock:
            current = self._require_loaded()
            if version < self._version:
                raise EngineError(
                    f"version {version} is older than {self._version}, which is in force or waits", code="engine.stale"
                )
            plan = self.plan(current, wanted)
            if plan.transition is Transition.RESTART and not plan.keeps_kv:
                self._restart = _Waiting(wanted, version)
            else:
                self._call("apply", wanted, version, deadline_s=self._settings.deadline_s)
                self._restart, self._queued = None, wanted
            self._version = version

    def open(self, spec: SessionSpec) -> None:
        """Begin a clip. See `VideoEngine.open`."""
        with self._lock:
            self._call("open", spec, deadline_s=self._settings.deadline_s)
            self._sessions[spec.session_id] = _Session(spec, spec.prompt, [])
            self._failures.pop(spec.session_id, None)

    def step(self, session_id: str) -> ChunkResult:
        """Make the next chunk. See `VideoEngine.step`."""
        with self._lock:
            session = self._session(session_id)
            if self._restart is not None:
                self._replace_worker(self._restart)
                failure = self._failures.pop(session_id, None)
                if failure is not None:
                    failure.applied = self._applied(failure.applied)
                    raise failure
            longer = 0.0 if self._queued is None else self._settings.load_deadline_s
            try:
                result: ChunkResult = self._call("step", session_id, deadline_s=self._settings.step_deadline_s + longer)
            except EngineError as error:
                if not session.is_done:
                    self._forget(session_id)
                error.applied = self._applied(error.applied)
                raise
            return self._as_ours(session, result)

    def push_prompt(
        self, session_id: str, prompt: str, *, scene_cut: bool = False, at_chunk: int | None = None
    ) -> None:
        """Change the prompt of a chunk that has not begun. See `VideoEngine.push_prompt`."""
        with self._lock:
            session = self._session(session_id)
            begun = session.chunks_before + session.chunks
            at = begun if at_chunk is None else at_chunk
            theirs = None if at_chunk is None else at_chunk - session.chunks_before
            if theirs is not None and theirs < 0:
                raise EngineError(f"chunk {at_chunk} of session {session_id} has begun")
            self._call(
                "push_prompt",
                session_id,
                prompt,
                scene_cut=scene_cut,
                at_chunk=theirs,
                deadline_s=self._settings.deadline_s,
            )
            session.pushed = sorted([*session.pushed, (at, prompt, scene_cut)], key=lambda one: one[0])

    def close(self, session_id: str) -> torch.Tensor:
        """End a clip; the frames that its decoder still held."""
        with self._lock:
            session = self._session(session_id)
            # Decoding what a whole clip left is no matter of seconds.
            # Gone whatever comes of it: an engine that fails to close a clip has dropped it.
            del self._sessions[session_id]
            frames = self._call("close", session_id, deadline_s=self._settings.load_deadline_s)
            return _joined((*session.waiting, frames))

    def sessions(self) -> frozenset[str]:
        """Ids of the open sessions: none once the worker ended, though nobody called it since."""
        process = self._process
        is_served = self._is_replacing if process is None else process.is_running()
        return frozenset(self._sessions) if is_served else frozenset()

    def _as_ours(self, session: _Session, result: ChunkResult) -> ChunkResult:
        report = replace(
            result.report,
            chunk=result.report.chunk + self._chunks_before,
            session_chunk=result.report.session_chunk + session.chunks_before,
            first_frame_s=0.0 if session.has_frames else result.report.first_frame_s,
        )
        applied = self._applied(result.applied)
        session.chunks += 1
        self._chunk = report.chunk + 1
        frames = _joined((*session.waiting, result.frames))
        session.waiting = ()
        session.has_frames = session.has_frames or bool(len(frames))
        while session.pushed and session.pushed[0][0] < session.chunks_before + session.chunks:
            session.prompt = session.pushed.pop(0)[1]
        return replace(result, frames=frames, report=report, applied=applied)

    def _applied(self, theirs: tuple[Applied, ...]) -> tuple[Applied, ...]:
        """What took effect, as its owner counts; each is told once, whether the chunk came to be or not."""
        applied = tuple(replace(one, chunk=one.chunk + self._chunks_before) for one in theirs)
        # The worker names a setting by its id only.
        if self._queued is not None and applied:
            if applied[-1].setting_id == self._queued.config_id:
                self._setting = self._queued
            self._queued = None
        if self._restarted is not None:
            applied = (self._restarted, *applied)
            self._restarted = None
        return applied

    def _replace_worker(self, waiting: _Waiting) -> None:
        """Start another worker under the setting, and open the sessions there; `_failures` says which are no more.

        Raises:
            WorkerDiedError: neither with this setting nor with the one before is there a worker.
        """
        spec, before = self._spec, self._setting
        assert spec is not None and before is not None
        self._restart = None
        started_s = self._clock.monotonic_s()
        self._close_sessions()

        def answer(refusal: EngineError | None) -> Applied:
            changed = sorted(
                name for name in {*before, *waiting.setting} if before.get(name) != waiting.setting.get(name)
            )
            return Applied(
                version=waiting.version,
                setting_id=(waiting.setting if refusal is None else before).config_id,
                chunk=self._chunk,
                transition=Transition.RESTART,
                seconds=self._clock.monotonic_s() - started_s,
                keeps_kv=False,
                refused={} if refusal is None else dict.fromkeys(changed, str(refusal)),
            )

        self._is_replacing = True
        try:
            refusal = self._load_or_go_back(spec, waiting.setting, before)
            self._reopen_sessions()
        except WorkerDiedError as error:
            # The owner loads again and must not be led into the same setting at once, so this is an answer to it.
            error.applied = (answer(error),)
            raise
        finally:
            self._is_replacing = False
        self._setting = waiting.setting if refusal is None else before
        self._restarted = answer(refusal)

    def _close_sessions(self) -> None:
        """End the clips in the worker that is to be replaced, and keep what their decoders held."""
        for session_id, session in tuple(self._sessions.items()):
            try:
                frames = self._call("close", session_id, deadline_s=self._settings.load_deadline_s)
            except EngineError as error:
                if error.code == "engine.worker_died":
                    raise
                del self._sessions[session_id]
                self._failures[session_id] = error
                continue
            session.waiting = (*session.waiting, frames)

    def _reopen_sessions(self) -> None:
        """Begin the clips again where they were; those that the fresh engine refuses are no more."""
        self._chunks_before = self._chunk
        for session_id, session in tuple(self._sessions.items()):
            try:
                self._reopen(session)
            except EngineError as error:
                if error.code == "engine.worker_died":
                    raise
                self._failures[session_id] = error
                self._forget(session_id)

    def _load_or_go_back(self, spec: LoadSpec, wanted: Configuration, before: Configuration) -> EngineError | None:
        """Why the setting before is loaded again; None: the wanted one is. Raises: WorkerDiedError: neither is."""
        try:
            self._load_anew(spec, wanted)
            return None
        except EngineError as error:
            if error.code == "engine.worker_died":
                raise
            refusal = error
        try:
            self._load_anew(spec, before)
        except EngineError as error:
            if error.code == "engine.worker_died":
                raise
            both = f"{refusal.message}, and the setting before cannot be loaded again: {error.message}"
            raise self._lose(both) from error
        return refusal

    def _load_anew(self, spec: LoadSpec, setting: Configuration) -> None:
        self._drop()
        self._process = self._start()
        self._call("load", replace(spec, setting=setting), deadline_s=self._settings.load_deadline_s)

    def _reopen(self, session: _Session) -> None:
        session.chunks_before += session.chunks
        session.chunks = 0
        spec = session.spec
        remaining = max(spec.chunks - session.chunks_before, 1) if spec.chunks else 0
        again = replace(spec, prompt=session.prompt, chunks=remaining, seed=spec.seed + session.chunks_before)
        self._call("open", again, deadline_s=self._settings.deadline_s)
        for at, prompt, scene_cut in session.pushed:
            self._call(
                "push_prompt",
                spec.session_id,
                prompt,
                scene_cut=scene_cut,
                at_chunk=at - session.chunks_before,
                deadline_s=self._settings.deadline_s,
            )

    def _forget(self, session_id: str) -> None:
        """After a chunk failed: engines close the session then, and one that did not must not keep it."""
        if self._sessions.pop(session_id, None) is not None:
            with suppress(EngineError):
                self._call("close", session_id, deadline_s=self._settings.load_deadline_s)

    def _forget_all(self) -> None:
        self._sessions.clear()
        self._failures.clear()

    def _session(self, session_id: str) -> _Session:
        if session_id in self._failures:
            raise self._failures.pop(session_id)
        if session_id not in self._sessions:
            if self._process is None and session_id in self.lost_sessions:
                raise WorkerDiedError(f"session {session_id} was lost with its worker")
            raise EngineError(f"unknown session {session_id!r}", code="engine.unknown_session")
        return self._sessions[session_id]

    def _require_loaded(self) -> Configuration:
        if self._process is None and self.lost_sessions:
            raise WorkerDiedError("there is no worker")
        if self._spec is None or self._setting is None:
            raise EngineError("nothing is loaded", code="engine.not_loaded", hint="load first")
        return self._setting

    def _start(self) -> WorkerProcess:
        try:
            return WorkerProcess(self._settings)
        except WorkerGoneError as error:
            raise self._lose(error.message) from error

    def _call(self, method: str, *arguments: Any, deadline_s: float, **keywords: Any) -> Any:
        if self._process is None:
            raise WorkerDiedError("there is no worker")
        try:
            return self._process.call(method, *arguments, deadline_s=deadline_s, **keywords)
        except (WorkerGoneError, EngineError) as error:
            # An engine that says so itself cannot go on in its process: a GPU's fault stays until the process ends.
            if error.code != "engine.worker_died":
                raise
            died = self._lose(error.message)
            died.applied = getattr(error, "applied", ())
            raise died from error

    def _lose(self, message: str) -> WorkerDiedError:
        """The worker is gone with its sessions; those of an earlier one stay lost until something is loaded."""
        lost = tuple(sorted(self._sessions))
        self.lost_sessions = lost or self.lost_sessions
        self._sessions.clear()
        self._drop()
        return WorkerDiedError(message, lost_sessions=lost)

    def _drop(self) -> None:
        # First out of sight: `sessions` takes one that ended for one that died.
        process, self._process = self._process, None
        if process is not None:
            process.end()


def _joined(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    whole = [part for part in parts if len(part)]
    return torch.cat(whole) if len(whole) > 1 else (whole or list(parts[-1:]))[0]
