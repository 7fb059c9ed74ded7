"""A search by the real daemon, a real worker and the real search process, each killed at the worst moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataplanes.sglang.demo.daemon import Daemon
from dataplanes.sglang.demo.plan import DEMO
from dataplanes.sglang.demo.policies import policy_text

pytest.importorskip("botorch")
pytestmark = pytest.mark.slow

PATIENCE_S = 300.0
BUDGET = 22
"""Twenty trials fill the space, the last two are chosen by the model."""
REQUEST: dict[str, Any] = {
    "plane": "sglang",
    "workload": "dialogue",
    "method": "search",
    "budget": BUDGET,
    "restrict": {"quantise": ["levels", "nvfp4", "fp8_e4m3"], "transform": ["none", "hadamard"]},
    "segments": 2,
    "max_segments": 2,
    "lengths": [64],
    "continuation_tokens": 32,
}


def wait_until(condition: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + PATIENCE_S
    while not (met := condition()):
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.01)
    return met


class Site:
    """The daemon and one worker in a folder."""

    def __init__(self, folder: Path, model: Path, texts: Path) -> None:
        self._folder = folder
        self._model = model
        self._texts = texts
        self.daemon = Daemon(folder, {"demo.yaml": policy_text(DEMO, {})})
        self.worker: subprocess.Popen[bytes]

    def start_worker(self) -> None:
        command = [sys.executable, "-m", "dataplanes.sglang.profiler", "--model", str(self._model)]
        command += ["--texts", str(self._texts), "--address", self.daemon.fleet_address, "--agent-id", "w0"]
        command += ["--evaluation-threads", "1", "--page-tokens", "16", "--frame-bytes", "32768"]
        with (self._folder / "worker.log").open("ab") as log:
            self.worker = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def kill_worker(self) -> None:
        self.worker.kill()
        self.worker.wait()

    def signal_daemon(self, number: int) -> None:
        assert self.daemon.process is not None
        self.daemon.process.send_signal(number)

    def search_process(self) -> psutil.Process | None:
        assert self.daemon.process is not None
        children = psutil.Process(self.daemon.process.pid).children()
        return next((one for one in children if "controld.profiling.worker" in " ".join(one.cmdline())), None)

    def study(self, study_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.daemon.get(f"/v1/studies/{study_id}")
        return answer

    def restart(self) -> None:
        self.daemon.kill()
        self.daemon.start()


@pytest.fixture
def site(tmp_path: Path, tiny_model_dir: Path, texts_dir: Path) -> Iterator[Site]:
    made = Site(tmp_path, tiny_model_dir, texts_dir)
    made.daemon.start()
    made.start_worker()
    yield made
    made.kill_worker()
    made.daemon.stop()


def test_killed_at_three_moments_no_trial_is_lost_or_counted_twice(site: Site) -> None:
    def connected() -> bool:
        return any(plane["agent_id"] == "w0" and plane["connected"] for plane in planes())

    def planes() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = site.daemon.get("/v1/dataplanes")["dataplanes"]
        return found

    def running() -> bool:
        return any(trial["state"] == "running" for trial in site.study(study_id)["trials"])

    wait_until(connected, "the worker is connected")
    study_id = site.daemon.request("POST", "/v1/studies", REQUEST)["id"]

    # While trials are chosen: none is stored yet.
    search = wait_until(site.search_process, "the search process is started")
    assert site.study(study_id)["trials_total"] == 0
    site.restart()
    wait_until(lambda: not search.is_running() or search.status() == psutil.STATUS_ZOMBIE, "the orphan ends by itself")
    wait_until(lambda: site.study(study_id)["trials_done"] >= 3, "three trials are measured")

    # While a trial runs: daemon and worker, and on the way the search process as well.
    wait_until(running, "a trial runs")
    before = site.study(study_id)
    site.kill_worker()
    site.restart()
    after = site.study(study_id)
    measured = {trial["id"] for trial in before["trials"] if trial["state"] == "measured"}
    assert measured <= {trial["id"] for trial in after["trials"] if trial["state"] == "measured"}
    site.start_worker()
    wait_until(lambda: site.study(study_id)["trials_done"] >= len(measured) + 3, "it goes on")
    wait_until(site.search_process, "the search process is there").kill()
    wait_until(lambda: site.study(study_id)["trials_done"] >= len(measured) + 5, "it goes on with another one")

    # Between a trial's end and its being stored: the daemon stands still while the worker finishes.
    wait_until(running, "a trial runs")
    site.signal_daemon(signal.SIGSTOP)
    time.sleep(3.0)
    site.restart()

    study = wait_until(lambda: (s := site.study(study_id))["state"] == "finished" and s, "the study is finished")
    assert study["stop_reason"] == "budget"
    assert study["trials_by_state"] == {"measured": BUDGET}
    assert len(study["hypervolume_by_trial"]) == BUDGET
    measured_texts = [
        (trial["lossy_id"], segment)
        for trial in study["trials"]
        for segment in range(trial["first_segment"], trial["first_segment"] + REQUEST["segments"])
    ]
    assert len(measured_texts) == len(set(measured_texts)), "no text was measured twice for a part"
    assert {trial["segments_done"] for trial in study["trials"]} == {REQUEST["segments"]}
    assert study["front_size"] > 0
    assert {trial["source"] for trial in study["trials"]} <= {"sobol", "model"}, study["detail"]
    assert "model" in {trial["source"] for trial in study["trials"]}
