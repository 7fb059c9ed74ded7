"""The strategy space that profiling engines are compared on: a part of the advertised one that can be measured whole.

    python benchmarks/profiling_space.py [--json]

It is the KV space of SmolLM2 with its calibrated artefacts, thinned until every lossy part can be measured once; all
formats are in it. Printed is its size, by format, beside the size of the whole.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from controld.contract.configuration import Value
from controld.contract.space import Forbidden, StrategySpace
from dataplanes.kvcodec.artefacts import ArtefactShelf
from dataplanes.kvcodec.space import kv_strategy_space
from dataplanes.sglang.model_identity import identify_model
from dataplanes.sglang.profiler.wire_codec import layout_of

PAGE_TOKENS: Final = 64
CACHEGEN_LOW_PERCENT: Final = (67, 93)
"""Share of the 30 layers that LMCache's CacheGen gives fewer bins, of keys and of values."""
LEVELS: Final = (4, 6, 8, 12, 16, 24, 32)
MODEL: Final = Path("build/models/smollm2-135m-instruct")
ARTEFACTS: Final = Path("build/models/artefacts")

_PARTS: Final = ("key", "value")
_REASON: Final = "left out of the benchmark"


def bench_space(space: StrategySpace) -> StrategySpace:
    """The part of a KV space that the benchmark measures; each of its configurations is one of `space`.

    Integer levels keep 7 counts each of keys and values, both axes, groups 32 and 64, both transforms, sinks and
    window. Other formats keep their own numbers in the grouping that their publications use.

    Args:
        space: of 30 layers with keys and values of 64 channels, with a head profile.

    Raises:
        FieldError: `space` lacks a value that the benchmark needs.
    """
    fewer: dict[str, tuple[Value, ...]] = {"sink_tokens": (0, 1), "window_tokens": (0, 64)}
    for part in _PARTS:
        fewer |= {f"{part}_levels": LEVELS, f"{part}_group": (32, 64), f"{part}_low_levels": (4, 8, 16)}
    fewer["block_rule"] = ("plain",)
    fewer["key_low_percent"], fewer["value_low_percent"] = (33, 67, 80), (33, 80, 93)
    smaller = space.restrict(fewer)
    values = {parameter.name: parameter.values for parameter in smaller.parameters}

    def only(quantise: str, **wanted: tuple[Value, ...]) -> list[Forbidden]:
        """Of one format, no other values of these parameters."""
        rules = []
        for name, kept in wanted.items():
            others = tuple(value for value in values[name] if value not in kept)
            if others:
                rules.append(Forbidden(values={"quantise": (quantise,), name: others}, reason=_REASON))
        return rules

    rows_and_columns = {"key_axis": ("channel",), "key_group": (64,), "value_group": (64,)}
    per_token = {**rows_and_columns, "value_axis": ("token",)}
    cachegen = {"key_low_percent": CACHEGEN_LOW_PERCENT[:1], "value_low_percent": CACHEGEN_LOW_PERCENT[1:]}
    thinned = [
        *only("levels", value_axis=("channel", "token")),
        *only("allocated_levels", key_group=(64,), value_group=(64,)),
        *only(
            "head_levels", **rows_and_columns, value_axis=("all_heads",), key_low_percent=(80,), value_low_percent=(80,)
        ),
        *only("layer_levels", **per_token, **_low(4, 8), key_low_percent=(33,), value_low_percent=(33,)),
        *only("absmax_levels", **_low(8, 16), **cachegen),
    ]
    return replace(smaller, forbidden=(*smaller.forbidden, *thinned))


def _low(*levels: int) -> Mapping[str, tuple[Value, ...]]:
    return {f"{part}_low_levels": levels for part in _PARTS}


def model_space(model: Path = MODEL, artefacts: Path = ARTEFACTS) -> StrategySpace:
    """What a plane that serves the model advertises, with the artefacts that are calibrated for it."""
    identity = identify_model(model)
    shelf = ArtefactShelf.of_folder(artefacts, identity.fingerprint)
    return kv_strategy_space(layout_of(identity, page_tokens=PAGE_TOKENS), shelf)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--artefacts", type=Path, default=ARTEFACTS)
    parser.add_argument("--json", action="store_true", help="print the space itself")
    options = parser.parse_args()
    whole = model_space(options.model, options.artefacts)
    space = bench_space(whole)
    if options.json:
        print(space.to_json())
        return
    lossy: Counter[str] = Counter()
    full: Counter[str] = Counter()
    for part in space.enumerate(lossy_only=True):
        lossy[str(part["quantise"])] += 1
        full[str(part["quantise"])] += len(space.coders(part))
    sizes = {name: {"lossy_parts": lossy[name], "configurations": full[name]} for name in lossy}
    print(json.dumps(sizes, indent=2))
    print(f"whole space: {whole.count(lossy_only=True)} lossy parts, {whole.count()} configurations")
    print(f"lossy_parts={space.count(lossy_only=True)} configurations={space.count()}")


if __name__ == "__main__":
    main()
