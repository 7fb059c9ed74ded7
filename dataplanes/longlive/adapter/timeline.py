"""Marks in time that cost the inference no waiting: on a GPU they are events that the stream passes."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from controld.contract.clock import Clock


class Timeline(Protocol):
    """Takes marks and turns them into seconds afterwards."""

    def mark(self) -> Any:
        """Now, in the order of the work of the current stream."""
        ...

    def seconds(self, mark: Any) -> float:
        """When that was; waits until the device has come there."""
        ...


def event(*, timed: bool) -> Any:
    """A CUDA event; torch gives its constructor no types."""
    make: Any = torch.cuda.Event
    return make(enable_timing=timed)


class HostTimeline:
    """By the host's clock: where work is done when the call returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def mark(self) -> float:
        """Now."""
        return self._clock.monotonic_s()

    def seconds(self, mark: Any) -> float:
        """The mark itself, or a host mark that another thread took."""
        return float(mark)


class CudaTimeline:
    """By events of one device, placed on the host's clock once. Not run on a GPU yet."""

    def __init__(self, clock: Clock, device: str) -> None:
        self._clock = clock
        self._device = device
        torch.cuda.synchronize(device)
        self._origin = event(timed=True)
        self._origin.record(torch.cuda.current_stream(device))
        self._origin.synchronize()
        self._origin_s = clock.monotonic_s()

    def mark(self) -> Any:
        """An event on the current stream."""
        mark = event(timed=True)
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def seconds(self, mark: Any) -> float:
        """When the stream passed the event, on the host's clock."""
        if isinstance(mark, float):
            return mark
        mark.synchronize()
        return self._origin_s + float(self._origin.elapsed_time(mark)) / 1000.0


def overlap(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Share of `span` during which one of `others` (which do not overlap each other) was under way, in [0, 1]."""
    length = span[1] - span[0]
    if length <= 0:
        return 0.0
    beside = sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in others)
    return min(1.0, beside / length)
