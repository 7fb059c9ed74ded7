"""The plots stand alone, hold every candidate and nothing that a text could smuggle in."""

from __future__ import annotations

import builtins
import itertools
import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from controld.cli.candidate_plot import label_steps, log_ticks, page, write_plots
from controld.contract.errors import ControldError


def row(loss: float = 0.01, ratio: float = 4.0, **changes: Any) -> dict[str, Any]:
    return {
        "config_id": f"{loss}-{ratio}", "lossy_id": str(loss), "configuration": {"quantise": "nvfp4", "code": "zstd"},
        "workload": "general", "model_fingerprint": "f" * 64, "sender_hardware": "cpu", "receiver_hardware": "cpu",
        "loss_mean_nats": loss, "loss_se_nats": loss / 10, "loss_upper_nats": None, "loss_samples": 4,
        "ratio": ratio, "bytes_objective": 1 / ratio, "latency_s_per_byte": 2e-9, "pareto": True, "provenance": "study",
        "corpus": "texts", **changes,
    }  # fmt: skip


ROWS = [row(), row(0.0, 1.5), row(0.1, 8.0, pareto=False), row(workload="dialogue")]


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_page_holds_every_candidate_and_fetches_nothing() -> None:
    text = page(ROWS)
    assert not re.search(r"https?://|src=|@import|url\(", text)
    groups = data_of(text)["groups"]
    assert [len(group["points"]) for group in groups] == [3, 1]
    lossless = groups[0]["points"][1]
    assert lossless["at"] == [1e-6, pytest.approx(2.0), 1 / 1.5]


def test_a_text_cannot_end_the_data() -> None:
    evil = "</script><script>alert(1)</script>"
    text = page([row(provenance=evil, configuration={"quantise": evil})])
    assert evil not in text
    assert evil in data_of(text)["groups"][0]["points"][0]["cells"][-1]["text"]


@pytest.mark.slow
def test_names_in_the_picture_do_not_lie_on_each_other() -> None:
    from matplotlib.figure import Figure

    crowd = [
        row(0.01 - 1e-4 * step, 4.0 - 0.05 * step, configuration={"quantise": f"format{step}"}) for step in range(20)
    ]
    steps = [*crowd, row(0.0, 1.5, configuration={"quantise": "nothing lost"})]
    axes = Figure(figsize=(7, 7)).add_subplot()
    axes.set(xscale="log", yscale="log", xlim=(0.1, 1.0), ylim=(1e-7, 1.0))
    label_steps(axes, steps)
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert {"format0", "nothing lost"} <= {text.get_text() for text in axes.texts}, "the ends are named"
    assert 2 < len(boxes) < 20


@pytest.mark.slow
def test_a_folder_gets_page_and_picture(tmp_path: Path) -> None:
    written = write_plots(ROWS, tmp_path / "plots")
    assert [path.name for path in written] == ["front.html", "front.png"]
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert data_of(written[0].read_text())["groups"]


def test_what_was_not_measured_is_left_out(tmp_path: Path) -> None:
    prior = row(0.0, 9.0, loss_samples=0)
    (written,) = write_plots([row(), prior], tmp_path / "x.html")
    assert len(data_of(written.read_text())["groups"][0]["points"]) == 1
    with pytest.raises(ControldError, match="no candidates"):
        write_plots([prior], tmp_path / "y.html")


def test_a_picture_without_matplotlib_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("no matplotlib")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ControldError, match=re.escape('pip install "controld[plot]"')):
        write_plots([row()], tmp_path / "x.png")
    assert write_plots([row()], tmp_path / "x.html")


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ControldError, match="cannot be written"):
        write_plots([row()], tmp_path / "file" / "plots")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(1e-6, 1.0, [10.0**n for n in range(-6, 1)]), (0.1, 0.7, [0.1, 0.2, 0.5]), (2.0, 2.0, [2.0])],
)
def test_ticks_are_round_and_within(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js on this machine")
@pytest.mark.parametrize(
    ("up", "expected"),
    [("true", ["cheap", "dear", "unknown", "unknown too"]), ("false", ["dear", "cheap", "unknown", "unknown too"])],
)
def test_a_value_that_is_not_known_comes_last_whichever_way_the_table_is_sorted(up: str, expected: list[str]) -> None:
    template = resources.files("controld.cli").joinpath("candidate_page.html").read_text(encoding="utf-8")
    # The page's own order, without the rest of it, which needs a browser.
    found = re.search(r"^const order = .*?^const inOrder = .*?;$", template, re.MULTILINE | re.DOTALL)
    assert found is not None
    assert "of inOrder(points, sortBy, sortUp))" in template, "the table is in that order"
    keys = {"unknown": None, "dear": 20.0, "unknown too": None, "cheap": 3.0}
    points = json.dumps([{"label": label, "cells": [{"key": key}]} for label, key in keys.items()])
    script = f"{found[0]}\nconsole.log(JSON.stringify(inOrder({points}, 0, {up}).map(point => point.label)))"
    told = subprocess.run(["node", "--eval", script], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(told.stdout) == expected
