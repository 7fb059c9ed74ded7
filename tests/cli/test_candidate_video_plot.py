"""The plots of video settings: loss, speed and memory of each that has a place, and nothing smuggled in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from controld.cli.candidate_video_plot import video_page, write_video_plots
from controld.contract.errors import ControldError


def row(loss: float | None = 0.01, steps: int = 4, **changes: Any) -> dict[str, Any]:
    memory = {"weights_bytes": 2_000_000, "kv_bytes": 900_000, "activation_bytes": 100_000, "session_bytes": 0}
    return {
        "config_id": f"{loss}-{steps}", "configuration": {"weights": "bf16", "activations": "nvfp4", "steps": steps},
        "workload": "shapes", "model_fingerprint": "f" * 64, "hardware": "cpu", "source": "measured",
        "loss_mean": loss, "loss_se": 0.001, "loss_upper": None if loss is None else loss + 0.002, "loss_samples": 30,
        "forward_s": 0.05, "vae_s": 0.1, "frames_per_chunk": 8, "seconds_per_frame": 0.04, "memory_bytes": 3_000_000,
        "memory": memory, "drift": None, "motion": 0.04, "provenance": "grid", "pareto": steps == 4, **changes,
    }  # fmt: skip


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_has_each_setting_at_its_place_and_fetches_nothing() -> None:
    text = video_page([row(), row(-0.003, 2), row(hardware="gpu")])
    assert not re.search(r"https?://|src=|@import|url\(", text)
    data = data_of(text)
    assert [axis["is_log"] for axis in data["axes"]] == [False, True, True], "a loss may lie below zero"
    assert [len(group["points"]) for group in data["groups"]] == [2, 1]
    best, fast = data["groups"][0]["points"]
    assert best["at"] == [0.01, pytest.approx(40.0), 3.0]
    assert fast["at"][0] == -0.003
    assert (best["front"], fast["front"]) == (True, False)
    assert (best["label"], fast["label"]) == ("4 steps", "2 steps"), "what they share is in the title"
    assert data["groups"][0]["title"].endswith("cpu, measured; all: bf16/nvfp4")
    assert data["colours"].keys() == {"bf16/nvfp4"}
    assert {len(point["cells"]) for group in data["groups"] for point in group["points"]} == {len(data["columns"])}
    facts = dict(best["facts"])
    assert facts["one session"] == "40 ms per frame, 25 FPS"
    assert (facts["KV window"], facts["id"]) == ("900 kB", "0.01-4")


def test_a_text_cannot_end_the_data() -> None:
    evil = "</script><script>alert(1)</script>"
    text = video_page([row(provenance=evil, configuration={"weights": evil, "steps": 4})])
    assert evil not in text
    assert data_of(text)["groups"][0]["points"][0]["cells"][-1]["text"] == evil


def test_what_has_no_place_is_left_out(tmp_path: Path) -> None:
    unknown = [row(None, 2), row(0.02, 3, memory=None, memory_bytes=None)]
    (written,) = write_video_plots([row(), *unknown], tmp_path / "x.html")
    assert [point["config_id"] for point in data_of(written.read_text())["groups"][0]["points"]] == ["0.01-4"]
    with pytest.raises(ControldError, match="no video candidates"):
        write_video_plots(unknown, tmp_path / "y.html")


@pytest.mark.slow
def test_a_folder_gets_page_and_picture(tmp_path: Path) -> None:
    written = write_video_plots([row(), row(0.1, 2), row(hardware="gpu")], tmp_path / "plots")
    assert [path.name for path in written] == ["front.html", "front.png"]
    assert written[1].read_bytes().startswith(b"\x89PNG")
