"""What codecs do inside a real pair of servers over a link of one rate, and below which bandwidth each pays.

    python benchmarks/codecs_in_pair.py [--rate-mbit 100] [--prompts 12] [--out build/benchmarks/pair]

Profiles the quick grid, starts SGLang's prefill and decode servers over a shaped link, and sends every prompt once with
each arm in seeded random order: raw, three static configurations chosen by profile (one of them a published method) and
controld. For each arm the codec's speed inside the servers (bytes of raw KV per second of wall clock), the whole
transfer, and TTFT beside raw on the same prompts. The break-even bandwidth is the one at which the codec's own stages,
one after the other, take what they save on the wire: (1 - 1/ratio) / (1/encode + 1/decode); overlapped, as the servers
run them, it is that of the slower stage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from break_even import CodecSpeed
from rich.console import Console
from rich.table import Table

from controld.contract.configuration_label import configuration_label
from dataplanes.sglang.demo.analysis import Sample, ratios_by_phase
from dataplanes.sglang.demo.command import DEFAULT_ARTEFACTS, DEFAULT_MODEL
from dataplanes.sglang.demo.plan import ARMS, DEMO, MBIT, RAW, Phase
from dataplanes.sglang.demo.run import Experiment, read_log
from dataplanes.sglang.link import enter_user_namespace_if_needed

PHASE = "one"
WARM_PROMPT_TOKENS = (512, 256, 384, 1024)


class _Lines:
    def stage(self, title: str, total: int) -> None:
        print(f"{title} ({total})", file=sys.stderr, flush=True)

    def step(self, text: str = "") -> None:
        del text


def summarise(
    samples: Sequence[Sample], effects: Sequence[Mapping[str, Any]], configurations: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """One row an arm. Speeds are bytes per second; bandwidths Mbit/s; None where nothing was coded."""
    by_arm: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for effect in effects:
        by_arm[effect["arm"]].append(effect)
    rows = []
    for arm in ARMS:
        coded = [effect for effect in by_arm[arm] if effect["path"] == "coded"]
        row: dict[str, Any] = {
            "arm": arm,
            "configuration": configuration_label(configurations[arm]) if arm in configurations else arm,
            "transfers": len(by_arm[arm]),
            "coded": len(coded),
            "transfer_s": median(effect["total_s"] for effect in by_arm[arm]),
            "ttft_raw_over_arm": None,
        }
        if arm != RAW:
            row["ttft_raw_over_arm"] = ratios_by_phase(samples, RAW, arm, "ttft_s", 1)[PHASE].to_json()
        if coded:
            raw_bytes = sum(effect["raw_bytes"] for effect in coded)
            ratio = raw_bytes / sum(effect["wire_bytes"] for effect in coded)
            encode = raw_bytes / sum(effect["encode_s"] for effect in coded)
            decode = raw_bytes / sum(effect["decode_s"] for effect in coded)
            speed = CodecSpeed(ratio=ratio, encode_bytes_per_s=encode, decode_bytes_per_s=decode)
            row |= {
                "ratio": ratio,
                "encode_bytes_per_s": encode,
                "decode_bytes_per_s": decode,
                "break_even_mbit_per_s": speed.sequential_bytes_per_s * 8 / MBIT,
                "break_even_overlapped_mbit_per_s": speed.overlapped_bytes_per_s * 8 / MBIT,
            }
        rows.append(row)
    return rows


def table(rows: Sequence[Mapping[str, Any]], rate_mbit: int) -> Table:
    """For a terminal."""
    result = Table(
        "arm", "ratio", "encode MB/s", "decode MB/s", "transfer s", "TTFT raw / arm", "break-even Mbit/s (overlapped)",
        title=f"Inside the servers, link of {rate_mbit} Mbit/s",
    )  # fmt: skip
    for row in rows:
        ttft = row["ttft_raw_over_arm"]
        coded = "ratio" in row
        result.add_row(
            row["configuration"],
            f"{row['ratio']:.1f}" if coded else "",
            f"{row['encode_bytes_per_s'] / 1e6:.0f}" if coded else "",
            f"{row['decode_bytes_per_s'] / 1e6:.0f}" if coded else "",
            f"{row['transfer_s']:.3f}",
            f"{ttft['ratio']:.2f} [{ttft['low']:.2f}, {ttft['high']:.2f}]" if ttft else "",
            f"{row['break_even_mbit_per_s']:.0f} ({row['break_even_overlapped_mbit_per_s']:.0f})" if coded else "",
        )
    return result


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate-mbit", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/pair"))
    arguments = parser.parse_args()
    plan = replace(
        DEMO,
        phases=(Phase(name=PHASE, rates_bits_per_s=(arguments.rate_mbit * MBIT,)),),
        prompt_tokens=WARM_PROMPT_TOKENS,
        min_pairs=arguments.prompts,
        max_pairs=arguments.prompts,
        loaded_requests=0,
    )
    enter_user_namespace_if_needed()
    Experiment(plan, DEFAULT_MODEL, arguments.out, _Lines(), artefacts=DEFAULT_ARTEFACTS).run()
    samples, effects, _, _ = read_log(arguments.out)
    setup = json.loads((arguments.out / "setup.json").read_text())
    rows = summarise(samples, effects, setup["static_configurations"])
    (arguments.out / "summary.json").write_text(json.dumps({"rows": rows, "machine": setup["machine"]}, indent=1))
    Console(width=180).print(table(rows, arguments.rate_mbit))
    best = max((row for row in rows if "ratio" in row and row["arm"] != "controld"), key=lambda row: row["ratio"])
    gain = best["ttft_raw_over_arm"]["ratio"]
    print(f"best_ratio={best['ratio']:.1f} ttft_gain={gain:.2f} break_even_mbit={best['break_even_mbit_per_s']:.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
