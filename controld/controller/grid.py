"""The grid of a decision table: its edges, and the points that stand for each bin."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from controld.controller.knobs.base import Array, Context

# Bins at the rim have one edge only; their other end lies this far out.
_RIM = 64.0
_UNLIMITED_BYTES_PER_S = 1e15


def geometric_edges(first: float, last: float, factor: float) -> tuple[float, ...]:
    """`first`, `first * factor`, ... up to `last` or just beyond it."""
    count = math.ceil(math.log(last / first) / math.log(factor) - 1e-9)
    return tuple(first * factor**index for index in range(count + 1))


@dataclass(frozen=True)
class Grid:
    """Inner edges of the three axes; n edges make n + 1 bins.

    The defaults: sizes a factor of 2 apart from 256 kB to 256 MB; bandwidths a factor of sqrt 2 apart from 1 Mbit/s to
    400 Gbit/s; loads closer together where waiting is steep.
    """

    size_edges_bytes: tuple[float, ...] = geometric_edges(256e3, 256e6, 2.0)
    bandwidth_edges_bytes_per_s: tuple[float, ...] = geometric_edges(125e3, 50e9, math.sqrt(2.0))
    load_edges: tuple[float, ...] = (0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0, 1.5, 2.5, 5.0)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Bins of (size, bandwidth, load)."""
        return (
            len(self.size_edges_bytes) + 1,
            len(self.bandwidth_edges_bytes_per_s) + 1,
            len(self.load_edges) + 1,
        )

    @cached_property
    def points(self) -> Points:
        """The representative points of every bin."""
        sizes, bandwidths = np.array(self.size_edges_bytes), np.array(self.bandwidth_edges_bytes_per_s)
        size_low, size_high = np.append(sizes[0] / _RIM, sizes), np.append(sizes, sizes[-1] * 4)
        bandwidth_low = np.append(bandwidths[0] / 2, bandwidths)
        bandwidth_high = np.append(bandwidths, _UNLIMITED_BYTES_PER_S)
        # The geometric middle of a bin without an upper edge would be absurd: one step above the last edge instead.
        bandwidth_rim = np.append(bandwidths, bandwidths[-1] * 2)
        loads = np.array(self.load_edges)
        # Waiting is convex in load and load starts at zero: the arithmetic middle.
        load_middle = (np.append(0.0, loads) + np.append(loads, loads[-1] * 2)) / 2
        return Points(
            size_low=size_low,
            size=np.sqrt(size_low * size_high),
            size_high=size_high,
            bandwidth_low=bandwidth_low,
            bandwidth=np.sqrt(bandwidth_low * bandwidth_rim),
            bandwidth_high=bandwidth_high,
            load=load_middle,
        )

    def bin_edges(self, size: int, bandwidth: int, load: int) -> tuple[tuple[float, float], ...]:
        """(low, high) of the three bins, with 0 and infinity at the rims."""
        axes = (
            (self.size_edges_bytes, size),
            (self.bandwidth_edges_bytes_per_s, bandwidth),
            (self.load_edges, load),
        )
        return tuple((edges[i - 1] if i > 0 else 0.0, edges[i] if i < len(edges) else math.inf) for edges, i in axes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Middles and ends of the bins; each array has one value a bin. Bytes and bytes per second."""

    size_low: Array
    size: Array
    size_high: Array
    bandwidth_low: Array
    bandwidth: Array
    bandwidth_high: Array
    load: Array

    def at(self, size: int, bandwidth: int, load: int) -> Points:
        """The points of one cell."""
        s, b, d = slice(size, size + 1), slice(bandwidth, bandwidth + 1), slice(load, load + 1)
        return Points(
            size_low=self.size_low[s],
            size=self.size[s],
            size_high=self.size_high[s],
            bandwidth_low=self.bandwidth_low[b],
            bandwidth=self.bandwidth[b],
            bandwidth_high=self.bandwidth_high[b],
            load=self.load[d],
        )

    @property
    def middle(self) -> Context:
        """Where arms are ranked."""
        return Context(sizes_bytes=self.size, bandwidths_bytes_per_s=self.bandwidth, loads=self.load)

    @property
    def corners(self) -> tuple[Context, ...]:
        """Where an arm must not be slower than raw, too: the ends of the size and bandwidth bins."""
        return tuple(
            Context(sizes_bytes=size, bandwidths_bytes_per_s=bandwidth, loads=self.load)
            for size in (self.size_low, self.size_high)
            for bandwidth in (self.bandwidth_high, self.bandwidth_low)
        )

    @property
    def crossings(self) -> Context:
        """All corners, each once, for bins lie side by side: sizes [S + 1], bandwidths [B + 1], the first load."""
        return Context(
            sizes_bytes=np.append(self.size_low, self.size_high[-1:]),
            bandwidths_bytes_per_s=np.append(self.bandwidth_low, self.bandwidth_high[-1:]),
            loads=self.load[:1],
        )
