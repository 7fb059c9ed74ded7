"""A search of the reference engine's settings by the real daemon and a real worker, each killed on the way."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplanes.longlive.demo.plan import DEPLOYMENT, PROFILING_POLICY
from dataplanes.sglang.demo.daemon import Daemon, DaemonError

pytest.importorskip("botorch")
pytestmark = pytest.mark.slow

PATIENCE_S = 300.0
BUDGET = 21
"""Twenty trials fill the space, the last is chosen by the model."""
REQUEST: dict[str, Any] = {
    "plane": "longlive",
    "workload": "shapes",
    "method": "search",
    "budget": BUDGET,
    "restrict": {"steps": [1, 2, 4], "weights": ["bf16", "nvfp4"], "activations": ["bf16"], "vae": ["async"]},
    "segments": 2,
    "max_segments": 2,
    "lengths": [1],
}


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (met := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.02)
    return met


class Site:
    """The daemon and one worker in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.daemon = Daemon(folder, {"video.yaml": PROFILING_POLICY})
        self.worker: subprocess.Popen[bytes]

    def start_worker(self) -> None:
        command = [sys.executable, "-m", "dataplanes.longlive.profiler", "--address", self.daemon.fleet_address]
        command += ["--deployment", DEPLOYMENT, "--checkpoint", "untrained", "--agent-id", "w0"]
        with (self._folder / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def kill_worker(self) -> None:
        self.worker.kill()
        self.worker.wait()

    def begin(self) -> str | None:
        try:
            return str(self.daemon.request("POST", "/v1/studies", REQUEST)["id"])
        except DaemonError:
            return None  # the worker is still on its way

    def study(self, study_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.daemon.get(f"/v1/studies/{study_id}")
        return answer


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    made.daemon.start()
    made.start_worker()
    yield made
    made.kill_worker()
    made.daemon.stop()


def test_a_search_over_kill_9_of_daemon_and_worker_ends_with_profiles_of_every_setting(site: Site) -> None:
    study_id = wait_until(site.begin, "the worker is connected")
    wait_until(lambda: site.study(study_id)["trials_done"] >= 2, "two trials are measured")
    before = {trial["id"] for trial in site.study(study_id)["trials"] if trial["state"] == "measured"}
    site.kill_worker()
    site.daemon.kill()
    site.daemon.start()
    after = {trial["id"] for trial in site.study(study_id)["trials"] if trial["state"] == "measured"}
    assert before <= after
    site.start_worker()
    study = wait_until(lambda: (s := site.study(study_id))["state"] == "finished" and s, "the study is finished")
    assert (study["medium"], study["stop_reason"]) == ("video", "budget")
    assert study["trials_by_state"] == {"measured": BUDGET}
    assert "model" in {trial["source"] for trial in study["trials"]}, study["detail"]
    exported = site.daemon.get("/v1/candidates/export?kind=video")["profiles"]
    assert len(exported) == BUDGET
    measured = {trial["lossy_id"] for trial in study["trials"]}
    assert len(measured) == BUDGET
    for profile in exported:
        assert profile["source"] == "measured"
        assert profile["loss_samples"] == REQUEST["segments"]
        assert profile["configuration"]["vae"] == "async"
