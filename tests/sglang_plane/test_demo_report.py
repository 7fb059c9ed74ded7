"""The page and the tables show what the summary says, and need nothing from outside."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from dataplanes.sglang.demo.analysis import Sample, summarise
from dataplanes.sglang.demo.report import Timeline, page, terminal_tables

FACTORS = {"raw": 3.0, "static-1": 1.2, "static-2": 1.1, "static-3": 1.5, "controld": 1.0}


@pytest.fixture(scope="module")
def summary_and_timeline():  # type: ignore[no-untyped-def]
    samples = [
        Sample(phase=phase, pair=pair, arm=arm, prompt_tokens=64, ttft_s=factor + pair / 9, jct_s=2 * factor)
        for phase in ("fast", "slow")
        for pair in range(4)
        for arm, factor in FACTORS.items()
    ]
    effect = {"reason": "", "explored": False, "raw_bytes": 4_000_000, "wire_bytes": 1_000_000, "path": "coded"}
    effects = [{**effect, "phase": s.phase, "arm": s.arm, "arm_id": "0123456789abcdef"} for s in samples]
    summary = summarise(
        samples, effects, seed=1, max_quality_loss_nats=0.02, attached=True, separating_phase="slow",
        quality={"controld": {"mean": 0.031, "se": 0.001, "prompts": 8}},
        static_configurations={"static-1": {"code": "<b>"}},
    )  # fmt: skip
    requests = [(float(index), sample, effects[index]) for index, sample in enumerate(samples)]
    return summary, Timeline(link=[(0.0, 2e9), (20.0, 2e7)], requests=requests, estimates=[(1.0, 2e8), (21.0, 2.4e6)])


def test_the_page_is_self_contained_and_escapes(summary_and_timeline) -> None:  # type: ignore[no-untyped-def]
    text = page(*summary_and_timeline)
    assert text.count("<svg") == 2
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    outside = set(re.findall(r"(?:src|href)=\"(http[^\"]+)\"", text))
    assert not outside
    assert "<script" not in text


def test_tables_show_ratios_quality_and_a_missed_claim(summary_and_timeline) -> None:  # type: ignore[no-untyped-def]
    console = Console(file=io.StringIO(), width=200)
    for table in terminal_tables(summary_and_timeline[0]):
        console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"slow.*2\.\d\d \[", shown)
    assert "0.0310 +- 0.0010" in shown
    assert re.search(r"loss re-measured on the served prompts at most 0\.02 nats\s*│\s*no", shown)
