"""The sender's look at its own frames: decode one again, compare it with the pool, and say how far off it is.

This is what the quality guard learns from while serving. It runs on a small share of the transfers, on one piece of
each, in memory of its own, when every piece is on its way: it costs the worker what is left of it once the receiver has
answered.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from dataplanes.kvcodec import FrameError, decode_frame
from dataplanes.kvcodec.layout import ChunkPlanes
from dataplanes.kvcodec.reconstruction import chunk_error
from dataplanes.sglang.pd.edge import Counting, Guarded
from dataplanes.sglang.pd.memory import PagedPool

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What came of a look; one of the two says something.

    Args:
        error: the reconstruction error, as effects state it; None where the frame could not be decoded.
        fault: why it could not; empty otherwise.
    """

    error: float | None = None
    fault: str = ""


class SelfCheck:
    """Decodes frames of one pool.

    Args:
        artefacts: calibrated data that frames may name.
        counting: takes counts of what fails.
    """

    def __init__(self, pool: PagedPool, artefacts: Mapping[str, object], counting: Counting) -> None:
        self._pool = pool
        self._artefacts = artefacts
        self._counting = counting

    def look(self, frame: Tensor, rows: Tensor) -> Checked:
        """Decode a frame and compare it with the pool's rows that it was made of. Never raises."""
        with Guarded(self._counting, "a frame of ours cannot be checked") as looking:
            try:
                return self._compare(frame, rows)
            except FrameError as error:
                _log.error("a frame of ours cannot be decoded: %s", error)
                return Checked(fault=error.reason.value)
        assert looking.error is not None
        return Checked(fault=f"exception:{type(looking.error).__name__}")

    def _compare(self, frame: Tensor, rows: Tensor) -> Checked:
        layout = self._pool.layout
        source = layout.chunk(self._pool.planes, rows)
        # Into memory of its own: nothing of the pool is written.
        decoded = decode_frame(frame, max_raw_bytes=layout.raw_bytes(source.tokens), artefacts=self._artefacts)
        return Checked(error=chunk_error(layout, source, ChunkPlanes(decoded.planes, None)))
