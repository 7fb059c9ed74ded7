"""The search as a process of its own: asked in JSON lines, started when it is needed, replaced when it dies.

The daemon holds no torch and waits for nobody: a fit of seconds runs beside it, and a search that crashes or hangs
costs its process only. A request holds everything (`controld.profiling.worker.protocol`), so a new process goes on
where the old one was.

Every crash doubles the wait before the next start, from none to `MAX_BACK_OFF_S`; an answer forgets them.

The process is made by `subprocess`, not by the event loop: that forks, and gRPC's fork handlers, with other threads in
gRPC, abort the child. `subprocess` uses vfork, which calls no handlers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from controld.candidates.pareto import LOSS_FLOOR_NATS
from controld.contract.clock import Clock
from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError, FieldError
from controld.profiling.search.observation import Observation, Proposal

_log = logging.getLogger(__name__)

ANSWER_S = 120.0
TURN_S = 30.0
MAX_BACK_OFF_S = 60.0
_FIRST_BACK_OFF_S = 1.0
_EXIT_S = 0.1
_MAX_LINE_BYTES = 8 << 20
_COMMAND = (sys.executable, "-m", "controld.profiling.worker")


class SearchProcessError(ControldError):
    """The search gave no answer.

    Codes: `search.ended`, `search.hung`, `search.waits`, `search.busy`, `search.refused`.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """Everything that a search needs to know.

    Args:
        study_id: whose trials are chosen; what the process keeps is kept apart by it.
        space_json: the space, restricted already.
        count: how many proposals at most.
        segments, max_segments: the first fidelity of a part, and how far it may be refined.
        pending: what is being measured now.
        loss_floor: a loss that far below nobody can tell from none.
    """

    study_id: str
    space_json: str
    seed: int
    count: int
    segments: int
    max_segments: int
    observations: Sequence[Observation]
    pending: Sequence[Configuration]
    loss_floor: float = LOSS_FLOOR_NATS

    def to_json(self, number: int) -> str:
        """One line of the protocol."""
        return json.dumps(
            {
                "id": number,
                "study": self.study_id,
                "space": self.space_json,
                "seed": self.seed,
                "count": self.count,
                "segments": self.segments,
                "max_segments": self.max_segments,
                "loss_floor": self.loss_floor,
                "observations": [_observation(one) for one in self.observations],
                "pending": [dict(part) for part in self.pending],
            },
            allow_nan=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchAnswer:
    """What the search proposes; nothing where nothing is left.

    Args:
        seconds: that it took.
        detail: what went otherwise than usual.
    """

    proposals: tuple[Proposal, ...]
    seconds: float
    detail: str = ""


class Search(Protocol):
    """What the service needs of a search."""

    async def propose(self, request: SearchRequest) -> SearchAnswer:
        """Raises: SearchProcessError: it cannot, now."""
        ...

    async def stop(self) -> None:
        """End for good."""
        ...


class _Running:
    """A process, and the socket that is its standard input and output."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.process = process
        self.reader = reader
        self.writer = writer

    @classmethod
    async def start(cls, command: Sequence[str]) -> _Running:
        """Raises: OSError."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                end = theirs.fileno()
                process = subprocess.Popen(command, stdin=end, stdout=end, start_new_session=True)
        except OSError:
            ours.close()
            raise
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE_BYTES)
        except BaseException:
            # Nobody else knows of it yet.
            process.kill()
            process.wait()
            raise
        return cls(process, reader, writer)

    async def kill(self) -> None:
        """It holds nothing that is worth a farewell."""
        self.process.kill()
        self.writer.close()
        await asyncio.to_thread(self.process.wait)
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


