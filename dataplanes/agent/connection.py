"""Keeping a stream to the daemon: connect, watch, back off, connect again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

import grpc

from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.fleet_pb2_grpc import FleetStub
from controld.contract.rpc.limits import CLIENT_OPTIONS
from dataplanes.agent.session import Session, SessionEndedError, SessionParts

_log = logging.getLogger(__name__)

_CHANNEL_OPTIONS = (
    *CLIENT_OPTIONS,
    # A control stream on loopback or a private network: a proxy from the environment would only break it.
    ("grpc.enable_http_proxy", 0),
    # Each attempt has a channel of its own; a shared subchannel would bring gRPC's own, far longer backoff with it.
    ("grpc.use_local_subchannel_pool", 1),
)


class Backoff:
    """Doubling waits with jitter.

    Args:
        first_s, max_s: the shortest and the longest wait before jitter, which takes up to half away.
        rng: source of the jitter.
    """

    def __init__(self, first_s: float, max_s: float, rng: random.Random) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._rng = rng
        self._attempt = 0

    def reset(self) -> None:
        """Start from the shortest wait again."""
        self._attempt = 0

    def next_s(self) -> float:
        """The next wait in seconds."""
        wait_s = min(self._max_s, self._first_s * 2.0 ** min(self._attempt, 32))
        self._attempt += 1
        return wait_s * self._rng.uniform(0.5, 1.0)


class Connection:
    """Two daemon threads: one lives the sessions, one ticks (telemetry, and leaving a daemon that went silent).

    Args:
        address: "unix:///path" or "host:port".
        hello: makes the first message of each stream.
        parts: what sessions use.
        on_tick: called at each tick, connected or not.
        rng: source of the backoff's jitter.
    """

    def __init__(
        self,
        address: str,
        hello: Callable[[], pb.Hello],
        parts: SessionParts,
        on_tick: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self._address = address
        self._hello = hello
        self._parts = parts
        self._on_tick = on_tick
        self._backoff = Backoff(parts.timing.backoff_first_s, parts.timing.backoff_max_s, rng)
        self._stopped = threading.Event()
        self._current: tuple[Session, grpc.Call] | None = None
        self._was_reachable = True
        self._threads = (
            threading.Thread(target=self._live, name="controld-agent", daemon=True),
            threading.Thread(target=self._tick, name="controld-agent-tick", daemon=True),
        )

    def start(self) -> None:
        """Start both threads."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the stream and the threads; effects that wait are given half of the time to be committed."""
        deadline_s = time.monotonic() + timeout_s
        while self.is_welcomed() and len(self._parts.effects) and time.monotonic() < deadline_s - timeout_s / 2:
            time.sleep(0.01)
        self._stopped.set()
        self._leave("the agent closes")
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))

    def wake(self) -> None:
        """There may be something to send."""
        current = self._current
        if current is not None:
            current[0].wake()

    def telemetry_is_due(self) -> None:
        """Send telemetry as soon as possible."""
        current = self._current
        if current is not None:
            current[0].telemetry_is_due()

    def is_welcomed(self) -> bool:
        """Whether a daemon has welcomed the current stream."""
        current = self._current
        return current is not None and current[0].welcomed

    # ----------------------------------------------------------------------------------- the thread of the sessions

    def _live(self) -> None:
        while not self._stopped.is_set():
            wait_s = 0.0
            started_s = time.monotonic()
            try:
                self._one_session()
                self._note_end("the daemon closed the stream")
            except SessionEndedError as ended:
                wait_s = ended.wait_s
                self._note_end(str(ended))
            except grpc.RpcError as error:
                self._note_end(
                    f"{error.code().name}: {error.details()}" if isinstance(error, grpc.Call) else str(error)
                )
            except Exception as error:  # noqa: BLE001 - the edge of the agent's thread: it must live as long as the data plane
                self._parts.edge.caught("stream", error)
            if time.monotonic() - started_s >= self._parts.timing.steady_session_s:
                self._backoff.reset()
            self._stopped.wait(max(wait_s, self._backoff.next_s()))

    def _one_session(self) -> None:
        session = Session(self._hello(), self._parts)
        channel = grpc.insecure_channel(self._address, options=_CHANNEL_OPTIONS)
        call: grpc.Call | None = None
        try:
            call = FleetStub(channel).Attach(session.requests())  # type: ignore[no-untyped-call]
            self._current = (session, call)
            if self._stopped.is_set():
                return
            for message in call:
                session.handle(message)
                if session.welcomed and not self._was_reachable:
                    _log.warning("controld at %s is back", self._address)
                self._was_reachable = self._was_reachable or session.welcomed
        finally:
            self._current = None
            session.close()
            if call is not None:
                call.cancel()
            channel.close()

    def _note_end(self, why: str) -> None:
        self._parts.counters.count("streams_ended")
        if self._stopped.is_set():
            return
        level = logging.WARNING if self._was_reachable else logging.DEBUG
        _log.log(level, "no stream to controld at %s: %s; trying again", self._address, why)
        self._was_reachable = False

    # ----------------------------------------------------------------------------------- the ticking thread

    def _tick(self) -> None:
        while not self._stopped.wait(self._parts.timing.telemetry_interval_s):
            try:
                self._on_tick()
                self._watch()
                self.telemetry_is_due()
            except Exception as error:  # noqa: BLE001 - the edge of the ticking thread
                self._parts.edge.caught("tick", error)

    def _watch(self) -> None:
        current = self._current
        if current is None:
            return
        session, timing, now_s = current[0], self._parts.timing, time.monotonic()
        if not session.welcomed and now_s - session.started_s > timing.welcome_timeout_s:
            self._parts.counters.count("welcome_timeouts")
            self._leave("it sent no welcome")
        elif session.welcomed and now_s - session.last_message_s > timing.silence_limit_s:
            self._parts.counters.count("silent_daemon")
            self._leave("it went silent")

    def _leave(self, why: str) -> None:
        current = self._current
        if current is not None:
            session, call = current
            _log.info("leaving controld at %s: %s", self._address, why)
            session.close()
            call.cancel()
