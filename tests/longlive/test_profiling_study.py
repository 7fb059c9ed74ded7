"""A search of the reference engine's settings by the real daemon and a real worker, each killed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataplanes.longlive.demo.plan import DEPLOYMENT, PROFILING_POLICY
from tests.profiling.study_site import StudySite, measured_trials, wait_until

pytest.importorskip("botorch")
pytestmark = pytest.mark.slow

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


@pytest.fixture
def site(tmp_path: Path) -> Iterator[StudySite]:
    worker = ["dataplanes.longlive.profiler", "--deployment", DEPLOYMENT, "--checkpoint", "untrained"]
    with StudySite(tmp_path, {"video.yaml": PROFILING_POLICY}, worker) as made:
        yield made


def test_a_search_over_kill_9_of_daemon_and_worker_ends_with_profiles_of_every_setting(site: StudySite) -> None:
    study_id = site.begin(REQUEST)
    wait_until(lambda: site.study(study_id)["trials_done"] >= 2, "two trials are measured")
    before = measured_trials(site.study(study_id))
    site.kill_worker()
    site.restart_daemon()
    assert before <= measured_trials(site.study(study_id))
    site.start_worker()
    study = site.finished(study_id)
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