class SearchProcess:
    """One process for all studies; requests take their turn.

    Args:
        clock: for the back-off.
        command: what is started.
        answer_s: how long a start or an answer may take before the process is killed.
        turn_s: how long a request waits for those of other studies, so that one that hangs holds up its study only.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        command: Sequence[str] = _COMMAND,
        answer_s: float = ANSWER_S,
        turn_s: float = TURN_S,
    ) -> None:
        self._clock = clock
        self._command = tuple(command)
        self._answer_s = answer_s
        self._turn_s = turn_s
        self._process: _Running | None = None
        self._lock = asyncio.Lock()
        self._number = 0
        self._crashes = 0
        self._not_before_s = 0.0

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        return self._process.process.pid if self._process is not None else None

    async def propose(self, request: SearchRequest) -> SearchAnswer:
        """Ask, with one more process where the first one had died.

        Raises:
            SearchProcessError: it ended, hung, refused the request, is not started again yet, or is busy for too long
                with what others asked.
        """
        try:
            async with asyncio.timeout(self._turn_s):
                await self._lock.acquire()
        except TimeoutError as error:
            raise SearchProcessError(
                f"the search process was busy with other studies for {self._turn_s:g} s", code="search.busy"
            ) from error
        try:
            return await self._ask_in_turn(request)
        finally:
            self._lock.release()

    async def _ask_in_turn(self, request: SearchRequest) -> SearchAnswer:
        while True:
            self._require_start_allowed()
            try:
                return await self._ask(request)
            except SearchProcessError as error:
                if error.code not in ("search.ended", "search.hung"):
                    raise
                await self._crashed(error)
                if self._not_before_s > self._clock.monotonic_s() or error.code == "search.hung":
                    raise

    async def stop(self) -> None:
        """Kill the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    def _require_start_allowed(self) -> None:
        wait_s = self._not_before_s - self._clock.monotonic_s()
        if wait_s > 0:
            raise SearchProcessError(
                f"the search process is not started again for {wait_s:.0f} s after {self._crashes} crashes",
                code="search.waits",
            )

    async def _crashed(self, error: SearchProcessError) -> None:
        self._crashes += 1
        back_off_s = 0.0 if self._crashes == 1 else min(_FIRST_BACK_OFF_S * 2 ** (self._crashes - 2), MAX_BACK_OFF_S)
        self._not_before_s = self._clock.monotonic_s() + back_off_s
        _log.error("%s; started again in %g s at the earliest", error, back_off_s)
        await self.stop()

    async def _ask(self, request: SearchRequest) -> SearchAnswer:
        process = await self._running()
        self._number += 1
        started_s = time.monotonic()
        try:
            process.writer.write(request.to_json(self._number).encode() + b"\n")
            async with asyncio.timeout(self._answer_s):
                await process.writer.drain()
        except OSError as error:
            raise _ended(process, error) from error
        except TimeoutError as error:
            raise _hung(self._answer_s) from error
        answer = _answer(await self._line(process, lambda line: line.get("id") == self._number))
        self._crashes, self._not_before_s = 0, 0.0
        # The whole time counts, a start included.
        return SearchAnswer(proposals=answer.proposals, seconds=time.monotonic() - started_s, detail=answer.detail)

    async def _running(self) -> _Running:
        if self._process is not None and self._process.process.poll() is None:
            return self._process
        await self.stop()
        try:
            process = await _Running.start(self._command)
        except OSError as error:
            raise SearchProcessError(f"the search process cannot be started: {error}", code="search.ended") from error
        self._process = process
        await self._line(process, lambda line: bool(line.get("ready")))
        _log.info("the search process %d is ready", process.process.pid)
        return process

    async def _line(self, process: _Running, wanted: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
        """The next line that is wanted; what else it prints is passed over."""
        try:
            async with asyncio.timeout(self._answer_s):
                while text := await process.reader.readline():
                    try:
                        line = json.loads(text)
                    except ValueError:
                        continue
                    if isinstance(line, dict) and wanted(line):
                        return line
        except TimeoutError as error:
            raise _hung(self._answer_s) from error
        except (OSError, ValueError) as error:
            raise _ended(process, error) from error
        raise _ended(process, None)


def _ended(running: _Running, error: Exception | None) -> SearchProcessError:
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.process.wait(_EXIT_S)
    status = running.process.returncode
    said = "" if status is None else f" with status {status}"
    return SearchProcessError(
        f"the search process ended{said}" + (f": {error!r}" if error else ""),
        code="search.ended",
        hint='does it have BoTorch? pip install "controld[profiler]"' if status == 1 else "",
    )


def _hung(answer_s: float) -> SearchProcessError:
    return SearchProcessError(f"the search process gave no answer in {answer_s:g} s", code="search.hung")


def _observation(one: Observation) -> dict[str, Any]:
    return {
        "lossy": dict(one.lossy),
        "loss": one.loss if one.loss == one.loss else None,
        "loss_se": one.loss_se,
        "segments": one.segments,
        "costs": [asdict(cost) for cost in one.costs],
    }


def _answer(line: Mapping[str, Any]) -> SearchAnswer:
    if "error" in line:
        raise SearchProcessError(f"the search refused the request: {line['error']}", code="search.refused")
    try:
        return SearchAnswer(
            proposals=tuple(
                Proposal(lossy=Configuration(item["lossy"]), segments=int(item["segments"]), source=str(item["source"]))
                for item in line["proposals"]
            ),
            seconds=float(line["seconds"]),
            detail=str(line["detail"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, FieldError) as error:
        raise SearchProcessError(f"the search answered {error!r}", code="search.refused") from error
