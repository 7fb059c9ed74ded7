"""The daemon's life: start the components, say ready, reload policies when asked or when their files change, stop.

Signals set flags and nothing else; the loop in `run` acts on them. A reload never leaves the daemon with less than it
had: the last good policies stay in force, and systemd hears READY=1 whatever came of it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, contextmanager
from enum import StrEnum
from typing import Any, Protocol

from controld.config import Config
from controld.contract.clock import Clock
from controld.contract.errors import ControldError
from controld.policy.source import PolicySource, ReloadOutcome
from controld.systemd import Notifier

_log = logging.getLogger(__name__)

_PINGS_PER_WATCHDOG = 4


class Component(Protocol):
    """A part of the daemon that runs: started in order before READY, stopped in reverse."""

    async def start(self) -> None:
        """Begin; on return the component serves. Raises what makes serving impossible."""
        ...

    async def stop(self) -> None:
        """End, finishing what is in flight; called once after `start`, also when that failed or was cancelled."""
        ...


class StartError(ControldError):
    """The system refused what serving needs: an address is taken, a directory cannot be made."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="daemon.start", hint="is another controld running?")


class State(StrEnum):
    """Where the daemon is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    RELOADING = "reloading"
    STOPPING = "stopping"


class Daemon:
    """Owns the life cycle; what it serves is given to it.

    Args:
        config: the settings file, valid.
        policy_source: already loaded.
        components: in the order of starting; may be set until `run` is called.
        clock: for the intervals of the watchdog.
        notifier: towards systemd.
    """

    def __init__(
        self,
        config: Config,
        policy_source: PolicySource,
        components: Sequence[Component],
        clock: Clock,
        notifier: Notifier | None = None,
    ) -> None:
        self.config = config
        self.policy_source = policy_source
        self.components = tuple(components)
        self.state = State.STARTING
        self.reloads = 0
        self.refused_reloads = 0
        self.failed_reloads = 0
        self.late_ticks = 0
        self._clock = clock
        self._notifier = notifier or Notifier()
        self._reloading = asyncio.Lock()
        self._wake = asyncio.Event()
        self._stop = asyncio.Event()
        self._reload_asked = False

    @property
    def is_serving(self) -> bool:
        """Whether every component has started and none is being stopped."""
        return self.state in (State.SERVING, State.RELOADING)

    def ask_to_stop(self) -> None:
        """What SIGTERM and SIGINT do."""
        self._stop.set()
        self._wake.set()

    def ask_to_reload(self) -> None:
        """What SIGHUP does."""
        self._reload_asked = True
        self._wake.set()

    async def run(self) -> None:
        """Serve until asked to stop.

        Raises:
            StartError: a component met an operating system's error.
            Exception: whatever else a component's `start` raised. In both cases everything is stopped first.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._notifier.close)
            stack.enter_context(self._signals())
            stack.callback(self._say_stopping)
            if not await self._start(stack):
                return
            await stack.enter_async_context(_background(self._ping_watchdog(), "watchdog"))
            await stack.enter_async_context(_background(self._watch_files(), "policy-watch"))
            self.state = State.SERVING
            self._notifier.ready(self._status())
            _log.info("serving", extra={"generation": self.policy_source.current.generation})
            while not self._stop.is_set():
                if self._reload_asked:
                    self._reload_asked = False
                    await self._reload_unasked("SIGHUP")
                    continue
                await self._wake.wait()
                self._wake.clear()
            self._say_stopping()

    async def reload(self, reason: str) -> ReloadOutcome:
        """Read the policies again, now; calls queue up behind one another.

        Args:
            reason: who asked, for the log.
        """
        async with self._reloading:
            self._notifier.reloading()
            before, self.state = self.state, State.RELOADING
            try:
                outcome = await asyncio.to_thread(self.policy_source.reload)
            finally:
                self.state = before
                self._notifier.ready(self._status())
            self.reloads += 1
            self.refused_reloads += not outcome.accepted
            details = {"reason": reason, "accepted": outcome.accepted, "changed": outcome.changed}
            _log.info("reloaded", extra={"generation": outcome.generation, **details})
            if outcome.changed:
                self.policy_source.announce()
            return outcome

    async def _reload_unasked(self, reason: str) -> bool:
        """A reload that nobody waits for: whatever goes wrong in it must not end the daemon."""
        try:
            await self.reload(reason)
        except Exception:  # noqa: BLE001 - the edge of the process; the last good policies stay in force
            self.failed_reloads += 1
            _log.exception("reload failed", extra={"reason": reason})
        return True

    @contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self.ask_to_reload)
        loop.add_signal_handler(signal.SIGTERM, self.ask_to_stop)
        loop.add_signal_handler(signal.SIGINT, self.ask_to_stop)
        # The command line blocks SIGHUP first of all; one that came since then is delivered here.
        before = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        try:
            yield
        finally:
            # Blocked again first: without its handler a late SIGHUP would be deadly while the process still ends.
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _say_stopping(self) -> None:
        if self.state is not State.STOPPING:
            self.state = State.STOPPING
            self._notifier.stopping()
            _log.info("stopping")

    async def _start(self, stack: AsyncExitStack) -> bool:
        """Start every component; False where a stop came in between."""
        async with _background(self._stop.wait(), "stop-wait") as stopping:
            for component in self.components:
                stack.push_async_callback(self._stop_component, component)
                starting = asyncio.ensure_future(component.start())
                await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not starting.done():
                    starting.cancel()
                    await asyncio.wait({starting})
                if starting.cancelled():
                    return False
                try:
                    starting.result()
                except OSError as error:
                    raise StartError(f"cannot start: {error}") from error
        return not self._stop.is_set()

    async def _stop_component(self, component: Component) -> None:
        name = type(component).__name__
        try:
            async with asyncio.timeout(self.config.stop_grace_s):
                await component.stop()
        except TimeoutError:
            _log.error("component did not stop in time", extra={"component": name})
        except Exception:  # noqa: BLE001 - the edge of the process; the other components must still be stopped
            _log.exception("component failed to stop", extra={"component": name})

    async def _ping_watchdog(self) -> None:
        """Show systemd that the loop turns: a tick that came late is no sign of life."""
        if self._notifier.watchdog_s is None:
            return
        interval_s = self._notifier.watchdog_s / _PINGS_PER_WATCHDOG
        self._notifier.watchdog()
        while True:
            due_s = self._clock.monotonic_s() + interval_s
            await asyncio.sleep(interval_s)
            if self._clock.monotonic_s() - due_s <= interval_s:
                self._notifier.watchdog()
            else:
                self.late_ticks += 1
                _log.warning("the event loop was blocked", extra={"late_ticks": self.late_ticks})

    async def _watch_files(self) -> None:
        """Reload when the files have changed and settled: by events where they come, by polling in any case."""
        settings = self.config.policy
        complained = False
        while True:
            try:
                if settings.watch:
                    await self._watch_directory()
            except (OSError, RuntimeError) as error:
                if not complained:
                    _log.warning("policy directory is polled only: %s", error)
                complained = True
            await asyncio.sleep(settings.poll_interval_s)
            await self._reload_if_changed()

    async def _watch_directory(self) -> None:
        """Follow the directory; return when polling saw what the watch did not, for it is another directory now."""
        # Not at the top: half of the time to become ready would go into it.
        watchfiles = await asyncio.to_thread(importlib.import_module, "watchfiles")
        logging.getLogger("watchfiles").setLevel(logging.WARNING)
        changes = watchfiles.awatch(
            self.policy_source.directory,
            recursive=False,
            watch_filter=None,
            step=50,
            debounce=200,
            rust_timeout=int(self.config.policy.poll_interval_s * 1000),
            yield_on_timeout=True,
        )
        async with aclosing(changes):
            async for events in changes:
                if await self._reload_if_changed() and not events:
                    return

    async def _reload_if_changed(self) -> bool:
        """Reload once two looks in a row find the same bytes: a file that is still being written is not read."""
        found = await asyncio.to_thread(self.policy_source.is_touched)
        while found is not None:
            await asyncio.sleep(self.config.policy.settle_s)
            again = await asyncio.to_thread(self.policy_source.is_touched)
            if again == found:
                return await self._reload_unasked("files changed")
            found = again
        return False

    def _status(self) -> str:
        current, problems = self.policy_source.current, self.policy_source.problems
        status = f"generation {current.generation}, policies: {len(current.policies)}"
        return f"{status}; files refused, last good ones in force: {problems[0]}" if problems else status


@asynccontextmanager
async def _background(work: Coroutine[Any, Any, Any], name: str) -> AsyncIterator[asyncio.Task[Any]]:
    """A task that ends with the block; if it fails on its own, that is logged."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait({task})


def _log_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("task failed", extra={"task": task.get_name()}, exc_info=task.exception())
