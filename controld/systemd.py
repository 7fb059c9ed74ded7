"""What the daemon tells systemd (sd_notify(3)); silent where systemd did not start it.

Every message is one datagram. A socket that cannot be reached is logged and counted, never raised.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections.abc import MutableMapping

_log = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 0.5
_FOREVER_US = 2**64 - 1


class Notifier:
    """Sends states to a notification socket.

    Args:
        address: a path, or a name in the abstract namespace written with `@`; empty where there is none.
        watchdog_s: how long systemd waits for a sign of life; None where it does not wait.
    """

    def __init__(self, address: str = "", watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        self.failures = 0
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if not address:
            return
        if not address.startswith(("/", "@")):
            _log.warning("NOTIFY_SOCKET is not a unix socket; systemd will not be told", extra={"address": address})
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(_SEND_TIMEOUT_S)

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Notifier:
        """Read and remove what systemd set, so that no child process speaks for the daemon."""
        address = environment.pop("NOTIFY_SOCKET", "")
        watchdog_s = parse_watchdog_s(environment.pop("WATCHDOG_USEC", ""))
        process_id = environment.pop("WATCHDOG_PID", "")
        if process_id and process_id != str(os.getpid()):
            watchdog_s = None
        return cls(address, watchdog_s)

    def ready(self, status: str) -> None:
        """Started, or a reload is over, well or badly."""
        self._send("READY=1", f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        """A reload begins. systemd needs both fields in one datagram, or it waits for ever."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._send("RELOADING=1", f"MONOTONIC_USEC={now_us}")

    def status(self, status: str) -> None:
        """A line for `systemctl status`."""
        self._send(f"STATUS={_one_line(status)}")

    def stopping(self) -> None:
        """The daemon is about to end."""
        self._send("STOPPING=1", "STATUS=stopping")

    def watchdog(self) -> None:
        """A sign of life."""
        self._send("WATCHDOG=1")

    def close(self) -> None:
        """Let go of the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(errors="backslashreplace"), self._address)
        except OSError as error:
            self.failures += 1
            _log.warning("systemd cannot be told %s: %s", lines[0], error)


def parse_watchdog_s(text: str) -> float | None:
    """Seconds of `WATCHDOG_USEC`; None where it is absent, zero, infinite or not a whole number."""
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,20}", text, flags=re.ASCII) or not 0 < int(text) < _FOREVER_US:
        _log.warning("WATCHDOG_USEC is ignored", extra={"value": text})
        return None
    return int(text) / 1e6


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
