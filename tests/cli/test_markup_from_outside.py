"""Text from outside is shown letter by letter, whatever it means to the library that draws it."""

from __future__ import annotations

import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from controld.cli import status
from controld.cli.candidate_envelope import show_envelopes
from controld.cli.candidate_plot import write_plots
from controld.cli.candidate_table import show_kv, show_video
from controld.cli.candidate_video_plot import write_video_plots
from controld.cli.study_screen import study_screen

EVIL = "[/nope][red]x"


def row(text: str = EVIL) -> dict[str, Any]:
    stage = {"a_s": 1e-3, "b_s_per_byte": 1e-9}
    return {
        "config_id": f"{text}-id", "configuration": {"quantise": "none", "code": text}, "workload": text,
        "model_fingerprint": text, "sender_hardware": text, "receiver_hardware": f"to {text}", "corpus": text,
        "provenance": text, "ratio": 4.0, "encode": stage, "decode": stage, "loss_mean_nats": 0.01,
        "loss_se_nats": 0.001, "loss_upper_nats": 0.012, "loss_samples": 8, "worst_prompt_tokens": 256,
        "median_transfer_bytes": 14e6, "latency_s_per_byte": 2e-9, "bytes_objective": 0.25, "measured_unix_s": 1e9,
        "pareto": True,
    }  # fmt: skip


def test_the_table_of_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    show_kv([row()])
    text = capsys.readouterr().out
    assert f"workload {EVIL}, model {EVIL[:12]}" in " ".join(text.split())
    assert f"{EVIL}-id" in text and f"lossless {EVIL}" in text


def video_row(text: str = EVIL) -> dict[str, Any]:
    sizes = ("weights_bytes", "kv_bytes", "activation_bytes", "session_bytes")
    return {
        "config_id": f"{text}-id", "configuration": {"weights": text, "steps": 4}, "workload": text, "source": text,
        "model_fingerprint": text, "hardware": text, "provenance": text, "loss_mean": 0.01, "loss_se": 0.001,
        "loss_upper": 0.012, "loss_samples": 8, "forward_s": 0.05, "vae_s": 0.1, "frames_per_chunk": 8,
        "seconds_per_frame": 0.03, "memory_bytes": 40, "memory": dict.fromkeys(sizes, 10), "drift": None,
        "motion": None, "measured_unix_s": 1e9, "pareto": True,
    }  # fmt: skip


def test_the_table_of_video_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    show_video([video_row(), {**video_row(), "configuration": {"weights": EVIL, "steps": 2}}])
    text = capsys.readouterr().out
    assert f"workload {EVIL}, model {EVIL[:12]}, {EVIL}, {EVIL}" in text
    assert f"{EVIL}-id" in text and f"all of them: {EVIL}, n 8" in text


@pytest.mark.parametrize("text", [r"$\nope$", "$", r"\$x$"])
def test_the_picture_of_video_candidates(text: str, tmp_path: Path) -> None:
    (written,) = write_video_plots([video_row(text)], tmp_path / "front.svg")
    assert written.stat().st_size


def test_the_envelopes(capsys: pytest.CaptureFixture[str]) -> None:
    show_envelopes([row()], Namespace(bytes=None, json=False))
    text = capsys.readouterr().out
    assert f"workload {EVIL}" in text and f"lossless {EVIL}" in text


@pytest.mark.parametrize("text", [r"$\nope$", *(pytest.param(text, marks=pytest.mark.slow) for text in ("$", r"\$x$"))])
def test_the_picture(text: str, tmp_path: Path) -> None:
    (written,) = write_plots([row(text)], tmp_path / "front.svg")
    assert written.stat().st_size


def test_the_screen_of_a_study() -> None:
    trial = {
        "id": EVIL, "source": EVIL, "lossy": {"quantise": EVIL}, "state": EVIL, "segments_done": 1,
        "segments_total": 2, "loss_nats": 0.01, "loss_se_nats": None, "seconds": 3.0,
    }  # fmt: skip
    point = {"label": EVIL, "loss_nats": 0.01, "ratio": 4.0, "seconds_per_byte": 2e-9}
    study = {
        "id": EVIL, "state": EVIL, "budget": 200, "trials_done": 30, "trials_total": 32, "age_s": 60.0,
        "segments_done": 60, "segments_total": 64, "eta_s": 100.0, "trials": [trial], "front": [point],
        "hypervolume": 0.5, "hypervolume_by_trial": [0.1, 0.3], "detail": EVIL, "medium": "kv",
        "seconds": {"measuring": 50.0, "search": 4.0, "waiting": 5.0},
    }  # fmt: skip
    out = Console(file=io.StringIO(), width=200)
    out.print(study_screen(study, 40))
    assert out.file.getvalue().count(EVIL) == 7  # type: ignore[attr-defined]


def test_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {"raw_bytes": 100, "wire_bytes": 50, "transfers": 3}
    tenant = {"name": EVIL, "share": 0.5, "slowdown": 1.0, **numbers}
    link = ("bandwidth_bytes_per_s", "bandwidth_sd_bytes_per_s", "bandwidth_age_s", "offered_bytes_per_s")
    status._show(
        {
            "version": EVIL, "uptime_s": 1.0, "policy_generation": 1, "published_version": 1,
            "policy_problems": [{"text": EVIL}], "alarms": [{"where": EVIL, "what": EVIL}],
            "agents": [
                {
                    "agent_id": EVIL, "kind": EVIL, "deployment": "d", "role": EVIL, "attached": False,
                    "attach_reason": EVIL, "effective_version": 1, "degraded": False,
                }
            ],
            "links": [{"agent_id": EVIL, "tier": EVIL, "backlog_bytes": 0, **dict.fromkeys(link, 1e6)}],
            "transfers": [{"service_class": EVIL, "arm_id": EVIL, "path": EVIL, **numbers}],
            "sizes": {EVIL: {"median_bytes": 1, "p90_bytes": 2, "p99_bytes": 3, "weight": 1.0}},
            "tenants": [{"kind": EVIL, "deployment": "d", "jain_index": 0.9, "tenants": [tenant, tenant]}],
            "guard": [
                {
                    "service_class": EVIL, "arm_id": EVIL, "state": EVIL, "samples": 1, "last_error": 0.1,
                    "normal_error": 0.1, "normal_from": EVIL, "suspicion": 0.0,
                }
            ],
        }
    )  # fmt: skip
    text = capsys.readouterr().out
    assert text.count(EVIL) == 23
    assert f"alarm {EVIL}: {EVIL}" in text
