"""Whether the heads that matter are the same heads whatever the text: Spearman's rank correlation of their importance.

    python benchmarks/head_ranks.py [--texts other.jsonl] [--sets 3] [--segments 2]

A head profile is calibrated once and used for every prompt, which is right only as far as the order of heads is a
property of the model (Tangram, arXiv 2606.06302, section 3, finds 0.967 for retention ratios on Qwen2.5-7B). Here the
importance of each head's keys and values (`dataplanes.sglang.profiler.head_importance`) is measured on disjoint sets of
segments of each domain, and every pair of sets is compared.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dataplanes.kvcodec import HeadProfile
from dataplanes.sglang.model_identity import identify_model
from dataplanes.sglang.profiler.calibrate import PROMPT_TOKENS, calibration_segments
from dataplanes.sglang.profiler.corpus import python_manual, python_sources, read_corpus
from dataplanes.sglang.profiler.head_importance import measure_head_importance
from dataplanes.sglang.profiler.quality import QualityMeter, load_model
from dataplanes.sglang.profiler.wire_codec import layout_of


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation of two tables of equal shape without ties."""
    ranks = [table.ravel().argsort().argsort().astype(float) for table in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/models/smollm2-135m-instruct"))
    parser.add_argument("--texts", type=Path, action="append", default=[], help="another domain; may be repeated")
    parser.add_argument("--sets", type=int, default=3, help="disjoint sets of segments of each domain (default: 3)")
    parser.add_argument("--segments", type=int, default=2, help="segments of 512 tokens in a set (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/head_ranks.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.model)
    meter, layout = QualityMeter(model), layout_of(identify_model(options.model), page_tokens=64)
    corpora = [python_manual(), python_sources(), *(read_corpus(path) for path in options.texts)]
    profiles: dict[tuple[str, int], HeadProfile] = {}
    wanted = [(corpus, number) for corpus in corpora for number in range(options.sets)]
    for corpus, number in track(wanted, "weighing heads", console=Console(stderr=True)):
        rows = calibration_segments(options.model, [corpus], options.sets * options.segments)
        mine = list(rows[number * options.segments : (number + 1) * options.segments])
        profiles[corpus.name, number] = measure_head_importance(
            meter, model, mine, layout, prompt_tokens=PROMPT_TOKENS
        ).profile
    found: dict[str, dict[str, list[float]]] = {}
    for (first, one), (second, other) in itertools.combinations(profiles.items(), 2):
        kind = "same domain" if first[0] == second[0] else "other domain"
        for part in ("key", "value"):
            found.setdefault(kind, {}).setdefault(part, []).append(spearman(getattr(one, part), getattr(other, part)))
    table = Table("compared", "part", "pairs", "mean", "least", title="Spearman's rank correlation of head importance")
    for kind, parts in found.items():
        for part, values in parts.items():
            table.add_row(kind, part, str(len(values)), f"{statistics.fmean(values):.3f}", f"{min(values):.3f}")
    Console().print(table)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"heads": int(one.key.size), "spearman": found}, indent=1))
    everything = [value for parts in found.values() for values in parts.values() for value in values]
    print(f"spearman_mean={statistics.fmean(everything):.3f} spearman_least={min(everything):.3f}")


if __name__ == "__main__":
    main()
