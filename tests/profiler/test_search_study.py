"""A search by the real daemon, a real worker and the real search process, each killed at the worst moments."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataplanes.sglang.demo.plan import DEMO
from dataplanes.sglang.demo.policies import policy_text
from tests.profiling.study_site import StudySite, measured_trials, wait_until

pytest.importorskip("botorch")
pytestmark = pytest.mark.slow

BUDGET = 22
"""Twenty trials fill the space, the last two are chosen by the model."""
REQUEST: dict[str, Any] = {
    "plane": "sglang",
    "workload": "dialogue",
    "method": "search",
    "budget": BUDGET,
    "restrict": {"quantise": ["levels", "nvfp4", "fp8_e4m3"], "transform": ["none", "hadamard"]},
    "segments": 8,
    "max_segments": 8,
    "lengths": [500],
    "continuation_tokens": 32,
}
"""Trials of some tenths of a second, so that a quick machine is caught in one, too."""


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def site(tmp_path: Path, tiny_model_dir: Path, texts_dir: Path) -> Iterator[StudySite]:
    worker = ["dataplanes.sglang.profiler", "--model", str(tiny_model_dir), "--texts", str(texts_dir)]
    worker += ["--evaluation-threads", "1", "--page-tokens", "16", "--frame-bytes", "32768"]
    with StudySite(tmp_path, {"demo.yaml": policy_text(DEMO, {})}, worker) as made:
        yield made


def test_killed_at_three_moments_no_trial_is_lost_or_counted_twice(site: StudySite) -> None:
    def daemon_process() -> psutil.Process:
        assert site.daemon.process is not None
        return psutil.Process(site.daemon.process.pid)

    def search_process() -> psutil.Process | None:
        for child in daemon_process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if "controld.profiling.worker" in " ".join(child.cmdline()):
                    return child
        return None

    def running() -> bool:
        return any(trial["state"] == "running" for trial in site.study(study_id)["trials"])

    study_id = site.begin(REQUEST)

    # While trials are chosen: none is stored yet.
    search = wait_until(search_process, "the search process is started")
    assert site.study(study_id)["trials_total"] == 0
    site.restart_daemon()
    wait_until(lambda: has_ended(search), "the orphan ends by itself")
    wait_until(lambda: site.study(study_id)["trials_done"] >= 3, "three trials are measured")

    # While a trial runs: daemon and worker, and on the way the search process as well.
    wait_until(running, "a trial runs")
    measured = measured_trials(site.study(study_id))
    site.kill_worker()
    site.restart_daemon()
    assert measured <= measured_trials(site.study(study_id))
    site.start_worker()
    wait_until(lambda: site.study(study_id)["trials_done"] >= len(measured) + 3, "it goes on")
    wait_until(search_process, "the search process is there").kill()
    wait_until(lambda: site.study(study_id)["trials_done"] >= len(measured) + 5, "it goes on with another one")

    # Between a trial's end and its being stored: the daemon stands still while the worker finishes.
    wait_until(running, "a trial runs")
    daemon_process().send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    site.restart_daemon()

    study = site.finished(study_id)
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
