"""A namespace joined to ours by a veth pair whose outgoing rate can be set while traffic flows.

The kernel cleans up, not this code: the namespace has no name and lives as long as the processes in it. One of them,
the holder, reads from a pipe that this process keeps open, so it ends when we do, however we end; the veth pair goes
with the namespace. Names are random, so two links never meet.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from controld.contract.errors import ControldError
from dataplanes.sglang.link.privilege import check_programs
from dataplanes.sglang.link.schedule import LinkPhase

# 198.18.0.0/15 is set aside for measurements between networks (RFC 2544); each link takes four addresses of it.
_ADDRESS_POOL = ipaddress.ip_network("198.18.0.0/15")
# The kernel hands segments on in bundles. A bundle that waits in the shaper when a lower rate shrinks the bucket below
# its size would wait for ever, so bundles are kept smaller than the smallest bucket.
_BUNDLE_MAX_BYTES = 16_384
_BURST_MIN_BYTES = 32_000
_BURST_S = 0.004
_QUEUE_LATENCY = "50ms"


class LinkError(ControldError):
    """A command that builds or changes the link failed."""


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(list(command), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LinkError(
            f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}",
            code="link.command_failed",
            hint="making namespaces takes root" if "ermission" in done.stderr or "ermitted" in done.stderr else "",
        )
    return done.stdout


def burst_bytes(rate_bits_per_s: int) -> int:
    """Bucket size: what passes in one timer tick (4 ms), and 32 kB at least."""
    return max(_BURST_MIN_BYTES, int(rate_bits_per_s / 8 * _BURST_S))


class ShapedLink:
    """A point-to-point link; what is sent from inside to outside is held to the rate, the way back is free.

    Attributes:
        outside_address: our end.
        inside_address: the end in the namespace.
    """

    def __init__(self, rate_bits_per_s: int | None = None) -> None:
        token = secrets.token_hex(3)
        self._outside_device = f"cdl{token}o"
        self._inside_device = f"cdl{token}i"
        self._initial_rate_bits_per_s = rate_bits_per_s
        self._rate_bits_per_s: int | None = None
        self._holder: subprocess.Popen[bytes] | None = None
        self.outside_address = ""
        self.inside_address = ""

    def __enter__(self) -> Self:
        check_programs()
        try:
            self._build()
            if self._initial_rate_bits_per_s is not None:
                self.set_rate(self._initial_rate_bits_per_s)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def inside(self) -> list[str]:
        """Prefix that runs a command inside the namespace; the command replaces it, so its pid is the child's."""
        if self._holder is None:
            raise LinkError("the link is not up", code="link.not_up")
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", "--"]

    @property
    def devices(self) -> tuple[str, str]:
        """Names of the outside and the inside interface."""
        return self._outside_device, self._inside_device

    @property
    def rate_bits_per_s(self) -> int | None:
        """The rate in force; None while unshaped."""
        return self._rate_bits_per_s

    def set_rate(self, rate_bits_per_s: int) -> None:
        """Hold what leaves the namespace to this rate from now on; packets in the queue stay."""
        phase = LinkPhase("rate", rate_bits_per_s)
        command = [*self.inside, "tc", "qdisc", "replace", "dev", self._inside_device, "root", "tbf"]
        command += ["rate", f"{phase.rate_bits_per_s}bit", "burst", str(burst_bytes(phase.rate_bits_per_s))]
        _run([*command, "latency", _QUEUE_LATENCY])
        self._rate_bits_per_s = rate_bits_per_s

    def follow(self, phases: Sequence[LinkPhase]) -> Iterator[LinkPhase]:
        """Set the rate of each phase and yield it; the caller's work decides when the next one begins."""
        for phase in phases:
            self.set_rate(phase.rate_bits_per_s)
            yield phase

    def sent_bytes(self) -> int:
        """Bytes that left the namespace since the link was made, headers included."""
        statistics = json.loads(_run([*self.inside, "ip", "-json", "-stats", "link", "show", self._inside_device]))
        return int(statistics[0]["stats64"]["tx"]["bytes"])

    def close(self) -> None:
        """Take the link down; harmless when repeated. Processes still inside keep their own loopback only."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        # Removed by name too, so that the devices are gone on return and not a moment later.
        subprocess.run(["ip", "link", "delete", self._outside_device], capture_output=True, check=False)
        assert holder.stdin is not None
        holder.stdin.close()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()

    def _build(self) -> None:
        # The echo tells that the new namespace exists; `cat` then waits for our end of the pipe to close.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--", "sh", "-c", "echo up; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._holder.stdout is not None and self._holder.stderr is not None
        ready = self._holder.stdout.readline()
        if ready != b"up\n":
            problem = self._holder.stderr.read().decode(errors="replace").strip()
            raise LinkError(
                f"cannot make a network namespace: {problem}", code="link.no_permission", hint="run as root"
            )
        self._holder.stderr.close()
        outside, inside = self._free_addresses()
        _run(["ip", "link", "add", self._outside_device, "type", "veth", "peer", "name", self._inside_device])
        _run(["ip", "link", "set", self._inside_device, "gso_max_size", str(_BUNDLE_MAX_BYTES)])
        _run(["ip", "link", "set", self._inside_device, "netns", str(self._holder.pid)])
        _run(["ip", "addr", "add", f"{outside}/30", "dev", self._outside_device])
        _run(["ip", "link", "set", self._outside_device, "up"])
        _run([*self.inside, "ip", "link", "set", "lo", "up"])
        _run([*self.inside, "ip", "addr", "add", f"{inside}/30", "dev", self._inside_device])
        _run([*self.inside, "ip", "link", "set", self._inside_device, "up"])
        self.outside_address, self.inside_address = str(outside), str(inside)

    @staticmethod
    def _free_addresses() -> tuple[ipaddress.IPv4Address, ipaddress.IPv4Address]:
        taken = {
            ipaddress.ip_address(address["local"])
            for interface in json.loads(_run(["ip", "-json", "-4", "addr", "show"]))
            for address in interface["addr_info"]
        }
        while True:
            first = int(_ADDRESS_POOL.network_address) + 4 * secrets.randbelow(_ADDRESS_POOL.num_addresses // 4)
            outside, inside = ipaddress.IPv4Address(first + 1), ipaddress.IPv4Address(first + 2)
            if outside not in taken and inside not in taken:
                return outside, inside
