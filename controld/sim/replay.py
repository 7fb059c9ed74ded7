"""What would have happened: every decider on the same arrivals, in a world that is what the profiles say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from controld.contract.configuration_label import configuration_label
from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.contract.fair_queue import FairQueue
from controld.controller.goals import TableRequest
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.sim.alone import service_alone_s
from controld.sim.deciders.base import Decider, Menu
from controld.sim.deciders.fixed import StaticArm
from controld.sim.deciders.kvserve import KVServeController
from controld.sim.deciders.oracle import Oracle
from controld.sim.deciders.production import ProductionController, grid_within
from controld.sim.engine import simulate
from controld.sim.metrics import regret, summarise
from controld.sim.queues import FifoQueue, TransferQueue
from controld.sim.record import Arrival, Run
from controld.sim.world import World

ORACLE, CONTROLD = "oracle", "controld"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One question.

    Args:
        request: the policy's classes and the profiles.
        world: the truth.
        arrivals: what comes.
        statics: how many static arms are compared.
        seed: of the world's noise.
        unlearned_classes: classes whose transfers teach nothing.
        tenant_shares: by which a peer's queue is shared, whole transfers at a time; with fewer than two, or none, they
            are served in the order of arrival.
    """

    request: TableRequest
    world: World
    arrivals: Sequence[Arrival]
    statics: int = 3
    seed: int = 0
    unlearned_classes: tuple[str, ...] = ()
    tenant_shares: Mapping[str, float] = field(default_factory=dict)

    def new_queue(self) -> TransferQueue[Any]:
        """A peer's queue."""
        return FairQueue(self.tenant_shares) if len(self.tenant_shares) > 1 else FifoQueue()

    def deciders(self) -> list[Decider]:
        """Raw, the best static arms, KVServe's rule, the controller, and the oracle."""
        menu = Menu.of(self.request)
        prior = self.request.prior_bandwidth_bytes_per_s
        labels = {p.arm_id: configuration_label(p.configuration) for p in self.request.profiles}
        return [
            StaticArm(RAW),
            *(StaticArm(arm, menu, name=f"static {labels[arm]}") for arm in best_statics(self, menu)),
            KVServeController(
                self.request.profiles, menu, prior_bandwidth_bytes_per_s=prior, rtt_s=self.world.link.rtt_s
            ),
            self.controller(),
            Oracle(self.world, menu),
        ]

    def controller(self) -> ProductionController:
        """The production controller, told what a plane would tell it: chunks and the round trip."""
        world = self.world
        sizes = [arrival.raw_bytes for arrival in self.arrivals]
        rates = [point.bytes_per_s for point in world.link.schedule.points]
        rates += [rate for rate in (self.request.prior_bandwidth_bytes_per_s,) if rate]
        return ProductionController(
            self.request,
            knob=KvTransfer(chunk_bytes=world.chunk_bytes, rtt_s=world.link.rtt_s),
            grid=grid_within((min(sizes), max(sizes)), (min(rates), max(rates))),
            unlearned_classes=self.unlearned_classes,
        )


def best_statics(replay: Replay, menu: Menu) -> list[str]:
    """The arms that are quickest for the median transfer, alone, on the mean over the schedule's rates.

    Chosen by what is known before, as an operator would; not by how they then did.
    """
    world = replay.world
    size = median(arrival.raw_bytes for arrival in replay.arrivals)
    schedule = world.link.schedule

    def mean_s(arm_id: str) -> float:
        moments = [(0.0, int(p.at)) if schedule.by_transfers else (p.at, 0) for p in schedule.points]
        return sum(service_alone_s(world, arm_id, size, now_s=at, begun=begun) for at, begun in moments)

    usable = {arm for service_class in menu.arms for arm in menu.of_class(service_class)} - {RAW}
    return sorted(usable, key=mean_s)[: replay.statics]


def run_replay(
    replay: Replay, on_begin: Callable[[str], None] | None = None, on_finished: Callable[[int], None] | None = None
) -> list[Run]:
    """Every decider's run, in the order of `deciders`.

    Args:
        on_begin: told each decider's name before its run.
        on_finished: told how many transfers of it have finished.

    Raises:
        FieldError: nothing arrives.
    """
    if not replay.arrivals:
        raise FieldError("arrivals", "there are none")
    runs = []
    for decider in replay.deciders():
        if on_begin is not None:
            on_begin(decider.name)
        runs.append(
            simulate(
                replay.world,
                replay.arrivals,
                decider,
                seed=replay.seed,
                new_queue=replay.new_queue,
                on_finished=on_finished,
            )
        )
    return runs


def report(runs: Sequence[Run]) -> dict[str, Any]:
    """The runs in figures, JSON-ready, each with its regret to the oracle where there is one."""
    best = next((run for run in runs if run.decider == ORACLE), None)
    rows = []
    for run in runs:
        row = summarise(run)
        row["regret"] = regret(run, best) if best is not None else None
        rows.append(row)
    return {"deciders": rows}
