"""Decoding beside denoising: one clip in the three modes, against the limit of the same run; and who waits for whom.

Each run is one clip from its first step to its last frame. Its limit is max(sum of DiT, sum of VAE), both measured in
that very run: no overlap can be faster. Decoding beside the transformer also slows the transformer down a little (they
share memory and the interpreter), which this limit has in it; the stricter one takes both parts from the run that
decodes at the end, where nothing else runs. Runs of the modes take turns, so that whatever else the machine does
meets them alike; ratios are taken within one turn and their median is shown. A turn in which the thread that denoises
waited for a core for over 5 % of the time says more of the machine's other work than of decoding: such turns are only
used where there are no others, and the result says so.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controld.contract.configuration import Configuration, Value
from dataplanes.longlive.engine import LoadSpec, SessionSpec
from dataplanes.longlive.reference.checkpoint import UNTRAINED_NAME
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.setting import FULL

MODES = ("batch", "stream", "async")
QUIET_SHARE = 0.05
PROMPT = "a yellow cross moves around"
SLOW_DECODER: Mapping[str, Value] = {"steps": 1, "window": 6, "sink": 0, "multi_shot": "no"}
"""With a transformer of one layer this makes decoding the slower part. Such a one has no trained weights: only its
times are of interest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Film:
    """One clip.

    Args:
        total_s: from the first step to the last frame.
        dit_s: of all forward passes.
        vae_s: of all decoding; chunks that came with `close` count as the mean of those that a report tells of. None
            where no report tells of any.
        closing_s: of `close` alone.
        ahead: after each step, chunks that were made and not yet delivered.
        held_back_s: of the steps, what was not denoising: decoding in turn, or waiting at the decoder's queue.
        core_wait_s: for which this thread could have run and had no core.
    """

    total_s: float
    dit_s: float
    vae_s: float | None
    closing_s: float
    ahead: tuple[int, ...]
    held_back_s: float
    core_wait_s: float = 0.0

    @property
    def limit_s(self) -> float:
        """No order of the same work is faster; of a run that decodes at the end its decoding is `closing_s`."""
        return max(self.dit_s, self.closing_s if self.vae_s is None else self.vae_s)


def film(mode: str, chunks: int, checkpoint: str, *, slow_decoder: bool = False) -> Film:
    """Make a clip with this way of decoding."""
    engine = ReferenceEngine(ModelShape(layers=1)) if slow_decoder else ReferenceEngine()
    change = SLOW_DECODER if slow_decoder else {}
    setting = Configuration({**FULL, **change, "vae": mode})
    engine.load(LoadSpec(checkpoint=UNTRAINED_NAME if slow_decoder else checkpoint, setting=setting))
    engine.open(SessionSpec(session_id="clip", prompt=PROMPT, seed=3, chunks=chunks))
    each = engine.capabilities().frames_per_chunk
    reports, ahead, frames = [], [], 0
    waited, begin = core_wait_s(), time.perf_counter()
    for made in range(1, chunks + 1):
        report = engine.step("clip").report
        frames += report.frames
        reports.append(report)
        # The first chunk has some frames less; it counts as whole.
        ahead.append(made - -(-frames // each))
    stepped = time.perf_counter()
    engine.close("clip")
    end, waited = time.perf_counter(), core_wait_s() - waited
    engine.unload()
    decoded = [report.vae_s for report in reports if report.vae_s > 0]
    return Film(
        total_s=end - begin,
        dit_s=sum(report.dit_s for report in reports),
        vae_s=sum(decoded) / (chunks - ahead[-1]) * chunks if decoded else None,
        closing_s=end - stepped,
        ahead=tuple(ahead),
        held_back_s=sum(report.total_s - report.dit_s for report in reports),
        core_wait_s=waited,
    )


def core_wait_s() -> float:
    """How long this thread has waited for a core in its life, as Linux counts it; elsewhere 0."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


def measure_decoding(
    chunks: int, turns: int, checkpoint: str, *, most_turns: int, slow_decoder: bool = False
) -> dict[str, Any]:
    """Every mode in every turn, in rotating order; up to `most_turns`, until half of `turns` were quiet."""
    films: list[dict[str, Film]] = []
    while len(films) < turns or (2 * sum(map(is_quiet, films)) < turns and len(films) < most_turns):
        order = [MODES[(len(films) + place) % len(MODES)] for place in range(len(MODES))]
        films.append({mode: film(mode, chunks, checkpoint, slow_decoder=slow_decoder) for mode in order})
    return summarise(films, chunks)


def summarise(films: Sequence[Mapping[str, Film]], chunks: int) -> dict[str, Any]:
    """Medians over the quiet turns, or over all where none was quiet."""
    quiet = [turn for turn in films if is_quiet(turn)]
    used = quiet or films
    ratios = [turn_ratios(turn) for turn in used]
    return {
        "chunks": chunks,
        "turns": len(films),
        "quiet_turns": len(quiet),
        "core_wait_share": statistics.median(max(map(_core_wait_share, turn.values())) for turn in used),
        **{name: statistics.median(one[name] for one in ratios) for name in ratios[0]},
        "async_over_limit_by_turn": [one["async_over_limit"] for one in ratios],
        "modes": {mode: _medians([turn[mode] for turn in used]) for mode in MODES},
        "ahead": list(used[-1]["async"].ahead),
    }


def is_quiet(turn: Mapping[str, Film]) -> bool:
    """Whether the machine had cores to spare in it."""
    return max(map(_core_wait_share, turn.values())) < QUIET_SHARE


def _core_wait_share(film: Film) -> float:
    return film.core_wait_s / film.total_s


def turn_ratios(films: Mapping[str, Film]) -> dict[str, float]:
    """What one turn says.

    Args:
        films: one for each mode.

    Returns:
        `async_over_limit`: to the limit of the same run. `async_over_alone`: to the limit from the parts run alone.
        `async_over_stream` and `stream_over_limit` likewise. `best_over_stream`: what perfect overlap would give.
    """
    batch, stream, beside = (films[mode] for mode in MODES)
    return {
        "async_over_limit": beside.total_s / beside.limit_s,
        "async_over_alone": beside.total_s / batch.limit_s,
        "stream_over_limit": stream.total_s / stream.limit_s,
        "async_over_stream": beside.total_s / stream.total_s,
        "best_over_stream": stream.limit_s / stream.total_s,
    }


def _medians(films: Sequence[Film]) -> dict[str, float]:
    return {
        "total_s": statistics.median(one.total_s for one in films),
        "dit_s": statistics.median(one.dit_s for one in films),
        "vae_s": statistics.median(one.closing_s if one.vae_s is None else one.vae_s for one in films),
        "held_back_s": statistics.median(one.held_back_s for one in films),
        "most_ahead": max(max(one.ahead) for one in films),
    }
