"""Sequence parallelism on one machine: whether frames are the same, and what the ranks send to each other.

In float64 every latent must have one rank's bits. In the engine's own float32 a matrix of fewer rows may be summed in
another order; that turns a rounding of the bf16 history here and there, and generation from that history makes more of
it chunk by chunk. So frames of float32 are those of one rank up to rounding, not bit for bit: how far they go apart is
counted. On two cores more ranks are no faster: seconds are shown so that nobody has to ask, not as a claim.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.longlive.engine import LoadSpec, SessionSpec
from dataplanes.longlive.reference.checkpoint import full_transformer
from dataplanes.longlive.reference.engine import ReferenceEngine
from dataplanes.longlive.reference.exchange import NoExchange
from dataplanes.longlive.reference.generator import Generator
from dataplanes.longlive.reference.kv_tensor import KvRule
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.parallel import RankGroup, RankModel
from dataplanes.longlive.reference.rolling_cache import CacheLimits, ChunkPlace
from dataplanes.longlive.reference.setting import FULL
from dataplanes.longlive.reference.shapes import parse_prompt

PROMPT = "a yellow cross moves around"
_LIMITS = CacheLimits(window=3, sink=1, pins_shot=False)
_EXACT = KvRule(plain_dtype=torch.float64)
_EXACT_CHUNKS = 4
"""One more than the window holds: the history has rolled."""


def measure_ranks(ranks: tuple[int, ...], chunks: int, checkpoint: str) -> list[dict[str, Any]]:
    """One row for each number of ranks; the first must be 1."""
    rows: list[dict[str, Any]] = []
    frames_of_one: Tensor | None = None
    latents_of_one: Tensor | None = None
    for count in ranks:
        frames, row = _film(count, chunks, checkpoint)
        latents = _exact_latents(count, checkpoint)
        if frames_of_one is None or latents_of_one is None:
            frames_of_one, latents_of_one = frames, latents
        different = (frames.int() - frames_of_one.int()).abs()
        rows.append(
            {
                "ranks": count,
                **row,
                "float64_bits_equal": torch.equal(latents, latents_of_one),
                "pixels_equal_share": float((different == 0).float().mean()),
                "mean_pixel_difference": float(different.float().mean()),
                "largest_pixel_difference": int(different.max()),
            }
        )
    return rows


def _film(ranks: int, chunks: int, checkpoint: str) -> tuple[Tensor, dict[str, Any]]:
    """The production engine: frames, seconds of a chunk, bytes that one rank sent for it."""
    engine = ReferenceEngine()
    engine.load(LoadSpec(checkpoint=checkpoint, setting=Configuration({**FULL, "ranks": ranks, "vae": "stream"})))
    engine.open(SessionSpec(session_id="clip", prompt=PROMPT, seed=3))
    try:
        results = [engine.step("clip") for _ in range(chunks)]
    finally:
        engine.unload()
    reports = [result.report for result in results]
    return torch.cat([result.frames for result in results]), {
        "chunk_s": statistics.median(report.total_s for report in reports),
        "sent_bytes_per_chunk": reports[-1].communication_bytes,
    }


def _exact_latents(ranks: int, checkpoint: str) -> Tensor:
    shape = ModelShape()
    if ranks == 1:
        return _make(Generator(full_transformer(checkpoint, shape).double(), NoExchange()))
    group = RankGroup(RankModel(checkpoint=checkpoint, shape=shape, precisions=()), ranks)
    try:
        return _make(group)
    finally:
        group.stop()


def _make(generator: Generator | RankGroup) -> Tensor:
    generator.open("clip", _LIMITS, _EXACT)
    prompt = parse_prompt(PROMPT)
    made = [generator.make("clip", ChunkPlace(chunk=chunk), prompt, 0, 2) for chunk in range(_EXACT_CHUNKS)]
    return torch.cat([chunk.latents for chunk in made])
