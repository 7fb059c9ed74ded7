"""The demo's plan and verdicts from made-up logs; the whole of it runs by `make demo-video`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controld.contract.errors import FieldError
from controld.policy.loader import SourceFile, parse_policies
from dataplanes.longlive.demo.plan import SERVICE_CLASS, DemoPlan, make_plan, policy_text
from dataplanes.longlive.demo.report import outpaces, phase_results, verdict_line, write_plot


def profile(steps: int, kv_bytes: int, loss: float) -> dict[str, Any]:
    return {
        "configuration": {"steps": steps}, "loss_mean": loss, "loss_se": 0.001,
        "memory": {"weights_bytes": 1000, "kv_bytes": kv_bytes, "activation_bytes": 500, "session_bytes": 10},
    }  # fmt: skip


PROFILES = [profile(4, 400, 0.0), profile(2, 400, 0.02), profile(4, 100, 0.01), profile(1, 100, 0.5)]


@pytest.fixture
def plan() -> DemoPlan:
    return make_plan(PROFILES, address="unix:///x", checkpoint="untrained", fps_of_one=40.0, phase_s=10.0)


def test_the_plan_asks_for_what_one_session_gets_easily_and_two_do_not(plan: DemoPlan) -> None:
    assert plan.target_fps == 22.0
    assert plan.max_quality_loss == pytest.approx((0.02 + 0.003) * 1.05)
    shrunk = next(phase for phase in plan.phases if phase.memory_limit_bytes)
    assert 1000 + 2 * 100 + 510 < shrunk.memory_limit_bytes < 1000 + 2 * 400 + 510
    assert DemoPlan.from_json(plan.to_json()) == plan


def test_the_policy_of_the_demo_is_right(plan: DemoPlan) -> None:
    (policy,) = parse_policies([SourceFile("v.yaml", policy_text(plan).encode())])
    live = policy.service_class(SERVICE_CLASS)
    assert live is not None
    assert live.video is not None
    assert live.video.fps == plan.target_fps
    assert live.max_quality_loss == plan.max_quality_loss


def test_where_nothing_saves_memory_there_is_nothing_to_show() -> None:
    with pytest.raises(FieldError, match="no setting needs less memory"):
        make_plan(PROFILES[:2], address="", checkpoint="", fps_of_one=40.0, phase_s=10.0)


def rows(plan: DemoPlan, *, fps: float, memory: int = 1500) -> list[dict[str, Any]]:
    """Ten frames at a time for each session, the setting changed three seconds into each phase."""
    made, begin_s = [], 0.0
    for phase in plan.phases:
        at_s = 0.0
        while at_s < phase.seconds:
            at_s += 10 / fps
            for name in phase.sessions:
                late = at_s > 3.0
                made.append(
                    {
                        "phase": phase.name, "phase_s": at_s, "at_s": begin_s + at_s, "session": name, "frames": 10,
                        "setting_id": "new" if late else "old", "memory_bytes": memory,
                        "applied": [{"version": 1}] if late and at_s - 10 / fps <= 3.0 else [],
                    }
                )  # fmt: skip
        begin_s += at_s
    return made


def test_a_phase_is_judged_over_its_last_part(plan: DemoPlan) -> None:
    held = phase_results(plan, rows(plan, fps=25.0))
    assert [result.holds_fps for result in held] == [True] * 4
    second = held[1]
    assert second.fps == {"a": pytest.approx(25.0, rel=0.01), "b": pytest.approx(25.0, rel=0.01)}
    assert second.setting_ids == ("old", "new")
    assert second.adapted_s == pytest.approx(3.0, abs=0.5)
    line = verdict_line(second, {"old": "4 steps", "new": "2 steps"})
    assert line.startswith("a second stream: 4 steps -> 2 steps | FPS a 25.0, b 25.0 of 22 held")


def test_missed_targets_are_called_missed(plan: DemoPlan) -> None:
    limit = plan.phases[2].memory_limit_bytes
    missed = phase_results(plan, rows(plan, fps=20.0, memory=limit + 1))
    assert not any(result.holds_fps for result in missed)
    assert [result.holds_memory for result in missed] == [True, True, False, True]
    assert "MISSED" in verdict_line(missed[0], {})
    starved = [row for row in rows(plan, fps=25.0) if row["session"] != "b"]
    assert not phase_results(plan, starved)[1].holds_fps, "a session without a frame is no session that was served"


def test_a_phase_that_is_there_to_show_a_change_must_have_one(plan: DemoPlan) -> None:
    assert all(result.changes for result in phase_results(plan, rows(plan, fps=25.0)))
    still = [{**row, "setting_id": "old", "applied": []} for row in rows(plan, fps=25.0)]
    results = phase_results(plan, still)
    assert [result.changes for result in results] == [True, False, True, True]
    assert verdict_line(results[1], {}).endswith("setting NOT CHANGED")


def test_a_target_of_a_slow_moment_is_noticed(plan: DemoPlan) -> None:
    assert not outpaces(plan, rows(plan, fps=75.0), 40.0)
    assert outpaces(plan, rows(plan, fps=90.0), 40.0)
    assert not outpaces(plan, rows(plan, fps=90.0)[-5:], 40.0), "of the first phase alone"


def test_the_plot_is_written(plan: DemoPlan, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(tmp_path / "t.svg", plan, rows(plan, fps=25.0), {})
    assert "FPS end to end" in (tmp_path / "t.svg").read_text() or (tmp_path / "t.svg").stat().st_size > 10_000
