"""What handing out bits by head importance gains: RateQuant's closed form beside as many bits for every head.

    python benchmarks/rate_allocation.py [--bits 2,3,4] [--sinks 1] [--segments 6]

The same groups, KIVI's (arXiv 2402.02750) and after a Hadamard rotation: 2^bits levels for all heads, and the
allocation of RateQuant (arXiv 2605.06675) over the calibrated head profile. The gap between uniform bits and raw is the
uniform one's whole loss; `recovered` is the share of it that the allocation takes away. Texts: the held-out part of
the Python manual, which neither the profile nor anything else was made from; prompts of 512 tokens.

The first token is kept as it is for both (`--sinks`). Attention leans on it so much that coding it with few bits costs
more than all others together, which no allocation over heads can mend.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import ArtefactShelf, HeadProfile
from dataplanes.kvcodec.presets import kivi, ratequant
from dataplanes.sglang.model_identity import identify_model
from dataplanes.sglang.profiler.corpus import python_manual
from dataplanes.sglang.profiler.quality import QualityMeter, bank_for, load_model
from dataplanes.sglang.profiler.wire_codec import FrameCodec, layout_of

PROMPT_TOKENS = 512
PAGE_TOKENS = 64


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/models/smollm2-135m-instruct"))
    parser.add_argument("--artefacts", type=Path, default=Path("build/models/artefacts"))
    parser.add_argument("--bits", default="2,3,4", help="whole numbers of bits (default: 2,3,4)")
    parser.add_argument("--sinks", type=int, default=1, help="first tokens kept as they are (default: 1)")
    parser.add_argument("--segments", type=int, default=6)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/rate_allocation.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    identity = identify_model(options.model)
    layout = layout_of(identity, page_tokens=PAGE_TOKENS)
    shelf = ArtefactShelf.of_folder(options.artefacts, identity.fingerprint)
    profile = next(name for name, held in shelf.items() if isinstance(held, HeadProfile))
    bank = bank_for(QualityMeter(load_model(options.model)), options.model, python_manual())
    sinks = {"sink_tokens": options.sinks} if options.sinks else {}
    rows: list[dict[str, Any]] = []
    cases = [(rotation, int(bits)) for rotation in ("none", "hadamard") for bits in options.bits.split(",")]
    for rotation, bits in track(cases, "measuring", console=Console(stderr=True)):
        pair = {
            "uniform": kivi(layout, levels=2**bits, group=64, window=0),
            "allocated": ratequant(layout, profile, bits=float(bits), group=64, window=0),
        }
        losses: dict[str, list[float]] = {}
        wire: dict[str, int] = {}
        for name, values in pair.items():
            codec = FrameCodec(Configuration({**values, "transform": rotation, **sinks}), layout, artefacts=shelf)
            losses[name] = []
            for segment in range(options.segments):
                prompt = bank.prompt(PROMPT_TOKENS, segment)
                frames = codec.encode(prompt.planes)
                wire[name] = wire.get(name, 0) + sum(len(frame) for frame in frames)
                losses[name].append(bank.meter.measure_planes(prompt, codec.decode(frames, prompt.tokens)).loss_nats)
        uniform, allocated = fmean(losses["uniform"]), fmean(losses["allocated"])
        rows.append(
            {
                "transform": rotation,
                "bits": bits,
                "uniform_nats": uniform,
                "allocated_nats": allocated,
                "recovered": 1 - allocated / uniform,
                "worse_segments": sum(a > u for a, u in zip(losses["allocated"], losses["uniform"], strict=True)),
                "bytes_over_uniform": wire["allocated"] / wire["uniform"],
            }
        )
    table = Table("transform", "bits", "uniform, nats", "allocated, nats", "recovered", "worse segments", "bytes")
    for row in rows:
        table.add_row(
            row["transform"], str(row["bits"]), f"{row['uniform_nats']:.4f}", f"{row['allocated_nats']:.4f}",
            f"{row['recovered']:.0%}", f"{row['worse_segments']} of {options.segments}",
            f"{row['bytes_over_uniform']:.3f}",
        )  # fmt: skip
    Console(width=120).print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
