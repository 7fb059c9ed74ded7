"""Everybody on the same arrivals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.sim.arrivals import TrafficClass, generate
from controld.sim.deciders.base import Menu
from controld.sim.link import LinkTruth
from controld.sim.replay import Replay, best_statics, report, run_replay
from controld.sim.schedule import RateSchedule

Build = Callable[..., Any]


@pytest.fixture
def replay(world_of: Build, request_for: Build) -> Replay:
    world = world_of(link=LinkTruth(schedule=RateSchedule.parse("0s=100Mbit,20s=2Gbit")))
    arrivals = generate([TrafficClass(median_bytes=8e6, log_sd=0.3)], count=40, gap_s=1.0, seed=1)
    return Replay(request=request_for(), world=world, arrivals=arrivals, statics=2)


def test_every_decider_serves_every_arrival(replay: Replay) -> None:
    begun: list[str] = []
    runs = run_replay(replay, begun.append)
    assert [run.decider for run in runs] == begun
    assert begun[0] == RAW and begun[-2:] == ["controld", "oracle"] and begun[3] == "kvserve" and len(begun) == 6
    for run in runs:
        assert [record.raw_bytes for record in run.records] == [arrival.raw_bytes for arrival in replay.arrivals]
    rows = {row["decider"]: row for row in report(runs)["deciders"]}
    assert rows["oracle"]["regret"] == 0.0
    assert all(row["regret"] > 0 for name, row in rows.items() if name != "oracle")
    assert rows["controld"]["regret"] < rows[RAW]["regret"]


def test_static_arms_are_those_that_are_quickest_by_profile(replay: Replay, arms: tuple[str, ...]) -> None:
    # On the mean over 100 Mbit and 2 Gbit of 8 MB: the middle one (0.23 s), then the one with the best ratio.
    menu = Menu.of(replay.request)
    chosen = best_statics(replay, menu)
    assert len(chosen) == 2 and set(chosen) < set(menu.of_class("default")) and RAW not in chosen
    assert arms[2] not in chosen
    assert best_statics(replay, Menu({"default": (RAW, arms[2])})) == [arms[2]]


def test_nothing_to_replay_is_an_error(replay: Replay) -> None:
    from dataclasses import replace

    with pytest.raises(FieldError, match="arrivals"):
        run_replay(replace(replay, arrivals=[]))


def test_the_controller_is_told_the_world_s_chunks_and_round_trip(replay: Replay) -> None:
    table = replay.controller().table
    assert table.bandwidth_edges_bytes_per_s[0] < 12.5e6 and table.bandwidth_edges_bytes_per_s[-1] > 250e6


def test_classes_that_teach_nothing_teach_nothing(replay: Replay) -> None:
    from dataclasses import replace

    from controld.sim.engine import simulate

    controller = replace(replay, unlearned_classes=("default",)).controller()
    run = simulate(replay.world, replay.arrivals, controller)
    assert controller.learner.evidence == 0
    assert {record.arm_id for record in run.records} == {RAW}
