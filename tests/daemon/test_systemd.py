from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from controld.systemd import Notifier, parse_watchdog_s


def test_a_reload_is_announced_with_its_time_in_one_datagram(systemd: Any) -> None:
    notifier = Notifier(systemd.address)
    before_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    message = systemd.receive()
    assert set(message) == {"RELOADING", "MONOTONIC_USEC"}
    assert before_us <= int(message["MONOTONIC_USEC"]) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.ready("generation 2\nand more")
    assert systemd.receive() == {"READY": "1", "STATUS": "generation 2 and more"}
    notifier.stopping()
    assert systemd.receive()["STOPPING"] == "1"
    notifier.close()
    notifier.watchdog()
    assert systemd.drain() == []


def test_the_abstract_namespace_is_reached(systemd: Any) -> None:
    other = type(systemd)(f"@controld-test-{secrets.token_hex(8)}")
    notifier = Notifier(other.address)
    notifier.status("here")
    assert other.receive() == {"STATUS": "here"}
    other.close()
    notifier.close()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("20000000", 20.0), ("1", 1e-6), ("", None), ("0", None), ("NaN", None), ("inf", None), ("-5", None),
        ("1e6", None), ("1.5", None), (" 5", None), ("18446744073709551615", None),
        ("9" * 40, None), ("٣", None),
    ],
)  # fmt: skip
def test_a_watchdog_interval_is_a_whole_number_of_microseconds(text: str, seconds: float | None) -> None:
    assert parse_watchdog_s(text) == seconds


def test_the_environment_is_read_once_and_not_inherited(systemd: Any) -> None:
    environment = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "5000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier.from_environment(environment)
    assert environment == {}
    assert notifier.watchdog_s == 5.0
    notifier.close()
    assert Notifier.from_environment({"WATCHDOG_USEC": "5000000", "WATCHDOG_PID": "1"}).watchdog_s is None


def test_without_systemd_nothing_happens() -> None:
    notifier = Notifier.from_environment({})
    notifier.ready("")
    notifier.reloading()
    assert (notifier.failures, notifier.watchdog_s) == (0, None)


@pytest.mark.parametrize("address", ["/nonexistent/socket", "vsock:2:1234"])
def test_a_socket_out_of_reach_is_counted_and_not_raised(address: str) -> None:
    notifier = Notifier(address)
    notifier.ready("")
    assert notifier.failures == (1 if address.startswith("/") else 0)
    notifier.close()


def test_the_unit_is_right(tmp_path: Path) -> None:
    unit = (Path(__file__).parents[2] / "systemd" / "controld.service").read_text()
    assert "Type=notify\n" in unit
    assert "ExecReload=/opt/controld/bin/controld reload --wait" in unit
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "controld.service"
    file.write_text(unit.replace("/opt/controld/bin/controld", sys.executable))
    verified = subprocess.run([analyze, "verify", file], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    security = subprocess.run(
        [analyze, "security", "--offline=yes", "--threshold=20", file], capture_output=True, text=True, check=False
    )
    assert security.returncode == 0, security.stdout
