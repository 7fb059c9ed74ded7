"""How far the controller stays behind a clairvoyant, and whether a fixed choice would have been better. Simulated.

    python benchmarks/controller.py [--seeds 5] [--transfers 200] [--kvserve FOLDER] [--only steps]
    python benchmarks/controller.py --quick

The production controller (`controld/controller`, with the estimators and the draw of the data plane) runs on a virtual
clock in a world that is written apart from its cost model (`controld/sim`): a FIFO link with slow start, chunks whose
stages overlap, log-normal noise. Profiles are measured ones: SmolLM2 on a CPU (comes with the project), and, where
their published tables are at hand (`--kvserve`, else `$CONTROLD_KVSERVE_DATA`), KVServe's speeds and ratios on a GPU.

Compared on the same arrivals and the same noise: raw, every single arm for ever (the best of them in hindsight,
segment by segment), KVServe's published rule with our bandwidth estimator (it has none), and an oracle that knows the
link's rate, now and later, and every codec's true times; it pays the same costs, and does not know the noise. Seconds
are those of a transfer from hand-over to the last acknowledgement, waiting included. Regret is (seconds - oracle's) /
oracle's. Fairness between two tenants: see `controller_fairness.py`.

Segments are stretches in which nothing changes but by noise or a ramp; of each at least 50 transfers are compared with
the best static arm from the 11th on, and its first ten are reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from controller_fairness import Fairness, compare
from controller_profiles import ProfileSet, kvserve_profiles, smollm2_profiles
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from controld.contract.decision import RAW
from controld.controller.goals import ClassGoal, TableRequest
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.sim.arrivals import MixShift, TrafficClass, gap_for_load, generate, one_after_another
from controld.sim.deciders.base import Decider, Menu
from controld.sim.deciders.fixed import StaticArm
from controld.sim.deciders.kvserve import KVServeController, KVServeRule
from controld.sim.deciders.oracle import Oracle
from controld.sim.deciders.production import ProductionController, grid_within
from controld.sim.engine import simulate
from controld.sim.link import LinkTruth
from controld.sim.metrics import regret
from controld.sim.record import Arrival, Run
from controld.sim.schedule import Drift, RatePoint, RateSchedule
from controld.sim.world import CodecTruth, Noise, World

OUT = Path("build/benchmarks/controller.json")
SETTLING = 10
LEAST_SEGMENT = 50
LOADS = (0.3, 0.5, 0.7, 0.85, 0.95, 3.0)
"""Raw bytes offered over what the link carries; at the last one only compressed traffic fits."""
_NOISE = 0.1
_QUALITY_LIMIT_NATS = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One world with its traffic.

    Args:
        segments: (first, after the last) transfer of each stretch that is compared with static arms.
        in_flight: transfers at a time; None: they come at their own times.
        is_extra: shown, and left out of the last line.
    """

    name: str
    profiles: ProfileSet
    world: World
    arrivals: tuple[Arrival, ...]
    segments: tuple[tuple[int, int], ...]
    in_flight: int | None = None
    seed: int = 0
    is_extra: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A scenario's figures.

    Args:
        regret, kvserve_regret, kvserve_exploring_regret, raw_regret: fractions of the oracle's seconds; exploring: a
            tenth of its transfers take any candidate, as its authors advise.
        worst_vs_static: seconds over the best static arm's in the worst segment, from the 11th transfer on.
        worst_settling: likewise of the first ten transfers of a segment.
        planned, seconds: plans made, and what the controller's run took here.
    """

    scenario: str
    profiles: str
    seed: int
    regret: float
    kvserve_regret: float
    kvserve_exploring_regret: float
    raw_regret: float
    best_static_regret: float
    worst_vs_static: float
    worst_settling: float
    worst_segment: tuple[int, int]
    planned: int
    seconds: float
    is_extra: bool


# ------------------------------------------------------------------------------------------ scenarios


def scenarios(profiles: ProfileSet, *, transfers: int, seed: int) -> Iterator[Scenario]:
    """All of one profile set; `transfers` in each segment."""
    rates = profiles.rates_bytes_per_s
    size = TrafficClass(median_bytes=profiles.median_bytes, log_sd=0.5)

    def world(schedule: RateSchedule, drifts: tuple[Drift, ...] = ()) -> World:
        return World(
            codecs={profile.arm_id: CodecTruth.of(profile) for profile in profiles.profiles},
            link=LinkTruth(schedule=schedule, rtt_s=profiles.rtt_s),
            raw_a_s=profiles.raw_overhead_s,
            chunk_bytes=profiles.chunk_bytes,
            noise=Noise.even(_NOISE),
            drifts=drifts,
        )

    def one_by_one(count: int) -> tuple[Arrival, ...]:
        return tuple(one_after_another([size], count=count, pause_s=profiles.pause_s, seed=seed))

    def cut(count: int) -> tuple[tuple[int, int], ...]:
        return tuple((start, start + transfers) for start in range(0, count, transfers))

    def scenario(
        name: str, one: World, arrivals: tuple[Arrival, ...], in_flight: int | None = 1, *, is_extra: bool = False
    ) -> Scenario:
        return Scenario(
            name=name, profiles=profiles, world=one, arrivals=arrivals, segments=cut(len(arrivals)),
            in_flight=in_flight, seed=seed, is_extra=is_extra,
        )  # fmt: skip

    order = [rates[-1], rates[0], rates[len(rates) // 2], rates[1], rates[-2]]
    steps = RateSchedule.steps(*((i * transfers, rate) for i, rate in enumerate(order)), by_transfers=True)
    yield scenario("steps of bandwidth", world(steps), one_by_one(len(order) * transfers))

    yield scenario("ramps of bandwidth", world(_ramps(profiles, transfers)), one_by_one(4 * transfers))
    by_clock = world(_ramps_by_clock(profiles, transfers))
    yield scenario("ramps by the clock", by_clock, one_by_one(4 * transfers), is_extra=True)

    middle = RateSchedule.constant(rates[len(rates) // 2])
    best = _best_arm(profiles, middle)
    always = (Drift(factor=4.0, arm_id=best),)
    yield scenario("best arm 4x slower than profiled", world(middle, always), one_by_one(2 * transfers))
    turns = (Drift(factor=4.0, arm_id=best, from_transfer=transfers),)
    yield scenario("best arm turns 4x slower", world(middle, turns), one_by_one(3 * transfers))
    ends = (replace(turns[0], until_transfer=2 * transfers),)
    yield scenario("and is as profiled again", world(middle, ends), one_by_one(3 * transfers), is_extra=True)

    for load in LOADS:
        rate = rates[1]
        gap_s = gap_for_load([size], load=load, bandwidth_bytes_per_s=rate)
        arrivals = generate([size], count=2 * transfers, gap_s=gap_s, seed=seed)
        yield scenario(f"load {load:g}", world(RateSchedule.constant(rate)), tuple(arrivals), None, is_extra=load > 1)

    small = replace(size, name="small", median_bytes=profiles.median_bytes / 12)
    shift = MixShift(at_transfer=transfers, shares=(0.1, 0.9)), MixShift(at_transfer=2 * transfers, shares=(0.5, 0.5))
    gap_s = gap_for_load([size], load=0.5, bandwidth_bytes_per_s=rates[1])
    mixed = generate(
        [replace(size, share=0.9), replace(small, share=0.1)], count=3 * transfers, gap_s=gap_s, seed=seed, shifts=shift
    )
    yield scenario("shift of the mix", world(RateSchedule.constant(rates[1])), tuple(mixed), None)


def _ramps(profiles: ProfileSet, transfers: int) -> RateSchedule:
    """Down and up again, a little with each transfer: whoever sends it, the same transfer meets the same rate."""
    low, high = profiles.rates_bytes_per_s[1], profiles.rates_bytes_per_s[-2]
    down = np.linspace(high, low, transfers, endpoint=False)
    up = np.linspace(low, high, transfers, endpoint=False)
    rates = np.concatenate([down, up, down, up])
    return RateSchedule.steps(*((i, float(rate)) for i, rate in enumerate(rates)), by_transfers=True)


def _ramps_by_clock(profiles: ProfileSet, transfers: int) -> RateSchedule:
    """Down and up again with time, in about so many transfers. Who is quicker meets other rates than a static arm."""
    low, high = profiles.rates_bytes_per_s[1], profiles.rates_bytes_per_s[-2]
    # A transfer of the middle takes about so long; the ramp is a matter of transfers, the schedule one of time.
    each_s = profiles.median_bytes / 3 / np.sqrt(low * high) + profiles.pause_s
    stretch_s = transfers * float(each_s)
    points = [RatePoint(0.0, high)]
    points += [RatePoint((i + 1) * stretch_s, low if i % 2 == 0 else high, ramp=True) for i in range(8)]
    return RateSchedule(tuple(points))


def _best_arm(profiles: ProfileSet, schedule: RateSchedule) -> str:
    """The one that is best as profiled, within the limit of quality."""
    size, rate = profiles.median_bytes, schedule.rate(0.0, 0)
    usable = [profile for profile in profiles.profiles if profile.loss_upper_nats <= _QUALITY_LIMIT_NATS]
    best = min(usable, key=lambda p: p.encode.seconds(size) + p.decode.seconds(size) + size / p.ratio / rate)
    return best.arm_id


# ------------------------------------------------------------------------------------------ one scenario


def request_of(scenario: Scenario) -> TableRequest:
    """The question that the controller and its rivals get."""
    profiles = scenario.profiles
    names = sorted({arrival.service_class for arrival in scenario.arrivals} | {"default"})
    return TableRequest(
        tier="pd",
        link_group="default",
        goals=tuple(
            ClassGoal(name=name, workload=profiles.workload, max_quality_loss_nats=_QUALITY_LIMIT_NATS)
            for name in names
        ),
        profiles=profiles.profiles,
        sender_hardware=profiles.profiles[0].sender_hardware,
        receiver_hardware=profiles.profiles[0].receiver_hardware,
    )


def run(scenario: Scenario) -> Outcome:
    """Every decider on one scenario."""
    request, world = request_of(scenario), scenario.world
    menu = Menu.of(request)

    def go(decider: Decider) -> Run:
        return simulate(world, scenario.arrivals, decider, seed=scenario.seed, in_flight=scenario.in_flight)

    best = go(Oracle(world, menu))
    statics = {arm: go(StaticArm(arm, menu)) for arm in menu.of_class("default")}
    rivals = [
        go(KVServeController(request.profiles, menu, rule=KVServeRule(epsilon=epsilon), seed=scenario.seed))
        for epsilon in (0.0, 0.1)
    ]
    sizes = [arrival.raw_bytes for arrival in scenario.arrivals]
    rates = scenario.profiles.rates_bytes_per_s
    controller = ProductionController(
        request,
        knob=KvTransfer(chunk_bytes=world.chunk_bytes, rtt_s=world.link.rtt_s),
        grid=grid_within((min(sizes), max(sizes)), (min(rates), max(rates))),
    )
    start_s = time.perf_counter()
    ours = go(controller)
    seconds = time.perf_counter() - start_s
    settled = [
        (_vs_static(ours, statics, (a + SETTLING, b)), (a, b)) for a, b in scenario.segments if b - a >= LEAST_SEGMENT
    ]
    settling = [_vs_static(ours, statics, (a, a + SETTLING)) for a, _ in scenario.segments]
    worst, segment = max(settled)
    return Outcome(
        scenario=scenario.name,
        profiles=scenario.profiles.name,
        seed=scenario.seed,
        regret=regret(ours, best),
        kvserve_regret=regret(rivals[0], best),
        kvserve_exploring_regret=regret(rivals[1], best),
        raw_regret=regret(statics[RAW], best),
        best_static_regret=min(regret(one, best) for one in statics.values()),
        worst_vs_static=worst,
        worst_settling=max(settling),
        worst_segment=segment,
        planned=controller.plans,
        seconds=seconds,
        is_extra=scenario.is_extra,
    )


def _vs_static(ours: Run, statics: dict[str, Run], part: tuple[int, int]) -> float:
    return 1 + max(regret(ours, one, part) for one in statics.values())


# ------------------------------------------------------------------------------------------ all of them


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """One row a scenario, means over seeds; the worst segment over all seeds."""
    table = Table(
        "profiles", "scenario", "controld", "KVServe", "KVServe, eps 0.1", "raw", "best static",
        "worst segment / static", "first ten / static",
        title="Regret to the oracle, mean over seeds (simulated)",
    )  # fmt: skip
    for profiles, name in dict.fromkeys((one.profiles, one.scenario) for one in outcomes):
        found = [one for one in outcomes if (one.profiles, one.scenario) == (profiles, name)]
        means = [
            statistics.fmean(getattr(one, field) for one in found)
            for field in ("regret", "kvserve_regret", "kvserve_exploring_regret", "raw_regret", "best_static_regret")
        ]
        worst = max(one.worst_vs_static for one in found), max(one.worst_settling for one in found)
        table.add_row(profiles, name, *(f"{mean:.1%}" for mean in means), *(f"{ratio:.3f}" for ratio in worst))
    console.print(table)


def show_fairness(found: Sequence[tuple[str, Fairness]], console: Console) -> None:
    """How two tenants fare under each way to serve them."""
    table = Table(
        "profiles", "served", "slowdown of the greedy", "of the modest", "Jain", "mean of all, s",
        title="Two tenants of equal weight, one of them with transfers twelve times as large (simulated)",
    )  # fmt: skip
    for profiles, one in found:
        slowdowns = [f"{one.slowdown[tenant]:.2f}" for tenant in ("greedy", "modest")]
        table.add_row(profiles, one.name, *slowdowns, f"{one.jain:.3f}", f"{one.mean_s:.3g}")
    console.print(table)


def last_line(outcomes: Sequence[Outcome], fairness: Sequence[tuple[str, Fairness]]) -> str:
    """Means over scenarios and seeds; the worst segment of all. Scenarios that are extra are left out."""
    outcomes = [one for one in outcomes if not one.is_extra]
    ours = statistics.fmean(one.regret for one in outcomes)
    rival = min(
        statistics.fmean(one.kvserve_regret for one in outcomes),
        statistics.fmean(one.kvserve_exploring_regret for one in outcomes),
    )
    worst = max(one.worst_vs_static for one in outcomes)
    both = min(one.jain for _, one in fairness if one.name == "both levers")
    return f"regret={ours:.3f} worst_vs_static={worst:.3f} kvserve_regret={rival:.3f} jain={both:.2f}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--transfers", type=int, default=200, help="in each segment (default: 200)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--quick", action="store_true", help="one seed, 60 transfers a segment, under 50 seconds")
    parser.add_argument("--only", help="scenarios whose name has this in it")
    published = Path(os.environ.get("CONTROLD_KVSERVE_DATA", "data/kvserve"))
    parser.add_argument("--kvserve", type=Path, default=published, metavar="FOLDER", help="their published tables")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    if options.quick:
        options.seeds, options.transfers = 1, 60
    console = Console(width=None if os.isatty(1) else 160)
    sets = [smollm2_profiles()]
    if (theirs := kvserve_profiles(options.kvserve)) is not None:
        sets.append(theirs)
    else:
        console.print(f"KVServe's published tables are not in {options.kvserve}: their profiles are left out")
    wanted = [
        scenario
        for profiles in sets
        for seed in range(options.seeds)
        for scenario in scenarios(profiles, transfers=options.transfers, seed=seed)
        if options.only is None or options.only in scenario.name
    ]
    columns = (TextColumn("scenarios"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    outcomes: list[Outcome] = []
    with Progress(*columns, console=Console(stderr=True)) as bar, ProcessPoolExecutor(options.jobs) as executor:
        shown = bar.add_task("", total=len(wanted))
        for outcome in executor.map(run, wanted):
            outcomes.append(outcome)
            bar.advance(shown)
    show(outcomes, console)
    fairness = [
        (profiles.name, one) for profiles in sets for one in compare(profiles, transfers=2 * options.transfers, seed=0)
    ]
    show_fairness(fairness, console)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "regret": [asdict(one) for one in outcomes],
        "fairness": [{"profiles": profiles, **asdict(one)} for profiles, one in fairness],
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(last_line(outcomes, fairness))


if __name__ == "__main__":
    main()
