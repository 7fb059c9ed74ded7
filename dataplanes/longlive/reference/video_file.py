"""Writes frames as a video file that a person can watch: H.264 in MP4, enlarged."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dataplanes.longlive.reference.shapes import FRAMES_PER_SECOND

ENLARGED = 10
"""Pixels on the screen for each of a frame's edge."""


def write_video(path: Path, frames: Tensor, *, enlarged: int = ENLARGED) -> None:
    """Write a clip.

    Args:
        path: ends in `.mp4`; its folder is made.
        frames: uint8 `[frames, height, width, 3]`, at least one.
        enlarged: by how much; height and width are even then.

    Raises:
        ValueError: there are no frames.
        OSError: it could not be written; what had been there is as it was.
    """
    if not len(frames):
        raise ValueError("frames: there are none")
    path.parent.mkdir(parents=True, exist_ok=True)
    big = frames.repeat_interleave(enlarged, 1).repeat_interleave(enlarged, 2).numpy()
    scratch = path.with_name(f".{path.name}.part")
    try:
        _encode(scratch, big)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def _encode(path: Path, big: NDArray[np.uint8]) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FRAMES_PER_SECOND)
        stream.height, stream.width, stream.pix_fmt = big.shape[1], big.shape[2], "yuv420p"
        stream.options = {"crf": "18"}
        for picture in big:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
