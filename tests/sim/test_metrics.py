"""Figures of runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.sim.arrivals import TrafficClass, generate, one_after_another
from controld.sim.deciders.base import Menu
from controld.sim.deciders.fixed import StaticArm
from controld.sim.engine import simulate
from controld.sim.metrics import jain, regret, slowdowns, summarise, tenant_slowdowns
from controld.sim.schedule import Drift

Build = Callable[..., Any]
T = TypeVar("T")


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_jains_index_lies_between_one_over_n_and_one(values: list[float]) -> None:
    assert 1 / len(values) - 1e-9 <= jain(values) <= 1 + 1e-9


def test_jains_index_of_known_values() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 3.0]) == pytest.approx(16 / 20)
    assert jain([1.0, 3.0], weights=[1.0, 3.0]) == pytest.approx(1.0)
    for bad in ([], [0.0, 1.0], [float("nan")]):
        with pytest.raises(FieldError):
            jain(bad)


def test_regret_is_of_seconds_and_by_segment(world_of: Build, arms: tuple[str, ...]) -> None:
    drift = Drift(factor=50.0, arm_id=arms[0], from_transfer=10)
    arrivals = one_after_another([TrafficClass()], count=20, pause_s=1.0, seed=0)
    world = world_of(drifts=(drift,))
    first, raw = (simulate(world, arrivals, StaticArm(arm), in_flight=1) for arm in (arms[0], RAW))
    assert regret(first, raw, (0, 10)) < 0 < regret(first, raw, (10, 20))
    totals = [sum(record.total_s for record in run.records) for run in (first, raw)]
    assert regret(first, raw) == pytest.approx(totals[0] / totals[1] - 1)
    with pytest.raises(FieldError, match="segment"):
        regret(first, raw, (20, 30))


def test_slowdown_is_one_alone_on_the_best_arm(world_of: Build, request_for: Build) -> None:
    menu = Menu.of(request_for())
    world = world_of()
    arrivals = one_after_another([TrafficClass(log_sd=1.0)], count=20, pause_s=5.0, seed=0)
    by_arm = np.array([
        slowdowns(simulate(world, arrivals, StaticArm(arm), in_flight=1), world, menu)
        for arm in menu.of_class("default")
    ])  # fmt: skip
    assert by_arm.min(axis=0) == pytest.approx(np.ones(20))
    assert by_arm[0].min() > 2.0


class Turnwise(Generic[T]):
    """Tenants in turn, whatever their items cost."""

    def __init__(self) -> None:
        self.waiting: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return sum(len(items) for items in self.waiting.values())

    def push(self, item: T, *, tenant: str, transfer: Hashable, cost_bytes: float) -> None:
        assert cost_bytes > 0
        self.waiting.setdefault(tenant, deque()).append(item)

    def pop(self) -> T:
        tenant = next(name for name, items in self.waiting.items() if items)
        items = self.waiting.pop(tenant)
        self.waiting[tenant] = items
        return items.popleft()

    def charge(self, tenant: str, extra_bytes: float) -> None:
        assert tenant in self.waiting


def test_a_fair_queue_evens_what_a_greedy_tenant_takes(world_of: Build, request_for: Build) -> None:
    greedy = TrafficClass(tenant="greedy", median_bytes=20e6, share=9.0)
    modest = TrafficClass(tenant="modest", median_bytes=2e6, share=1.0)
    arrivals = generate([greedy, modest], count=400, gap_s=1.4, seed=1)
    world, menu = world_of(), Menu.of(request_for())

    def index(**queue: Any) -> float:
        run = simulate(world, arrivals, StaticArm(RAW), **queue)
        assert sorted(record.index for record in run.records) == list(range(400))
        return jain(list(tenant_slowdowns(run, slowdowns(run, world, menu)).values()))

    assert index(new_queue=Turnwise) > index() + 0.1


def test_a_summary_adds_up(world_of: Build, arms: tuple[str, ...]) -> None:
    arrivals = generate([TrafficClass(median_bytes=3e6, log_sd=0.5)], count=50, gap_s=1.0, seed=2)
    run = simulate(world_of(), arrivals, StaticArm(arms[0]))
    summary = summarise(run)
    assert summary["raw_bytes"] == sum(arrival.raw_bytes for arrival in arrivals)
    assert summary["wire_bytes"] == pytest.approx(summary["raw_bytes"] / 6.0)
    assert summary["arms"] == {arms[0]: 50}
    assert (summary["compressed_share"], summary["mean_loss_nats"]) == (1.0, pytest.approx(0.01))
    assert summary["p50_s"] <= summary["p90_s"] <= summary["p99_s"]
    document = run.to_document()
    assert document["transfers"][3]["total_s"] == run.records[3].total_s
