"""The sender's look at its own frames: decode one again, compare it with the pool, and say how far off it is.

This is what the quality guard learns from while serving. It runs on a small share of the transfers, on one piece of
each: the one that holds a token drawn from the whole prompt, in whichever chunk it comes. It runs in memory of its own,
when every piece of the chunk is on its way, so it costs the worker what is left of it once the receiver has answered.

Only a frame that cannot be decoded says something against its codec. Where the look itself fails (no memory, say) it
tells nothing: the receiver answers for the frame.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from dataplanes.kvcodec import FrameError, decode_frame
from dataplanes.kvcodec.layout import ChunkPlanes
from dataplanes.kvcodec.reconstruction import chunk_error
from dataplanes.sglang.pd.edge import Counting, Guarded
from dataplanes.sglang.pd.memory import PagedPool, Pages

_log = logging.getLogger(__name__)

_SKIPPED: Final = "a look at a frame of ours failed and tells nothing; the transfer goes on"


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
    """Decodes frames of one pool. A look that fails is counted as `pd.self_check_skipped`, too.

    Args:
        artefacts: calibrated data that frames may name.
        counting: takes counts of what fails.
    """

    def __init__(self, pool: PagedPool, artefacts: Mapping[str, object], counting: Counting) -> None:
        self._pool = pool
        self._artefacts = artefacts
        self._counting = counting

    def keep(self, frame: Tensor) -> Tensor | None:
        """A copy of a frame, to look at it later; None where none could be made. Never raises."""
        with Guarded(self._counting, _SKIPPED):
            return frame.clone()
        self._counting.count("pd.self_check_skipped")
        return None

    def look(self, frame: Tensor, pages: Pages, tokens: int) -> Checked | None:
        """Decode a frame and compare it with the pool's pages that it was made of. Never raises.

        Args:
            tokens: valid ones in the pages.

        Returns:
            What was found; None where the look failed, which says nothing about the frame.
        """
        with Guarded(self._counting, _SKIPPED):
            try:
                return self._compare(frame, pages, tokens)
            except FrameError as error:
                _log.error("a frame of ours cannot be decoded: %s", error)
                return Checked(fault=error.reason.value)
        self._counting.count("pd.self_check_skipped")
        return None

    def _compare(self, frame: Tensor, pages: Pages, tokens: int) -> Checked:
        layout = self._pool.layout
        source = layout.chunk(self._pool.planes, self._pool.rows(pages, tokens))
        # Into memory of its own: nothing of the pool is written.
        decoded = decode_frame(frame, max_raw_bytes=layout.raw_bytes(source.tokens), artefacts=self._artefacts)
        return Checked(error=chunk_error(layout, source, ChunkPlanes(decoded.planes, None)))
