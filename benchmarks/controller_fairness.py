"""Two tenants on one link, one of them greedy: who is slowed down by how much, served in four ways. Simulated.

The greedy tenant sends transfers twelve times as large as the other one's and most of the bytes. Served in the order of
arrival, the small ones wait for the large ones; the controller then takes for each class the arm that is quickest for
it and does not care (`latency-greedy`). With the fair queue of the data plane (`controld/contract/fair_queue.py`) large
transfers are cut into parts, as the plane cuts them, and tenants share the wire by weight. (Here each part draws its
own arm, by its own size; the plane draws once, by the whole prompt's.)

Slowdown is the seconds of a transfer, waiting included, over what it would take alone on its best arm; a tenant's is
the mean of its transfers'. Jain's index is 1 where both are slowed down alike, 0.5 where only one is.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from controller_profiles import ProfileSet

from controld.contract.fair_queue import FairQueue
from controld.controller.goals import ClassGoal, TableRequest
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.sim.alone import service_alone_s
from controld.sim.arrivals import TrafficClass, generate
from controld.sim.deciders.base import Decider, Menu
from controld.sim.deciders.fixed import StaticArm
from controld.sim.deciders.production import ProductionController, grid_within
from controld.sim.engine import simulate
from controld.sim.link import LinkTruth
from controld.sim.metrics import jain
from controld.sim.queues import FifoQueue, TransferQueue
from controld.sim.record import Arrival
from controld.sim.schedule import RateSchedule
from controld.sim.world import CodecTruth, Noise, World

GREEDY, MODEST = "greedy", "modest"
LOAD = 0.8
"""Share of the time in which the peer's one worker is busy, at the best static arm."""
_PART_BYTES = 12e6
_SIZES = 12
_GREEDY_SHARE = 0.4
_LIMIT_NATS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """One way to serve them.

    Args:
        slowdown: by tenant.
        mean_s: of all transfers.
    """

    name: str
    jain: float
    slowdown: dict[str, float]
    mean_s: float


def compare(profiles: ProfileSet, *, transfers: int, seed: int) -> list[Fairness]:
    """Codec fixed and chosen, each in the order of arrival and by the tenants' shares."""
    rate = profiles.rates_bytes_per_s[1]
    world = World(
        codecs={profile.arm_id: CodecTruth.of(profile) for profile in profiles.profiles},
        link=LinkTruth(schedule=RateSchedule.constant(rate), rtt_s=profiles.rtt_s),
        raw_a_s=profiles.raw_overhead_s,
        chunk_bytes=profiles.chunk_bytes,
        noise=Noise.even(0.1),
    )
    request = TableRequest(
        tier="pd",
        link_group="default",
        goals=tuple(
            ClassGoal(
                name=name, workload=profiles.workload, tenant=tenant, max_quality_loss_nats=_LIMIT_NATS,
                offered_share=share,
            )
            for name, tenant, share in (("default", MODEST, 1 - _bytes_share()), ("bulk", GREEDY, _bytes_share()))
        ),
        profiles=profiles.profiles,
        sender_hardware=profiles.profiles[0].sender_hardware,
        receiver_hardware=profiles.profiles[0].receiver_hardware,
        prior_bandwidth_bytes_per_s=rate,
    )  # fmt: skip
    menu = Menu.of(request)
    size = profiles.median_bytes
    best = min(menu.of_class("default"), key=lambda arm: service_alone_s(world, arm, size, now_s=0.0, begun=0))
    classes = [
        TrafficClass(name="default", tenant=MODEST, median_bytes=size, share=1 - _GREEDY_SHARE),
        TrafficClass(name="bulk", tenant=GREEDY, median_bytes=_SIZES * size, share=_GREEDY_SHARE),
    ]
    work_s = sum(
        one.share * service_alone_s(world, best, part.raw_bytes, now_s=0.0, begun=0)
        for one in classes
        for part in _parts(Arrival(at_s=0.0, raw_bytes=round(one.median_bytes)))
    )
    gap_s = work_s / LOAD
    whole = generate(classes, count=transfers, gap_s=gap_s, seed=seed)
    parts = [(number, part) for number, arrival in enumerate(whole) for part in _parts(arrival)]
    alone = {
        one.name: min(
            service_alone_s(world, arm, one.median_bytes, now_s=0.0, begun=0) for arm in menu.of_class(one.name)
        )
        for one in classes
    }

    def controller(asked: TableRequest) -> ProductionController:
        knob = KvTransfer(chunk_bytes=world.chunk_bytes, rtt_s=world.link.rtt_s)
        return ProductionController(asked, knob=knob, grid=grid_within((size / 4, _SIZES * size), (rate, rate)))

    untold = replace(
        request, goals=tuple(replace(goal, tenant="default", offered_share=None) for goal in request.goals)
    )
    ways: list[tuple[str, Decider, bool]] = [
        ("codec fixed, order of arrival", StaticArm(best, menu), False),
        ("codec fixed, fair queue", StaticArm(best, menu), True),
        ("latency-greedy, order of arrival", controller(untold), False),
        ("both levers", controller(request), True),
    ]
    return [_serve(name, decider, fair, world, whole, parts, alone, seed) for name, decider, fair in ways]


def _bytes_share() -> float:
    greedy = _GREEDY_SHARE * _SIZES
    return greedy / (greedy + 1 - _GREEDY_SHARE)


def _parts(arrival: Arrival) -> list[Arrival]:
    count = max(1, math.ceil(arrival.raw_bytes / _PART_BYTES))
    return [replace(arrival, raw_bytes=max(1, round(arrival.raw_bytes / count))) for _ in range(count)]


def _serve(
    name: str, decider: Decider, fair: bool, world: World, whole: Sequence[Arrival],
    parts: Sequence[tuple[int, Arrival]], alone: dict[str, float], seed: int,
) -> Fairness:  # fmt: skip
    def new_queue() -> TransferQueue[Any]:
        return FairQueue({GREEDY: 1.0, MODEST: 1.0}) if fair else FifoQueue()

    run = simulate(world, [part for _, part in parts], decider, seed=seed, new_queue=new_queue)
    ended: dict[int, float] = defaultdict(float)
    for (number, _), record in zip(parts, run.records, strict=True):
        ended[number] = max(ended[number], record.finished_s)
    seconds = [ended[number] - arrival.at_s for number, arrival in enumerate(whole)]
    by_tenant: dict[str, list[float]] = defaultdict(list)
    for arrival, taken_s in zip(whole, seconds, strict=True):
        by_tenant[arrival.tenant].append(taken_s / alone[arrival.service_class])
    slowdown = {tenant: statistics.fmean(values) for tenant, values in sorted(by_tenant.items())}
    return Fairness(name=name, jain=jain(list(slowdown.values())), slowdown=slowdown, mean_s=statistics.fmean(seconds))
