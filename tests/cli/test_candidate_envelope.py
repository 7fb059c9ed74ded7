from __future__ import annotations

import json
import math
from argparse import Namespace
from typing import Any

import numpy as np
import pytest

from controld.cli.candidate_envelope import profile_lines, show_envelopes
from controld.contract.errors import FieldError


def row(config_id: str, ratio: float, b_s_per_byte: float, **changes: Any) -> dict[str, Any]:
    stage = {"a_s": 1e-3, "b_s_per_byte": b_s_per_byte}
    return {
        "config_id": config_id, "configuration": {"quantise": "levels", "key_levels": 12, "code": config_id},
        "workload": "chat", "model_fingerprint": "f" * 64, "sender_hardware": "p", "receiver_hardware": "d",
        "ratio": ratio, "encode": stage, "decode": stage, "loss_mean_nats": 0.01, "loss_upper_nats": 0.012,
        "median_transfer_bytes": 14e6, **changes,
    }  # fmt: skip


QUICK, SMALL, HOPELESS = row("quick", 2.0, 1e-9), row("small", 6.0, 8e-9), row("hopeless", 1.9, 9e-9)


def shown(rows: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], size: str | None = "20MB") -> Any:
    show_envelopes(rows, Namespace(bytes=size, json=True))
    return json.loads(capsys.readouterr().out)


def test_each_bandwidth_has_its_candidate_with_the_gain_at_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    [document] = shown([QUICK, SMALL, HOPELESS], capsys)
    intervals = document["intervals"]
    assert [i["config_id"] for i in intervals] == ["small", "quick", "raw"], "from the slowest link to the fastest"
    assert document["bytes"] == 20e6
    assert (intervals[-1]["high_bytes_per_s"], intervals[0]["low_bytes_per_s"]) == (None, 0.0)
    assert intervals[0]["gain_at_low"] == pytest.approx(6.0), "on the slowest link the bytes are all that counts"
    assert intervals[1]["gain_at_high"] == pytest.approx(1.0, abs=1e-6), "where it begins to pay it is as fast as raw"
    for here in intervals:
        rate = math.sqrt(max(here["low_bytes_per_s"], 1e4) * (here["high_bytes_per_s"] or 1e11))
        seconds = profile_lines([QUICK, SMALL, HOPELESS], 20e6).seconds(np.array([[1 / rate]]))[:, 0, 0]
        assert ["raw", "quick", "small", "hopeless"][int(np.argmin(seconds))] == here["config_id"]


def test_people_see_ranges_and_gains(capsys: pytest.CaptureFixture[str]) -> None:
    other = row("quick", 2.0, 1e-9, workload="code")
    show_envelopes([QUICK, SMALL, other], Namespace(bytes=None, json=False))
    text = capsys.readouterr().out
    for part in ("workload chat", "workload code", "over ", "under ", "x6.00", "14 MB of raw KV"):
        assert part in text, part


def test_a_size_without_a_unit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for size in ("20", "0MB", "-1MB"):
        with pytest.raises(FieldError, match="--bytes"):
            shown([QUICK], capsys, size)
