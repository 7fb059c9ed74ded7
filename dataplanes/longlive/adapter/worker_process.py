"""One worker process: started in a session of its own, called with deadlines, never left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from controld.contract.errors import ControldError
from dataplanes.longlive.adapter.channel import Answer, Channel, ChannelClosedError, Failure, Request
from dataplanes.longlive.adapter.worker_main import START
from dataplanes.longlive.engine import EngineError

_TAIL_BYTES: Final = 4096


class WorkerGoneError(ControldError):
    """The process ended, or did not answer in time and was ended."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="engine.worker_died")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker is started and how long it may take.

    Args:
        factory: `package.module:function` that makes the engine, imported in the worker.
        keywords: given to it.
        environment: added to this process's own; `PYTHONPATH` goes before this process's path.
        log: file that gets what the worker prints; None: only the end of it is kept, in memory.
        start_deadline_s: until the engine is made.
        load_deadline_s: of load, unload and of a step that loads weights anew.
        step_deadline_s: of one chunk. A step that has a setting to apply may take `load_deadline_s` longer.
        deadline_s: of everything else.
    """

    factory: str
    keywords: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    log: Path | None = None
    start_deadline_s: float = 180.0
    load_deadline_s: float = 1800.0
    step_deadline_s: float = 120.0
    deadline_s: float = 60.0


class _Output:
    """Reads what the worker prints, so that it never waits for a full pipe; keeps the end of it."""

    def __init__(self, pipe: IO[bytes], log: Path | None) -> None:
        self._tail = b""
        self._pipe = pipe
        self._log = log
        self._thread = threading.Thread(target=self._read, daemon=True, name="longlive-worker-output")
        self._thread.start()

    def tail(self) -> str:
        self._thread.join(timeout=2.0)
        return self._tail.decode(errors="replace").strip()

    def _read(self) -> None:
        log = None if self._log is None else self._log.open("ab")
        with self._pipe:
            while part := os.read(self._pipe.fileno(), 65536):
                self._tail = (self._tail + part)[-_TAIL_BYTES:]
                if log is not None:
                    log.write(part)
                    log.flush()
        if log is not None:
            log.close()


def _environment(settings: WorkerSettings) -> dict[str, str]:
    whole = {**os.environ, **settings.environment}
    path = [settings.environment.get("PYTHONPATH", ""), *(entry for entry in sys.path if entry)]
    whole["PYTHONPATH"] = os.pathsep.join(entry for entry in path if entry)
    return whole


def _end_session(process: subprocess.Popen[bytes]) -> None:
    try:
        # The group outlives its leader as long as anything that the engine started is in it.
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


class WorkerProcess:
    """A running worker.

    Raises:
        WorkerGoneError: it did not come up.
        EngineError: the factory refused.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dataplanes.longlive.adapter.worker_main", str(theirs.fileno())],
                env=_environment(settings),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._output = _Output(self._process.stdout, settings.log)
        self._channel = Channel(ours)
        self._number = 0
        self._finalizer = weakref.finalize(self, _end_session, self._process)
        try:
            self._exchange(START, (settings.factory,), settings.keywords, settings.start_deadline_s)
        except ControldError:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """Process id, which is also that of its session."""
        return self._process.pid

    def is_running(self) -> bool:
        """Whether it has not ended."""
        if self._process.returncode is not None:
            return False
        try:
            # Not reaped here: until `end` its number stays its own, and the group can be signalled by it.
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            # Another thread has just ended it.
            return False

    def call(self, method: str, *arguments: Any, deadline_s: float, **keywords: Any) -> Any:
        """Call the engine's method and wait for what it returns.

        Raises:
            EngineError: the engine raised it.
            WorkerGoneError: the worker is gone, or was ended because it did not answer in time.
        """
        return self._exchange(method, arguments, keywords, deadline_s)

    def kill(self) -> None:
        """End it and what it started, now; from any thread: a call under way raises `WorkerGoneError`."""
        if self._process.returncode is not None:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass

    def end(self) -> None:
        """End it and what it started, and wait until they are gone."""
        self._finalizer()
        self._channel.close()

    def _exchange(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any], deadline_s: float) -> Any:
        self._number += 1
        try:
            self._channel.send(Request(self._number, method, arguments, dict(keywords)), timeout_s=deadline_s)
            answer = self._channel.receive(timeout_s=deadline_s)
        except TimeoutError:
            self.end()
            raise WorkerGoneError(f"the worker did not answer {method} within {deadline_s:g} s and was ended") from None
        except ChannelClosedError as error:
            self.end()
            raise WorkerGoneError(f"the worker died during {method}: {self._how_it_ended()} ({error})") from error
        if isinstance(answer, Failure) and answer.number == self._number:
            raise EngineError(answer.message, code=answer.code, hint=answer.hint, applied=answer.applied)
        if isinstance(answer, Answer) and answer.number == self._number:
            return answer.value
        self.end()
        raise WorkerGoneError(f"the worker answered something else than {method}")

    def _how_it_ended(self) -> str:
        status = self._process.returncode
        how = f"signal {signal.Signals(-status).name}" if status is not None and status < 0 else f"status {status}"
        tail = self._output.tail()
        return f"{how}; it last printed: {tail[-1000:]}" if tail else how
