"""The daemon as a process of its own: signals, readiness, what a user sees when it cannot start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "controld.cli.main", "serve", "--config"]


@contextmanager
def process(config_file: Path, systemd: Any = None, **popen: Any) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ} | ({"NOTIFY_SOCKET": systemd.address} if systemd else {})
    started = subprocess.Popen(
        [*COMMAND, str(config_file)], env=environment, stderr=subprocess.PIPE, text=True, **popen
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def wait_for(systemd: Any, accept: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        message: dict[str, str] = systemd.receive()
        if accept(message):
            return message
    raise TimeoutError


# The test of imports below ends its daemon by SIGTERM too.
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_it_gets_ready_and_stops_cleanly(config_file: Path, systemd: Any, number: signal.Signals) -> None:
    with process(config_file, systemd) as daemon:
        wait_for(systemd, lambda message: message.get("READY") == "1")
        daemon.send_signal(number)
        wait_for(systemd, lambda message: message.get("STOPPING") == "1")
        _, log = daemon.communicate(timeout=60)
        assert daemon.returncode == 0, log


def blocks_sighup(process_id: int) -> bool:
    lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
    mask = next(int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:"))
    return bool(mask >> (signal.SIGHUP - 1) & 1)


# While it imports, and about when it starts its parts; the slow ones look in between.
@pytest.mark.parametrize("delay_s", [0.0, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.1, 0.2, 0.35)), 0.5])
def test_a_sighup_while_it_starts_never_ends_it_and_is_not_lost(
    config_file: Path, systemd: Any, delay_s: float
) -> None:
    with process(config_file, systemd) as daemon:
        # Our first statement blocks the signal; while the interpreter itself starts, only a parent can (see below).
        while not blocks_sighup(daemon.pid):
            time.sleep(0.001)
        time.sleep(delay_s)
        daemon.send_signal(signal.SIGHUP)
        wait_for(systemd, lambda message: "RELOADING" in message)
        wait_for(systemd, lambda message: message.get("READY") == "1")
        assert daemon.poll() is None


def test_a_parent_that_blocks_sighup_protects_it_from_the_first_instant(config_file: Path, systemd: Any) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        with process(config_file, systemd) as daemon:
            for _ in range(50):
                daemon.send_signal(signal.SIGHUP)
                time.sleep(0.01)
            wait_for(systemd, lambda message: "RELOADING" in message)
            assert daemon.poll() is None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_refused_policies_end_the_first_start_with_their_lines(config_file: Path, policy_file: Path) -> None:
    policy_file.write_text("kind: Policy\nnonsense: 1\n")
    with process(config_file) as daemon:
        _, log = daemon.communicate(timeout=60)
        assert daemon.returncode == 1
        assert f"{policy_file}:2:1: nonsense: unknown key" in log
        assert "Traceback" not in log


def test_generation_and_last_good_policy_survive_kill_9(
    config_file: Path, policy_file: Path, systemd: Any, policy_with: Any
) -> None:
    with process(config_file, systemd) as daemon:
        wait_for(systemd, lambda message: message.get("READY") == "1")
        policy_file.write_text(policy_with(0.02))
        wait_for(systemd, lambda message: message.get("STATUS") == "generation 2, policies: 1")
        daemon.kill()
        daemon.wait()
    policy_file.write_text("kind: [")
    with process(config_file, systemd):
        message = wait_for(systemd, lambda message: message.get("READY") == "1")
        assert message["STATUS"].startswith("generation 2, policies: 1; files refused, last good ones in force: ")
        policy_file.write_text(policy_with(0.02))
        wait_for(systemd, lambda message: message.get("STATUS") == "generation 2, policies: 1")


def test_the_daemon_imports_nothing_of_a_data_plane_nor_of_torch(config_file: Path, systemd: Any) -> None:
    script = (
        "import sys, threading; from controld.cli.main import main\n"
        "def report():\n"
        "    sys.stdin.readline()\n"
        "    print(*sorted({name.partition('.')[0] for name in sys.modules}), flush=True)\n"
        "threading.Thread(target=report, daemon=True).start()\n"
        f"sys.exit(main(['serve', '--config', {str(config_file)!r}]))"
    )
    environment = {**os.environ, "NOTIFY_SOCKET": systemd.address}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, **pipes) as daemon:
        try:
            wait_for(systemd, lambda message: message.get("READY") == "1")
            assert daemon.stdin is not None
            assert daemon.stdout is not None
            daemon.stdin.write("report\n")
            daemon.stdin.flush()
            imported = set(daemon.stdout.readline().split())
        finally:
            daemon.terminate()
    assert "controld" in imported
    assert imported.isdisjoint({"torch", "scipy", "pandas", "dataplanes", "transformers", "botorch"})
    assert daemon.returncode == 0
