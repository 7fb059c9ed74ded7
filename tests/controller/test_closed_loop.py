"""The parts together: decide, draw, learn, against a link whose truth is written apart from the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from controld.candidates.profile import Profile
from controld.contract.decision import RAW
from controld.controller.decide import decide
from controld.controller.goals import ClassGoal, TableRequest
from controld.controller.grid import Grid
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.learner import Learner
from controld.controller.plan import Plan, plan_equal

Build = Callable[..., Any]
# The truth in these tests is serial, so the model is told that nothing overlaps: one chunk.
KNOB = KvTransfer(chunk_bytes=1e12, rtt_s=0.0)
SIZE = 14e6


@dataclass
class Loop:
    """A controller that re-plans after every transfer and publishes only what changed."""

    request: TableRequest
    learner: Learner
    grid: Grid
    plan: Plan | None = None
    version: int = 0
    now_s: float = 1e6
    explored: int = 0

    def replan(self) -> None:
        request = TableRequest(
            tier=self.request.tier,
            link_group=self.request.link_group,
            goals=self.request.goals,
            profiles=self.request.profiles,
            corrections=self.learner.corrections(self.now_s),
            pins=self.learner.pins(self.now_s),
            sender_hardware="p",
            receiver_hardware="d",
        )
        plan = decide([request], knob=KNOB, grid=self.grid, previous=self.plan)
        if not plan_equal(self.plan, plan):
            self.version += 1
        self.plan = plan

    def transfers(self, link: Any, count: int) -> Iterator[tuple[str, float, float]]:
        """Arm, its true mean seconds and the best arm's, for each transfer."""
        profiles: dict[str, Profile | None] = {RAW: None, **{p.arm_id: p for p in self.request.profiles}}
        best = min(link.mean_s(p, SIZE) for p in profiles.values())
        for _ in range(count):
            self.now_s += 1.0
            self.replan()
            assert self.plan is not None
            transfer_id = f"t{self.now_s}"
            table = self.plan.tables[0].decision_table(self.version)
            drawn = table.draw(transfer_id, "default", SIZE, link.bandwidth_bytes_per_s, 0.1)
            self.explored += drawn.explored
            arm_id = drawn.arm.arm_id
            self.learner.observe(link.effect(profiles[arm_id], SIZE, transfer_id, self.now_s), self.now_s)
            yield arm_id, link.mean_s(profiles[arm_id], SIZE), best


@pytest.fixture
def loop(request_for: Build, small_grid: Grid) -> Callable[..., Loop]:
    def build(*profiles: Profile, explore_share: float = 0.02) -> Loop:
        goal = ClassGoal(name="default", workload="dialogue", max_quality_loss_nats=0.05, explore_share=explore_share)
        learner = Learner("pd", "default", KNOB)
        learner.set_candidates(profiles, sender_hardware="p", receiver_hardware="d")
        return Loop(request_for(*profiles, goals=(goal,)), learner, small_grid)

    return build


def test_leaves_a_profile_that_turned_four_times_slower_within_six_observations(
    loop: Callable[..., Loop], profile: Build, true_link: Any
) -> None:
    first, second = profile(12, ratio=6.0), profile(8, ratio=4.0)
    running = loop(first, second, explore_share=0.0)
    link = true_link(125e6)
    assert {arm for arm, _, _ in running.transfers(link, 30)} == {first.arm_id}
    link.slowdown[first.arm_id] = 4.0
    arms = [arm for arm, _, _ in running.transfers(link, 12)]
    assert first.arm_id not in arms[6:]


@pytest.mark.slow
def test_regret_stays_bounded_through_regime_switches(
    loop: Callable[..., Loop], profile: Build, true_link: Any
) -> None:
    first, second = profile(12, ratio=6.0), profile(8, ratio=4.0)
    running = loop(first, second)
    link = true_link(125e6, noise=0.2)
    regrets = []
    for bandwidth, slowdown in (
        (125e6, {}),
        (125e6, {first.arm_id: 4.0}),
        (3e9, {first.arm_id: 4.0}),
        (30e6, {first.arm_id: 4.0}),
        (30e6, {second.arm_id: 4.0}),
    ):
        link.bandwidth_bytes_per_s, link.slowdown = bandwidth, slowdown
        seconds = np.array([(spent, best) for _, spent, best in running.transfers(link, 200)])
        regrets.append(seconds[:, 0].sum() / seconds[:, 1].sum() - 1)
    assert max(regrets) < 0.15, regrets
    assert float(np.mean(regrets)) < 0.06, regrets
    assert min(regrets) >= 0.0


def test_explores_but_not_beyond_its_share(loop: Callable[..., Loop], profile: Build, true_link: Any) -> None:
    first, second = profile(12, ratio=4.0), profile(8, ratio=4.0)
    running = loop(first, second, explore_share=0.1)
    list(running.transfers(true_link(125e6, noise=0.2), 400))
    # At most 40 expected; 58 is three standard deviations more.
    assert 2 <= running.explored <= 58


def test_an_arm_that_recovered_is_found_again(loop: Callable[..., Loop], profile: Build, true_link: Any) -> None:
    first, second = profile(12, ratio=6.0), profile(8, ratio=4.0)
    running = loop(first, second)
    link = true_link(30e6)
    list(running.transfers(link, 20))
    link.slowdown[first.arm_id] = 8.0
    list(running.transfers(link, 40))
    link.slowdown.clear()
    running.now_s += 8 * 3600.0
    arms = [arm for arm, _, _ in running.transfers(link, 60)]
    assert arms[-20:].count(first.arm_id) >= 18


def test_tables_settle_while_nothing_changes(loop: Callable[..., Loop], profile: Build, true_link: Any) -> None:
    running = loop(profile(12, ratio=6.0), profile(8, ratio=4.0))
    link = true_link(125e6, noise=0.05)
    list(running.transfers(link, 100))
    before = running.version
    list(running.transfers(link, 100))
    assert running.version - before < 20


def test_no_evidence_no_new_plan(loop: Callable[..., Loop], profile: Build) -> None:
    running = loop(profile(12, ratio=6.0), profile(8, ratio=4.0))
    running.replan()
    running.replan()
    assert running.version == 1
