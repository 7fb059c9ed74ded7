"""The controller that serves, on a virtual clock: its estimators, draw, learner and plan, and nothing rebuilt.

What the agent does between them (`dataplanes/agent`) and what the planner does (`controld/planning`) is followed here:
an arm is drawn from the table in force with the estimates of that moment; raw where no bandwidth is known; an effect
reaches the daemon a moment after the transfer ended; the daemon plans when its pace allows (`controller/pacing.py`),
compares with the plan before, and a new table is in force only if a cell changed.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from controld.contract.decision import RAW, DecisionTable
from controld.contract.effect import Effect, Half, Path, Verdict
from controld.controller.decide import decide
from controld.controller.goals import TableRequest
from controld.controller.grid import Grid
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.learner import Learner
from controld.controller.pacing import Pace
from controld.controller.plan import Plan, plan_equal
from controld.sim.deciders.base import Situation
from controld.sim.deciders.link_view import LinkView
from controld.sim.record import Arrival, Choice, TransferRecord

UNIX_S = 1e9
"""Where the virtual clock begins on the calendar: effects that are older than ten minutes are not believed."""

IDLE_REPLAN_S = 30.0
"""As the planner's: without news, evidence still fades."""


class ProductionController:
    """`decide`, `Learner`, `DecisionTable.draw` and the estimators, put together as daemon and agent put them.

    Args:
        request: goals, profiles, hardware and the operator's word on the link; what is learned replaces its
            corrections and pins.
        knob: the cost model; must be told the world's chunks, round trip and whether a peer has one worker.
        grid: of the tables; `grid_within` makes one that leaves out cells nobody visits.
        interval_s: the least time between two plans that no surprise calls for.
        effect_delay_s: until the daemon knows of an effect: the agent's pause and the commit.
        unlearned_classes: classes whose transfers teach nothing, neither the estimators nor the learner.
        name: in tables.
    """

    def __init__(
        self,
        request: TableRequest,
        *,
        knob: KvTransfer | None = None,
        grid: Grid | None = None,
        interval_s: float = 1.0,
        effect_delay_s: float = 0.1,
        unlearned_classes: tuple[str, ...] = (),
        name: str = "controld",
    ) -> None:
        self._name = name
        self._request = request
        self._knob = knob or KvTransfer()
        self._grid = grid or Grid()
        self._pace = Pace(interval_s)
        self._effect_delay_s = effect_delay_s
        self.learner = Learner(request.tier, request.link_group, self._knob)
        self.learner.set_candidates(
            request.profiles,
            raw_overhead=request.raw_overhead,
            sender_hardware=request.sender_hardware,
            receiver_hardware=request.receiver_hardware,
            unlearned_classes=unlearned_classes,
        )
        self._unlearned = frozenset(unlearned_classes)
        self._link = LinkView(request.prior_bandwidth_bytes_per_s, self._knob.rtt_s)
        self._news: deque[tuple[float, TransferRecord]] = deque()
        self._plan_due_s = 0.0
        self._planned_s = -math.inf
        self.plan: Plan | None = None
        self.version = 0
        self.plans = 0
        self._table: DecisionTable | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def table(self) -> DecisionTable:
        """The table in force."""
        if self._table is None:
            self._replan(0.0)
        assert self._table is not None
        return self._table

    def offered(self, arrival: Arrival, now_s: float) -> None:
        """For the load."""
        if arrival.service_class not in self._unlearned:
            self._link.offered(now_s, arrival.raw_bytes)

    def wire_span(self, arrival: Arrival, start_s: float, end_s: float, wire_bytes: float) -> None:
        """For the bandwidth."""
        if arrival.service_class not in self._unlearned:
            self._link.wire_span(start_s, end_s, wire_bytes)

    def choose(self, arrival: Arrival, situation: Situation) -> Choice:
        """Draw from the table in force."""
        self._catch_up(situation.now_s)
        bandwidth = self._link.bandwidth_bytes_per_s(situation.now_s)
        if bandwidth <= 0:
            return Choice(RAW, table_version=self.version)
        load = self._link.load(situation.now_s)
        drawn = self.table.draw(f"t{situation.index}", arrival.service_class, arrival.raw_bytes, bandwidth, load)
        return Choice(drawn.arm.arm_id, drawn.explored, drawn.table_version, bandwidth, load)

    def finished(self, record: TransferRecord) -> None:
        """An effect is under way to the daemon."""
        self._news.append((record.finished_s + self._effect_delay_s, record))

    def _catch_up(self, now_s: float) -> None:
        """Do what the daemon did since: take in effects and plan, in the order of time."""
        while True:
            news_s = self._news[0][0] if self._news else math.inf
            if self._plan_due_s <= min(news_s, now_s):
                self._replan(self._plan_due_s)
                # Of the looks without news that a long rest is full of, the last one is as good as all.
                looks = max(1.0, (min(news_s, now_s) - self._planned_s) // IDLE_REPLAN_S)
                self._plan_due_s = self._planned_s + looks * IDLE_REPLAN_S
            elif news_s <= now_s:
                _, record = self._news.popleft()
                self.learner.observe(self._effect(record), UNIX_S + news_s)
                self._plan_due_s = min(self._plan_due_s, self._pace.earliest_s(news_s, self.learner.moved_log))
            else:
                return

    def _replan(self, now_s: float) -> None:
        unix_s = UNIX_S + now_s
        request = replace(self._request, corrections=self.learner.corrections(unix_s), pins=self.learner.pins(unix_s))
        plan = decide([request], knob=self._knob, grid=self._grid, previous=self.plan, now_unix_s=unix_s)
        self.plans += 1
        if not plan_equal(self.plan, plan):
            self.version += 1
            self._table = plan.tables[0].decision_table(self.version)
        self.plan, self._planned_s = plan, now_s
        self._pace.planned(now_s)

    def _effect(self, record: TransferRecord) -> Effect:
        is_raw = record.arm_id == RAW
        return Effect(
            transfer_id=f"t{record.index}",
            half=Half.SENDER,
            arm_id=record.arm_id,
            table_version=record.table_version,
            service_class=record.service_class,
            tier=self._request.tier,
            link_group=self._request.link_group,
            tokens=0,
            chunks=record.chunks,
            raw_bytes=record.raw_bytes,
            wire_bytes=max(1, round(record.wire_bytes)),
            encode_s=record.encode_s,
            wire_s=record.wire_s,
            decode_s=record.decode_s,
            wait_s=record.wait_s,
            total_s=record.service_s,
            path=Path.RAW if is_raw else Path.CODED,
            verdict=Verdict.UNVERIFIED if is_raw else Verdict.VERIFIED,
            expected_bytes=record.raw_bytes,
            bandwidth_bytes_per_s=record.bandwidth_bytes_per_s,
            load=record.load,
            explored=record.explored,
            finished_unix_s=UNIX_S + record.finished_s,
        )


def grid_within(
    sizes_bytes: tuple[float, float], bandwidths_bytes_per_s: tuple[float, float], *, whole: Grid | None = None
) -> Grid:
    """The production grid without the cells that lie outside these ranges by more than two bins; quicker to decide.

    The cells that are left have the same edges, and decide the same.
    """
    whole = whole or Grid()

    def cut(edges: tuple[float, ...], low: float, high: float) -> tuple[float, ...]:
        inside = [index for index, edge in enumerate(edges) if low <= edge <= high]
        below = max((index for index, edge in enumerate(edges) if edge < low), default=0)
        first, last = (inside[0], inside[-1]) if inside else (below, below)
        return edges[max(0, first - 3) : last + 4]

    return Grid(
        size_edges_bytes=cut(whole.size_edges_bytes, *sizes_bytes),
        bandwidth_edges_bytes_per_s=cut(whole.bandwidth_edges_bytes_per_s, *bandwidths_bytes_per_s),
        load_edges=whole.load_edges,
    )
