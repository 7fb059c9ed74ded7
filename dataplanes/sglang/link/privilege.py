"""The right to make namespaces: held by root, or taken inside an unprivileged user namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from controld.contract.errors import ControldError

_ENTERED = "CONTROLD_LINK_USER_NAMESPACE"


class LinkUnavailableError(ControldError):
    """This machine lets the user make no network namespace, or lacks a program for it."""


def check_programs() -> None:
    """Raise LinkUnavailableError naming the programs that are not installed."""
    missing = [program for program in ("ip", "tc", "nsenter", "unshare") if shutil.which(program) is None]
    if missing:
        raise LinkUnavailableError(
            f"not installed: {', '.join(missing)}",
            code="link.missing_program",
            hint="apt-get install iproute2 util-linux",
        )


def enter_user_namespace_if_needed(command: Sequence[str] | None = None) -> None:
    """Return at once where network namespaces can be made; otherwise run this program again where they can.

    Without root the whole program is replaced by itself inside a new user and network namespace, in which it is root.
    Its only network there is its own loopback, which suffices: everything that the link joins runs on this machine,
    and unix sockets reach the outside as before.

    Args:
        command: the program to run again; by default this Python with its arguments.

    Raises:
        LinkUnavailableError: neither root nor unprivileged namespaces are to be had.
    """
    check_programs()
    if os.environ.get(_ENTERED) == "1":
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
        return
    if os.geteuid() == 0:
        return
    inside = ["unshare", "--user", "--map-root-user", "--net", "--"]
    probe = subprocess.run([*inside, "true"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        raise LinkUnavailableError(
            f"cannot make a network namespace: {probe.stderr.strip()}",
            code="link.no_permission",
            hint="run as root, or allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1)",
        )
    again = list(command) if command is not None else [sys.executable, *sys.orig_argv[1:]]
    os.execvpe(inside[0], [*inside, *again], os.environ | {_ENTERED: "1"})
