"""What one decision costs inside a data plane, side by side with a plain dictionary look-up.

Run as `python benchmarks/agent_draw.py [--quick] [--out FILE]`. Both are timed in the same run, in short alternating
rounds, so that a noisy machine slows both alike; the ratio is the figure to quote. The table is of a realistic size:
2 classes x 9 sizes x 24 bandwidths x 5 loads, 12 arms, every fourth cell a mixture of two.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, Arm, DecisionTable, Mixture
from controld.contract.effect import Effect, Half, Verdict
from controld.contract.effect import Path as TransferPath
from controld.contract.snapshot import Resource
from dataplanes.agent import Agent, AgentIdentity
from dataplanes.agent.applied import Applied

ROOT = Path(__file__).resolve().parent.parent
SIZES, BANDWIDTHS, LOADS, ARMS = 9, 24, 5, 12
CALLS_PER_SAMPLE = 50


def realistic_table() -> DecisionTable:
    """Single arms in three of four cells, two arms in the fourth, so that the hash of a mixture is paid for as well."""
    arms = [Arm(RAW)]
    for levels in range(4, 4 + ARMS - 1):
        configuration = Configuration({"transform": "hadamard", "key_levels": levels, "code": "entropy"})
        arms.append(Arm(configuration.config_id, configuration))
    mixtures = [Mixture((arm,), (1.0,)) for arm in range(ARMS)]
    mixtures += [Mixture((arm, (arm + 1) % ARMS), (0.98, 0.02)) for arm in range(ARMS)]
    choose = random.Random(1)
    return DecisionTable(
        tier="pd",
        link_group="default",
        version=42,
        classes=("chat", "default"),
        size_edges_bytes=tuple(250_000.0 * 2**n for n in range(SIZES - 1)),
        bandwidth_edges_bytes_per_s=tuple(1e6 * 2 ** (n / 2) for n in range(BANDWIDTHS - 1)),
        load_edges=(0.1, 0.2, 0.4, 0.8),
        arms=tuple(arms),
        mixtures=tuple(mixtures),
        cells=tuple(
            choose.randrange(ARMS) + (ARMS if cell % 4 == 0 else 0) for cell in range(2 * SIZES * BANDWIDTHS * LOADS)
        ),
        prior_bandwidth_bytes_per_s=1e7,
    )


def agent_with(table: DecisionTable) -> Agent:
    """An agent in the state that accepting a snapshot leaves it in; it talks to nobody."""
    identity = AgentIdentity(deployment="benchmark", agent_id="a", kind="sglang", role="prefill", tiers=("pd",))
    agent = Agent(identity, "unix:///nobody/listens/here.sock")
    agent._in_force.applied = Applied(
        version=table.version,
        resources={"pd/default": Resource("pd/default", table)},
        tables={(table.tier, table.link_group): table},
    )
    agent._in_force.lease_ends_s = float("inf")
    now_s = time.monotonic()
    for start_s in (now_s - 3, now_s - 2, now_s - 1):
        agent.observe_wire(tier="pd", start_s=start_s, end_s=start_s + 0.5, wire_bytes=5_000_000)
        agent.offered(tier="pd", raw_bytes=1_000_000)
    return agent


def microseconds_per_call(work: Callable[[str, int], object], inputs: list[tuple[str, int]]) -> float:
    """Mean over a few calls: one call is too short for the clock."""
    began_ns = time.perf_counter_ns()
    for transfer_id, raw_bytes in inputs:
        work(transfer_id, raw_bytes)
    return (time.perf_counter_ns() - began_ns) / len(inputs) / 1e3


def summary(samples: list[float]) -> dict[str, float]:
    """Median and 99th percentile, microseconds."""
    return {
        "median_us": statistics.median(samples),
        "p99_us": statistics.quantiles(samples, n=100)[98],
        "samples": len(samples),
    }


def measure(rounds: int) -> dict[str, object]:
    """All variants, interleaved."""
    table = realistic_table()
    agent = agent_with(table)
    lookup = {("chat", n): table.arms[n % ARMS] for n in range(64)}
    by_size = table.size_edges_bytes

    def draw(transfer_id: str, raw_bytes: int) -> object:
        return agent.draw(transfer_id=transfer_id, service_class="chat", raw_bytes=raw_bytes, tier="pd")

    def dictionary(transfer_id: str, raw_bytes: int) -> object:
        return lookup["chat", raw_bytes & 63]

    def no_work(transfer_id: str, raw_bytes: int) -> object:
        return by_size

    variants = {"draw": draw, "dictionary": dictionary, "empty_call": no_work}
    samples: dict[str, list[float]] = {name: [] for name in variants}
    sizes = random.Random(2)
    for number in range(rounds):
        inputs = [(f"transfer-{number}-{n}", int(10 ** sizes.uniform(5, 8))) for n in range(CALLS_PER_SAMPLE)]
        for name, work in variants.items():
            samples[name].append(microseconds_per_call(work, inputs))
    result: dict[str, object] = {name: summary(values) for name, values in samples.items()}
    medians = {name: statistics.median(values) for name, values in samples.items()}
    result["draw_over_dictionary"] = medians["draw"] / medians["dictionary"]
    result["other_calls"] = _other_calls(agent, rounds // 4)
    result["draw_while_swapping"] = summary(_while_swapping(agent, table, draw, rounds // 4))
    return result


def _other_calls(agent: Agent, rounds: int) -> dict[str, dict[str, float]]:
    """What the agent takes from a transfer besides its draw: one arrival, one span on the wire, one effect."""
    effect = Effect(
        transfer_id="t", half=Half.SENDER, arm_id=RAW, table_version=42, service_class="chat", tier="pd",
        link_group="default", tokens=600, chunks=1, raw_bytes=14_000_000, wire_bytes=14_000_000, encode_s=0.0,
        wire_s=1.4, decode_s=0.0, wait_s=0.0, total_s=1.4, path=TransferPath.RAW, verdict=Verdict.VERIFIED,
    )  # fmt: skip
    at_s = time.monotonic()

    def observe_wire(transfer_id: str, raw_bytes: int) -> None:
        nonlocal at_s
        at_s += 0.002
        agent.observe_wire(tier="pd", start_s=at_s - 0.001, end_s=at_s, wire_bytes=raw_bytes)

    calls: dict[str, Callable[[str, int], object]] = {
        "offered": lambda transfer_id, raw_bytes: agent.offered(tier="pd", raw_bytes=raw_bytes),
        "observe_wire": observe_wire,
        "report": lambda transfer_id, raw_bytes: agent.report(effect),
    }
    inputs = [(f"other-{n}", 1_000_000 * (n + 1)) for n in range(CALLS_PER_SAMPLE)]
    return {name: summary([microseconds_per_call(call, inputs) for _ in range(rounds)]) for name, call in calls.items()}


def _while_swapping(agent: Agent, table: DecisionTable, draw: Callable[[str, int], object], rounds: int) -> list[float]:
    """Draws while another thread swaps the applied state and observes spans, as the agent's own threads do."""
    stop = threading.Event()
    applied = agent._in_force.applied

    def disturb() -> None:
        while not stop.wait(0.001):
            agent._in_force.applied = Applied(
                version=applied.version, resources=applied.resources, tables=applied.tables
            )
            now_s = time.monotonic()
            agent.observe_wire(tier="pd", start_s=now_s - 0.5, end_s=now_s, wire_bytes=5_000_000)

    thread = threading.Thread(target=disturb)
    thread.start()
    inputs = [(f"swap-{n}", 1_000_000 * (n + 1)) for n in range(CALLS_PER_SAMPLE)]
    samples = [microseconds_per_call(draw, inputs) for _ in range(rounds)]
    stop.set()
    thread.join()
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a second instead of ten")
    parser.add_argument("--out", type=Path, default=ROOT / "build/benchmarks/agent_draw.json")
    arguments = parser.parse_args()
    result = {
        "question": "what does one decision cost inside the data plane?",
        "quick": arguments.quick,
        "machine": {"processor": platform.machine(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), "grpcio": grpc.__version__},
        "table": {"classes": 2, "sizes": SIZES, "bandwidths": BANDWIDTHS, "loads": LOADS, "arms": ARMS},
        **measure(2_000 if arguments.quick else 20_000),
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    for name in ("draw", "draw_while_swapping", "dictionary", "empty_call"):
        cost = result[name]
        assert isinstance(cost, dict)
        print(f"{name:20} median {cost['median_us']:6.2f} us   p99 {cost['p99_us']:6.2f} us")
    other_calls = result["other_calls"]
    assert isinstance(other_calls, dict)
    for name, cost in other_calls.items():
        print(f"{name:20} median {cost['median_us']:6.2f} us   p99 {cost['p99_us']:6.2f} us")
    print(f"a draw costs {result['draw_over_dictionary']:.1f} dictionary look-ups; written to {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
