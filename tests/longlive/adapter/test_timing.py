"""Times of chunks: how decoding lies beside the passes, and marks on a clock that has run for long."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from controld.contract.clock import ManualClock
from controld.contract.video import MemorySplit
from dataplanes.longlive.adapter import timeline
from dataplanes.longlive.adapter.chunk_report import make_report
from dataplanes.longlive.adapter.clip import Clip
from dataplanes.longlive.adapter.hooks import ChunkRecord, Decoded
from dataplanes.longlive.adapter.timeline import CudaTimeline, HostTimeline
from dataplanes.longlive.engine import SessionSpec

DAY_S = 86_400.0


def test_decoding_that_lies_wholly_beside_five_passes_overlaps_wholly(clock: ManualClock) -> None:
    clip = Clip(SessionSpec(session_id="a", prompt="x"), opened_s=0.0, scene_cut_prefix="")
    overlaps = []
    for chunk in range(6):
        begin = chunk * 1.1
        forwards = [(begin + 0.22 * at, begin + 0.22 * (at + 1)) for at in range(5)]
        record = ChunkRecord(
            steps=4, begin=begin, forwards=forwards, latents=torch.ones(1, 8, 2, 2, 2), end=begin + 1.1
        )
        clip.chunk += 1
        pixels = torch.zeros((32, 1, 1, 3), dtype=torch.uint8)
        # Begins in the chunk before this one.
        taken = Decoded(pixels, (max(begin - 0.5, 0.0), begin + 0.9), torch.tensor(0.002), torch.tensor(True))
        report = make_report(
            clip, record, [taken], HostTimeline(clock), setting_id="x", chunk=chunk, memory=MemorySplit(),
            begun_s=begin, now_s=begin + 1.1,
        )  # fmt: skip
        overlaps.append(report.vae_overlap)
    assert overlaps == pytest.approx([1.0] * 6)


class FakeEvent:
    """A CUDA event as far as its times go: it passes at once, and distances are float32 milliseconds."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._at_s = 0.0

    def record(self, _: object) -> None:
        self._at_s = self._clock.monotonic_s()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(np.float32((other._at_s - self._at_s) * 1000))


def test_marks_stay_fine_after_days(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "event", lambda *, timed: FakeEvent(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    line = CudaTimeline(clock, "cuda:0")
    clock.advance(10.0)
    early = line.mark()
    clock.advance(10 * DAY_S)
    line.begin_call()
    begin = line.mark()
    clock.advance(0.0123)
    end = line.mark()
    assert line.seconds(end) - line.seconds(begin) == pytest.approx(0.0123, abs=1e-6)
    assert line.seconds(end) == pytest.approx(clock.monotonic_s(), abs=1e-6)
    assert line.seconds(end) - line.seconds(early) == pytest.approx(10 * DAY_S + 0.0123, abs=1e-3)
