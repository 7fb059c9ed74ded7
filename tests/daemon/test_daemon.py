from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controld.config import Config, load_config
from controld.contract.clock import Clock, ManualClock, SystemClock
from controld.daemon import Daemon, StartError, State
from controld.policy.source import PolicySource
from controld.systemd import Notifier

PolicyWith = Callable[[float], str]


class Recorder:
    """A component that writes down what happens to it."""

    def __init__(self, name: str, log: list[str], start: Callable[[], Awaitable[None]] | None = None) -> None:
        self._name = name
        self._log = log
        self._start = start

    async def start(self) -> None:
        if self._start is not None:
            await self._start()
        self._log.append(f"start {self._name}")

    async def stop(self) -> None:
        self._log.append(f"stop {self._name}")


def build(config: Config, *components: Any, notifier: Notifier | None = None, clock: Clock | None = None) -> Daemon:
    source = PolicySource(config.policy.directory)
    source.load_initial()
    return Daemon(config, source, components, clock or SystemClock(), notifier)


@asynccontextmanager
async def serving(daemon: Daemon) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(daemon.run())
    try:
        await eventually(lambda: daemon.is_serving or task.done())
        yield task
    finally:
        daemon.ask_to_stop()
        await task


async def eventually(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def limit(daemon: Daemon) -> float:
    (policy,) = daemon.policy_source.current.policies
    return policy.classes[0].max_quality_loss_nats


async def test_components_start_in_order_and_stop_in_reverse(config: Config, systemd: Any) -> None:
    log: list[str] = []
    daemon = build(config, Recorder("a", log), Recorder("b", log), notifier=Notifier(systemd.address))
    async with serving(daemon):
        assert log == ["start a", "start b"]
        assert systemd.receive() == {"READY": "1", "STATUS": "generation 1, policies: 1"}
    assert log == ["start a", "start b", "stop b", "stop a"]
    assert systemd.receive()["STOPPING"] == "1"
    assert systemd.drain() == []
    assert daemon.state is State.STOPPING


async def test_a_component_that_cannot_start_ends_the_daemon_and_never_says_ready(config: Config, systemd: Any) -> None:
    async def fail() -> None:
        raise OSError("address in use")

    log: list[str] = []
    daemon = build(config, Recorder("a", log), Recorder("b", log, fail), notifier=Notifier(systemd.address))
    with pytest.raises(StartError, match="cannot start: address in use"):
        await daemon.run()
    assert log == ["start a", "stop b", "stop a"]
    assert all("READY" not in message for message in systemd.drain())


async def test_a_stop_while_starting_stops_what_has_started(config: Config) -> None:
    log: list[str] = []
    hanging = Recorder("b", log, asyncio.Event().wait)  # type: ignore[arg-type]
    daemon = build(config, Recorder("a", log), hanging)
    task = asyncio.create_task(daemon.run())
    await eventually(lambda: log == ["start a"])
    daemon.ask_to_stop()
    await asyncio.wait_for(task, 30)
    assert log == ["start a", "stop b", "stop a"]


async def test_a_component_that_hangs_or_fails_does_not_keep_the_others_from_stopping(config: Config) -> None:
    log: list[str] = []

    class Hanging(Recorder):
        async def stop(self) -> None:
            await asyncio.Event().wait()

    class Failing(Recorder):
        async def stop(self) -> None:
            raise ValueError("no")

    async with serving(build(config, Recorder("a", log), Hanging("b", log), Failing("c", log))):
        pass
    assert log[-1] == "stop a"


async def test_sigterm_stops_and_sighup_reloads(config: Config, policy_file: Path, policy_with: PolicyWith) -> None:
    daemon = build(config)
    async with serving(daemon) as task:
        policy_file.write_text(policy_with(0.02))
        os.kill(os.getpid(), signal.SIGHUP)
        await eventually(lambda: limit(daemon) == 0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(task, 30)


def unwatched(config: Config) -> Config:
    """The same settings for a daemon that does not look at its files by itself while a test runs."""
    return replace(config, policy=replace(config.policy, watch=False, poll_interval_s=3600.0))


async def test_every_reload_is_followed_by_ready(
    config: Config, systemd: Any, policy_file: Path, policy_with: PolicyWith
) -> None:
    daemon = build(unwatched(config), notifier=Notifier(systemd.address))
    async with serving(daemon):
        assert systemd.receive()["READY"] == "1"
        for text, status in (
            (policy_with(0.02), "generation 2, policies: 1"),
            ("kind: [", "generation 2, policies: 1; files refused, last good ones in force: "),
            (policy_with(0.02), "generation 2, policies: 1"),
        ):
            policy_file.write_text(text)
            await daemon.reload("test")
            assert set(systemd.receive()) == {"RELOADING", "MONOTONIC_USEC"}
            message = systemd.receive()
            assert message["READY"] == "1"
            assert message["STATUS"].startswith(status)


async def test_ready_comes_even_when_a_reload_breaks(
    config: Config, systemd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = build(config, notifier=Notifier(systemd.address))

    def break_down() -> None:
        raise MemoryError

    async with serving(daemon):
        systemd.receive()
        monkeypatch.setattr(daemon.policy_source, "reload", break_down)
        with pytest.raises(MemoryError):
            await daemon.reload("test")
        assert "RELOADING" in systemd.receive()
        assert systemd.receive()["READY"] == "1"
        daemon.ask_to_reload()
        await eventually(lambda: daemon.failed_reloads == 1)
        assert daemon.is_serving
        assert limit(daemon) == 0.01


async def test_concurrent_reloads_queue_and_each_knows_its_outcome(
    config: Config, systemd: Any, policy_file: Path, policy_with: PolicyWith
) -> None:
    daemon = build(unwatched(config), notifier=Notifier(systemd.address))
    async with serving(daemon):
        policy_file.write_text(policy_with(0.02))
        outcomes = await asyncio.gather(*(daemon.reload("test") for _ in range(4)))
    assert sum(outcome.changed for outcome in outcomes) == 1
    assert {outcome.generation for outcome in outcomes} == {2}
    kinds = [next(iter(message)) for message in systemd.drain()]
    assert kinds == ["READY", *["RELOADING", "READY"] * 4, "STOPPING"]


async def test_listeners_hear_of_changes_on_the_loop(
    config: Config, policy_file: Path, policy_with: PolicyWith
) -> None:
    daemon = build(config)
    heard: list[tuple[int, asyncio.AbstractEventLoop]] = []
    daemon.policy_source.subscribe(lambda found: heard.append((found.generation, asyncio.get_running_loop())))
    async with serving(daemon):
        await daemon.reload("unchanged")
        policy_file.write_text(policy_with(0.02))
        await daemon.reload("changed")
    assert heard == [(2, asyncio.get_running_loop())]


Change = Callable[[Path, str], None]


def write_in_halves(file: Path, text: str) -> None:
    with file.open("w") as stream:
        stream.write(text[:100])
        stream.flush()
        time.sleep(0.005)
        stream.write(text[100:])


def replace_once(file: Path, text: str) -> None:
    new = file.with_name(".new")
    new.write_text(text)
    new.replace(file)


def delete_and_create(file: Path, text: str) -> None:
    file.unlink()
    time.sleep(0.005)
    file.write_text(text)


def edit_with_backup(file: Path, text: str) -> None:
    file.rename(file.with_name(file.name + "~"))
    file.write_text(text)


def truncate_first(file: Path, text: str) -> None:
    file.write_text("")
    time.sleep(0.005)
    file.write_text(text)


@pytest.mark.parametrize("watch", [True, False])
@pytest.mark.parametrize("change", [write_in_halves, replace_once, delete_and_create, edit_with_backup, truncate_first])
async def test_changes_of_files_are_seen_each_time(
    config_file: Path, policy_file: Path, policy_with: PolicyWith, watch: bool, change: Change
) -> None:
    config_file.write_text(
        config_file.read_text().replace("settle: 20ms", f"settle: 20ms, watch: {str(watch).lower()}")
    )
    daemon = build(load_config(config_file))
    async with serving(daemon):
        for limit_nats in (0.02, 0.03, 0.04):
            change(policy_file, policy_with(limit_nats))
            await eventually(lambda wanted=limit_nats: limit(daemon) == wanted)  # type: ignore[misc]
        assert daemon.policy_source.current.generation == 4
        assert daemon.refused_reloads == 0


async def test_swapped_symlinks_and_directories_are_seen(
    config_file: Path, policy_file: Path, policy_with: PolicyWith
) -> None:
    policies = policy_file.parent
    for index, limit_nats in enumerate((0.01, 0.02, 0.03)):
        version = policies / f"..v{index}"
        version.mkdir()
        (version / "chat.yaml").write_text(policy_with(limit_nats))
    (policies / "..data").symlink_to("..v0")
    policy_file.unlink()
    policy_file.symlink_to("..data/chat.yaml")
    daemon = build(load_config(config_file))
    async with serving(daemon):
        for index, limit_nats in ((1, 0.02), (2, 0.03)):
            (policies / "..new").symlink_to(f"..v{index}")
            (policies / "..new").replace(policies / "..data")
            await eventually(lambda wanted=limit_nats: limit(daemon) == wanted)  # type: ignore[misc]
        other = policies.with_name("other")
        other.mkdir()
        (other / "chat.yaml").write_text(policy_with(0.04))
        policies.rename(policies.with_name("old"))
        other.rename(policies)
        await eventually(lambda: limit(daemon) == 0.04)
        policy_file.write_text(policy_with(0.05))
        await eventually(lambda: limit(daemon) == 0.05)


async def test_good_bad_good_by_file_changes(config: Config, policy_file: Path, policy_with: PolicyWith) -> None:
    daemon = build(config)
    async with serving(daemon):
        good = policy_file.read_text()
        policy_file.write_text(good + "nonsense: 1\n")
        await eventually(lambda: daemon.refused_reloads == 1)
        assert [problem.path for problem in daemon.policy_source.problems] == ["nonsense"]
        policy_file.write_text(good)
        await eventually(lambda: daemon.policy_source.problems == ())
        assert daemon.policy_source.current.generation == 1
        policy_file.unlink()
        await eventually(lambda: daemon.refused_reloads == 2)
        assert limit(daemon) == 0.01
        policy_file.write_text(policy_with(0.02))
        await eventually(lambda: limit(daemon) == 0.02)
        assert daemon.policy_source.current.generation == 2


class LaggingClock(ManualClock):
    """While it lags, every wait ends far too late by it, as on a loop that does not turn."""

    lags = False

    def monotonic_s(self) -> float:
        if self.lags:
            self.advance(10.0)
        return super().monotonic_s()


async def test_the_watchdog_is_fed_only_while_the_loop_turns(config: Config, systemd: Any) -> None:
    clock, fed = LaggingClock(), 0
    daemon = build(config, notifier=Notifier(systemd.address, watchdog_s=0.2), clock=clock)

    def is_fed(times: int) -> bool:
        nonlocal fed
        fed += sum("WATCHDOG" in message for message in systemd.drain())
        return fed >= times

    async with serving(daemon):
        await eventually(lambda: is_fed(3))
        time.sleep(0.2)
        assert systemd.drain() == [], "nothing but the loop feeds it"
        clock.lags = True
        await eventually(lambda: daemon.late_ticks >= 3)
        assert systemd.drain() == []
        clock.lags = False
        await eventually(lambda: is_fed(fed + 1))
