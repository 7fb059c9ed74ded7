from __future__ import annotations

import pytest
import torch

from dataplanes.sglang.profiler.frame_error import frame_error


def test_segments_look_at_frames_all_over_the_prompt() -> None:
    """Each token's error is its own, so the figure tells which frame was taken."""
    planes = torch.ones(4, 64, 2, 8)
    received = planes * (1 + torch.arange(64).float().div(64)[None, :, None, None])
    figures = [frame_error(planes, received, segment, frame_bytes=4 * 8 * 2 * 8 * 4) for segment in range(8)]
    assert len({round(figure, 6) for figure in figures}) >= 6, "eight frames of eight tokens"
    assert min(figures) < 0.2
    assert max(figures) > 0.7
    assert frame_error(planes, received, 5, frame_bytes=10**9) == pytest.approx(0.57, abs=0.02), "one frame is all"
    assert frame_error(list(planes), list(received), 3, frame_bytes=2048) == frame_error(
        planes, received, 3, frame_bytes=2048
    )


def test_the_worse_of_keys_and_values_counts() -> None:
    planes = torch.ones(4, 8, 2, 8)
    received = planes.clone()
    received[3] *= 1.5
    assert frame_error(planes, received, 0) == pytest.approx((0.25 / 2) ** 0.5)
    assert frame_error(planes, planes.clone(), 0) == 0.0
