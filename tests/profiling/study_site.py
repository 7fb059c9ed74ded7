"""The real daemon and one real profiling worker in a folder, each to be killed as a power cut would."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dataplanes.sglang.demo.daemon import Daemon

PATIENCE_S = 300.0


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    """Look again and again; what the condition was in the end."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (met := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.01)
    return met


def measured_trials(study: Mapping[str, Any]) -> set[str]:
    """Ids of those that count."""
    return {trial["id"] for trial in study["trials"] if trial["state"] == "measured"}


class StudySite:
    """Runs while it is entered.

    Args:
        folder: everything is below it.
        policies: file name to text.
        worker: its module and arguments, without where the daemon is and what the worker is called.
    """

    def __init__(self, folder: Path, policies: Mapping[str, str], worker: Sequence[str]) -> None:
        self._log = folder / "worker.log"
        self.daemon = Daemon(folder, policies)
        address = ["--address", self.daemon.fleet_address, "--agent-id", "w0"]
        self._command = [sys.executable, "-m", *worker, *address]
        self.worker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.daemon.start()
        self.start_worker()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_worker()
        self.daemon.stop()

    def start_worker(self) -> None:
        with self._log.open("ab") as log:
            self.worker = subprocess.Popen(
                self._command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )

    def kill_worker(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.wait()

    def restart_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.start()

    def begin(self, request: Mapping[str, Any]) -> str:
        """Begin a study once the worker is connected; its id."""

        def connected() -> bool:
            planes = self.daemon.get("/v1/dataplanes")["dataplanes"]
            return any(plane["agent_id"] == "w0" and plane["connected"] for plane in planes)

        wait_until(connected, "the worker is connected")
        return str(self.daemon.request("POST", "/v1/studies", request)["id"])

    def study(self, study_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.daemon.get(f"/v1/studies/{study_id}")
        return answer

    def finished(self, study_id: str) -> dict[str, Any]:
        """The study once it is finished."""
        study: dict[str, Any] = wait_until(
            lambda: (s := self.study(study_id))["state"] == "finished" and s, "the study is finished"
        )
        return study
