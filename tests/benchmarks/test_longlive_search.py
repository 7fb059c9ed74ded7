"""The comparison of ways to choose video settings runs on the real engine, and counts what it says that it counts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import longlive_search  # noqa: E402 - benchmarks are scripts, not a package


def test_the_last_line_has_ratios_to_both_rivals() -> None:
    rows = [
        {"name": name, "hypervolume_on_fresh_clips": share}
        for name, share in (("search", 0.3), ("chance", 0.25), ("grid", 0.2))
    ]
    assert longlive_search.last_line(rows) == "search=0.3000 over_chance=1.200 over_grid=1.500"


@pytest.mark.slow
def test_three_trials_each_on_the_real_engine(tmp_path: Path) -> None:
    out = tmp_path / "search.json"
    command = [sys.executable, str(ROOT / "benchmarks/longlive_search.py"), "--trials", "3", "--clips", "2"]
    command += ["--chunks", "1", "--checks", "2", "--checkpoint", "untrained", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert re.fullmatch(r"search=0\.\d{4} over_chance=\d+\.\d{3} over_grid=\d+\.\d{3}", done.stdout.splitlines()[-1])
    report = json.loads(out.read_text())
    assert [row["name"] for row in report["rows"]] == ["search", "chance", "grid"]
    for row in report["rows"]:
        assert row["trials"] == len(row["hypervolume_by_trial"]) == 3
        assert row["hypervolume_by_trial"] == sorted(row["hypervolume_by_trial"])
        assert row["front"]
