"""The shaped link: real rates, changes while traffic flows, and nothing left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from controld.contract.errors import FieldError
from dataplanes.sglang.link import LinkPhase, ShapedLink, parse_rate, parse_schedule
from dataplanes.sglang.link.shaped import burst_bytes

SENDER = textwrap.dedent("""
    import socket, sys
    connection = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    block = bytes(65536)
    try:
        while True:
            connection.sendall(block)
    except (BrokenPipeError, ConnectionResetError):
        pass
""")


def device_names() -> set[str]:
    return {entry.name for entry in Path("/sys/class/net").iterdir()}


class Traffic:
    """A sender inside the link and a receiver outside."""

    def __init__(self, link: ShapedLink) -> None:
        listener = socket.create_server((link.outside_address, 0))
        port = listener.getsockname()[1]
        self._sender = subprocess.Popen([*link.inside, sys.executable, "-c", SENDER, link.outside_address, str(port)])
        self._connection, _ = listener.accept()
        listener.close()

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._sender.kill()
        self._sender.wait()

    def payload_bits_per_s(self, low: float, high: float, *, measure_s: float) -> float:
        """The rate of the first window in which it is within these limits, else that of the last of ten.

        On a busy machine windows lack what was held up, or have what was held up before; a link that is not held to its
        rate, or to another one, is wrong in all of them.
        """
        self._receive(1.0)  # what the bucket and the socket buffers held
        for _ in range(10):
            received, seconds = self._receive(measure_s)
            rate = received * 8 / seconds
            if low <= rate <= high:
                break
        return rate

    def _receive(self, seconds: float) -> tuple[int, float]:
        received, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            received += len(self._connection.recv(1 << 18))
        return received, elapsed


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("rate_mbit", [20, 80, 400])
def test_payload_rate_is_within_a_tenth_of_nominal(rate_mbit: int) -> None:
    nominal = rate_mbit * 1_000_000
    with ShapedLink(nominal) as link, Traffic(link) as traffic:
        measured = traffic.payload_bits_per_s(0.9 * nominal, 1.1 * nominal, measure_s=2.0)
    assert measured == pytest.approx(nominal, rel=0.10)


@pytest.mark.root
@pytest.mark.slow
def test_rate_changes_while_traffic_flows() -> None:
    phases = [LinkPhase("fast", 200_000_000), LinkPhase("slow", 20_000_000), LinkPhase("recovering", 200_000_000)]
    with ShapedLink(phases[0].rate_bits_per_s) as link, Traffic(link) as traffic:
        measured = {}
        for phase in link.follow(phases):
            rate = phase.rate_bits_per_s
            measured[phase.name] = traffic.payload_bits_per_s(0.85 * rate, 1.1 * rate, measure_s=1.0) / rate
        assert link.rate_bits_per_s == 200_000_000
        assert link.sent_bytes() > 25_000_000
    assert all(0.85 <= share <= 1.1 for share in measured.values()), measured


@pytest.mark.root
def test_the_way_back_is_not_shaped() -> None:
    with ShapedLink(1_000_000) as link:
        queueing = subprocess.run(
            ["tc", "qdisc", "show", "dev", link.devices[0]], capture_output=True, text=True, check=True
        )
    assert "tbf" not in queueing.stdout


@pytest.mark.root
def test_nothing_is_left_after_the_context_ends() -> None:
    before = device_names()
    with ShapedLink() as link:
        assert link.devices[0] in device_names()
        inside = subprocess.run([*link.inside, "ip", "-o", "addr"], capture_output=True, text=True, check=True)
        assert link.inside_address in inside.stdout
        assert link.outside_address not in inside.stdout
    assert device_names() == before
    link.close()


@pytest.mark.root
def test_nothing_is_left_after_an_error_inside() -> None:
    before = device_names()
    with pytest.raises(RuntimeError, match="inside"), ShapedLink():
        raise RuntimeError("inside")
    assert device_names() == before


@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_nothing_is_left_after_the_owner_is_killed(number: signal.Signals) -> None:
    owner = textwrap.dedent("""
        import time
        from dataplanes.sglang.link import ShapedLink
        with ShapedLink(1_000_000) as link:
            print(link.devices[0], flush=True)
            time.sleep(300)
    """)
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    device = process.stdout.readline().strip()
    assert device in device_names()
    process.send_signal(number)
    process.wait()
    process.stdout.close()
    limit = time.monotonic() + 60
    while device in device_names() and time.monotonic() < limit:
        time.sleep(0.05)
    assert device not in device_names()


@pytest.mark.root
def test_two_links_live_side_by_side() -> None:
    with ShapedLink() as first, ShapedLink() as second:
        assert first.inside_address != second.inside_address
        assert set(first.devices).isdisjoint(second.devices)


@pytest.mark.root
def test_without_root_the_program_runs_again_in_a_user_namespace() -> None:
    # Root's files stay readable when the program believes that it is somebody else, so this works as root too.
    program = textwrap.dedent("""
        import os
        os.geteuid = lambda: 1000
        from dataplanes.sglang.link import LinkUnavailableError, ShapedLink, enter_user_namespace_if_needed
        try:
            enter_user_namespace_if_needed()
        except LinkUnavailableError as error:
            print("unavailable:", error.code)
        else:
            with ShapedLink(20_000_000) as link:
                print("up at", link.rate_bits_per_s, os.path.exists(f"/sys/class/net/{link.devices[0]}"))
    """)
    before = device_names()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    # A machine may forbid unprivileged namespaces; then it has to say so and stop.
    assert done.stdout.strip() in ("up at 20000000 False", "unavailable: link.no_permission"), done.stderr
    assert device_names() == before


def test_rates_and_schedules_are_read_with_units() -> None:
    assert parse_rate("20Mbit") == 20_000_000
    assert parse_rate("1.5Gbit") == 1_500_000_000
    assert parse_schedule(["fast:1Gbit", "slow:20Mbit:30s", "dip:5Mbit:250ms"]) == [
        LinkPhase("fast", 1_000_000_000),
        LinkPhase("slow", 20_000_000, 30.0),
        LinkPhase("dip", 5_000_000, 0.25),
    ]


@pytest.mark.parametrize("text", ["20", "20MB", "Mbit", "-1Mbit", "20 Mbit", ""])
def test_a_rate_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(FieldError, match="is no rate"):
        parse_rate(text)


@pytest.mark.parametrize("entry", ["slow", ":20Mbit", "slow:20Mbit:30", "slow:1bit", "slow:20Mbit:0s"])
def test_a_phase_of_another_form_is_refused(entry: str) -> None:
    with pytest.raises(FieldError):
        parse_schedule([entry])


def test_the_bucket_holds_a_timer_tick_and_a_bundle_of_segments() -> None:
    assert burst_bytes(20_000_000) == 32_000
    assert burst_bytes(1_000_000_000) == 500_000
