"""What deciding costs when there are many planes: seconds and memory to plan for all of them, and to explain one cell.

Run as `python benchmarks/replan.py [--quick] [--out FILE]`. A plane here is a deployment with a table of its own, of
the daemon's usual grid, for 8 classes (4 workloads, all objectives) and 16 candidates each. Three rounds: everything
new; nothing moved; and what was learned moved for one plane in ten. `--quick` plans a few planes only and says so.
Beside them, planes that all ask the same, as equal machines with one policy and no traffic yet do. Agents that share a
deployment share one plan: a thousand of them cost what one does.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from controld.candidates.profile import Profile, StageTime
from controld.contract.configuration import Configuration
from controld.controller.decide import decide
from controld.controller.explain import explain_cell
from controld.controller.goals import ClassGoal, Objective, TableRequest
from controld.controller.plan import Plan
from controld.controller.posterior import StageCorrection
from controld.planning.shared_decisions import SharedDecisions

PLANES, QUICK_PLANES, CLASSES, CANDIDATES, WORKLOADS = 1000, 10, 8, 16, 4
MOVED = 0.1
EXPLAINED = 40


def profiles(seed: int) -> list[Profile]:
    """Sixteen candidates for each workload: better ratios cost time and quality."""
    draw = np.random.default_rng(seed)
    found = []
    for workload in range(WORKLOADS):
        for index in range(CANDIDATES):
            ratio = 1.3 + 0.5 * index * float(draw.uniform(0.8, 1.2))
            stage = StageTime(1e-3, (0.5 + 0.2 * index) * 1e-9 * float(draw.uniform(0.8, 1.2)))
            found.append(
                Profile(
                    configuration=Configuration({"quantise": "levels", "key_levels": 4 + index, "code": "entropy"}),
                    workload=f"w{workload}", model_fingerprint="m", loss_mean_nats=0.0015 * index, loss_se_nats=1e-5,
                    loss_samples=12, worst_prompt_tokens=2048, ratio=ratio, encode=stage, decode=stage,
                    median_transfer_bytes=14e6, sender_hardware="h", receiver_hardware="h",
                )
            )  # fmt: skip
    return found


def goals() -> tuple[ClassGoal, ...]:
    """Eight classes over the workloads, with every objective."""
    names = ["default", *(f"c{index}" for index in range(1, CLASSES))]
    return tuple(
        ClassGoal(
            name=name, workload=f"w{index % WORKLOADS}", objective=list(Objective)[index % len(Objective)],
            max_quality_loss_nats=0.005 * (index + 1), slo_s=0.5 if index % 3 == 0 else None, slo_percentile=90.0,
        )
        for index, name in enumerate(names)
    )  # fmt: skip


def request(seed: int, moved: float = 0.0) -> TableRequest:
    """One plane's table; `moved` shifts what was learned of its encode times."""
    measured = profiles(seed)
    draw = np.random.default_rng(seed + 1)
    corrections = {
        arm_id: tuple(StageCorrection(float(draw.normal(moved, 0.1)), 0.005, 0.02, 20.0) for _ in range(4))
        for arm_id in dict.fromkeys(p.arm_id for p in measured)
    }
    return TableRequest(
        tier="pd", link_group="default", goals=goals(), profiles=tuple(measured), corrections=corrections,
        sender_hardware="h", receiver_hardware="h",
    )  # fmt: skip


def plan_bytes(plan: Plan) -> int:
    """Memory of what a plan keeps for each cell; the rest are some hundred small objects."""
    return sum(
        array.nbytes + np.asarray(table.winners).nbytes * (array is table.cells)
        for table in plan.tables
        for array in (table.cells, table.in_use)
    )


def timed(work: Callable[[], object]) -> float:
    """Seconds of a core."""
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


def measure(planes: int) -> dict[str, float | int]:
    """All rounds for so many planes, and explanations of one of them."""
    requests = [request(seed) for seed in range(planes)]
    decide([requests[0]])  # what is imported and cached once is not the planes' cost
    plans: list[Plan] = []
    first_s = timed(lambda: plans.extend(decide([one]) for one in requests))
    still_s = timed(lambda: [decide([one], previous=plan) for one, plan in zip(requests, plans, strict=True)])
    news = [request(seed, moved=0.3) if seed % round(1 / MOVED) == 0 else one for seed, one in enumerate(requests)]
    moved_s = timed(lambda: [decide([one], previous=plan) for one, plan in zip(news, plans, strict=True)])
    # As many as there are, for they cost next to nothing but to compare.
    shared = SharedDecisions()
    equal_s = timed(lambda: [shared.decide([replace(requests[0])]) for _ in range(PLANES)])
    table = plans[0].tables[0]
    cells = np.random.default_rng(0).integers(0, len(table.cells), size=EXPLAINED).tolist()
    explain_s = [timed(partial(explain_cell, table, cell)) for cell in cells]
    return {
        "planes": planes,
        "cells": len(table.cells),
        "first_s": first_s,
        "still_s": still_s,
        "moved_s": moved_s,
        "equal_s": equal_s,
        "plan_bytes": plan_bytes(plans[0]),
        "stored_bytes": len(plans[0].to_json()),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "explain_median_s": statistics.median(explain_s),
        "explain_worst_s": max(explain_s),
    }


def main(arguments: list[str]) -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_PLANES} planes instead of {PLANES}")
    parser.add_argument("--planes", type=int, help="so many planes")
    parser.add_argument("--out", type=Path, help="write JSON")
    options = parser.parse_args(arguments)
    planes = options.planes or (QUICK_PLANES if options.quick else PLANES)
    found = measure(planes)
    scale = PLANES / planes
    note = "" if planes == PLANES else f" (measured on {planes}, times {scale:.3g})"
    print(f"{PLANES} planes, {CLASSES} classes, {CANDIDATES} candidates, {found['cells']} cells a table{note}")
    for name, what in (
        ("first_s", "everything new"),
        ("still_s", "nothing moved"),
        ("moved_s", f"news for {MOVED:.0%} of the planes"),
    ):
        print(f"  {what:<32} {found[name] * scale:8.2f} s of a core, {found[name] / planes * 1e3:7.1f} ms a plane")
    print(f"  {'all ask the same':<32} {found['equal_s']:8.2f} s of a core (all {PLANES} measured)")
    print(f"  cells of the plans in memory     {found['plan_bytes'] * PLANES / 1e6:8.0f} MB")
    print(f"  a plan as it is stored           {found['stored_bytes'] / 1e3:8.0f} kB")
    print(f"  peak of this process             {found['peak_bytes'] / 1e6:8.0f} MB")
    if options.out:
        where = {"machine": platform.machine(), "python": platform.python_version(), "numpy": np.__version__}
        options.out.write_text(json.dumps({**found, **where}, indent=2) + "\n")
    print(
        f"replan_s={found['first_s'] * scale:.1f} equal_s={found['equal_s']:.2f} still_s={found['still_s'] * scale:.2f}"
        f" plans_mb={found['plan_bytes'] * PLANES / 1e6:.0f} explain_ms={found['explain_median_s'] * 1e3:.1f}"
        f" explain_worst_ms={found['explain_worst_s'] * 1e3:.1f}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
