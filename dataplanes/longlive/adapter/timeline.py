"""Marks in time that cost the inference no waiting: on a GPU they are events that the stream passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from controld.contract.clock import Clock


class Timeline(Protocol):
    """Takes marks and turns them into seconds afterwards."""

    def begin_call(self) -> None:
        """A call of LongLive's inference begins; nothing of the one before is under way."""
        ...

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

    def begin_call(self) -> None:
        """The clock is always right."""

    def mark(self) -> float:
        """Now."""
        return self._clock.monotonic_s()

    def seconds(self, mark: Any) -> float:
        """The mark itself, or a host mark that another thread took."""
        return float(mark)


@dataclass(frozen=True, slots=True)
class _Origin:
    """An event and when the stream passed it, by the host's clock."""

    event: Any
    host_s: float


@dataclass(frozen=True, slots=True)
class _CudaMark:
    """An event and the origin that it is counted from."""

    event: Any
    origin: _Origin


class CudaTimeline:
    """By events of one device, placed on the host's clock at each call. Not run on a GPU yet.

    An event's distance from another one is a float32 of milliseconds: a day after the origin its steps are of 8 ms.
    """

    def __init__(self, clock: Clock, device: str) -> None:
        self._clock = clock
        self._device = device
        self._origin = self._take_origin()

    def begin_call(self) -> None:
        """Take a new origin; marks that were taken before keep theirs."""
        self._origin = self._take_origin()

    def mark(self) -> Any:
        """An event on the current stream."""
        mark = event(timed=True)
        mark.record(torch.cuda.current_stream(self._device))
        return _CudaMark(mark, self._origin)

    def seconds(self, mark: Any) -> float:
        """When the stream passed the event, on the host's clock."""
        if isinstance(mark, float):
            return mark
        mark.event.synchronize()
        since_origin_s = float(mark.origin.event.elapsed_time(mark.event)) / 1000.0
        return float(mark.origin.host_s) + since_origin_s

    def _take_origin(self) -> _Origin:
        torch.cuda.synchronize(self._device)
        origin = event(timed=True)
        origin.record(torch.cuda.current_stream(self._device))
        origin.synchronize()
        return _Origin(origin, self._clock.monotonic_s())


def overlap(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Share of `span` during which one of `others` (which do not overlap each other) was under way, in [0, 1]."""
    length = span[1] - span[0]
    if length <= 0:
        return 0.0
    beside = sum(max(0.0, min(span[1], end) - max(span[0], begin)) for begin, end in others)
    return min(1.0, beside / length)
