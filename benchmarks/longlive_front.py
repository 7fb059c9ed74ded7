"""The Pareto front of the reference engine's settings: loss, processor time of a chunk, bytes held.

Time is one thread's processor time of a whole chunk, decoding included, so that other work on the machine does not
count. Formats below bf16 are emulated on a CPU: their bytes and losses are their own, their times are the emulation's.
Such a setting can be on the front for its bytes, never for its speed, and every table marks it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from controld.contract.configuration import Configuration
from dataplanes.longlive.engine import LoadSpec, SessionSpec
from dataplanes.longlive.reference.engine import ReferenceEngine

PROMPT = "a yellow cross moves around"
TIME_SLACK = 0.05
"""Times that differ by less are alike: so much do they scatter from run to run."""
_WARM_CHUNKS = 5
"""Enough to fill the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One setting.

    Args:
        name: unique.
        loss: mean over sessions.
        chunk_s: processor seconds of a chunk.
        held_bytes: weights, history of one session and activations.
        is_emulated: see `Asked.is_emulated`.
    """

    name: str
    loss: float
    chunk_s: float
    held_bytes: int
    is_emulated: bool

    def dominates(self, other: Point) -> bool:
        """No worse in anything and better in something; times within the slack are alike.

        An emulated setting counts as slower than any other that is not, and as fast as any other that is: what its
        emulation takes says nothing of its format.
        """
        mine_s, other_s = (math.inf if one.is_emulated else one.chunk_s for one in (self, other))
        slower = mine_s > other_s * (1 + TIME_SLACK)
        if slower or self.loss > other.loss or self.held_bytes > other.held_bytes:
            return False
        faster = mine_s * (1 + TIME_SLACK) < other_s
        return faster or self.loss < other.loss or self.held_bytes < other.held_bytes


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other one dominates, in order."""
    return [point for point in points if not any(other.dominates(point) for other in points)]


def measure_costs(
    configurations: Mapping[str, Configuration], chunks: int, checkpoint: str
) -> dict[str, dict[str, Any]]:
    """Time and memory by name. All engines are loaded at once and make one chunk each in turn."""
    engines = {name: _loaded(configuration, checkpoint) for name, configuration in configurations.items()}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    memory = {}
    for number in range(_WARM_CHUNKS + chunks):
        for name, engine in engines.items():
            begin = time.thread_time()
            report = engine.step("clip").report
            if number >= _WARM_CHUNKS:
                seconds[name].append(time.thread_time() - begin)
            memory[name] = report.memory
    for engine in engines.values():
        engine.unload()
    return {
        name: {
            "chunk_s": statistics.median(seconds[name]),
            "weights_bytes": memory[name].weights_bytes,
            "kv_bytes": memory[name].kv_bytes,
            "activation_bytes": memory[name].activation_bytes,
        }
        for name in engines
    }


def _loaded(configuration: Configuration, checkpoint: str) -> ReferenceEngine:
    """Decoding in turn, so that one thread does all the work."""
    engine = ReferenceEngine()
    engine.load(LoadSpec(checkpoint=checkpoint, setting=Configuration({**configuration, "vae": "stream"})))
    engine.open(SessionSpec(session_id="clip", prompt=PROMPT, seed=3))
    return engine


def points_of(quality: Iterable[Mapping[str, Any]], costs: Mapping[str, Mapping[str, Any]]) -> list[Point]:
    """Joined by name; what has no costs (the VAE alone) is no setting."""
    return [
        Point(
            name=row["name"],
            loss=row["loss"],
            chunk_s=cost["chunk_s"],
            held_bytes=cost["weights_bytes"] + cost["kv_bytes"] + cost["activation_bytes"],
            is_emulated=row["is_emulated"],
        )
        for row in quality
        if (cost := costs.get(row["name"])) is not None
    ]
