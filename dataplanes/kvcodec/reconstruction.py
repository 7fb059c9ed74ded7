"""How far decoded KV lies from what was coded: the figure that the quality guard watches."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from controld.contract.effect import MAX_RECONSTRUCTION_ERROR
from dataplanes.kvcodec.layout import ChunkPlanes, KVLayout

Pairs = Iterable[tuple[Tensor, Tensor]]
"""What was coded and what came back, of equal shapes and dtype."""


def reconstruction_error(tables: Iterable[Pairs]) -> float:
    """The relative RMS error of the worst table: sqrt(sum((decoded - source)^2) / sum(source^2)), sums in float64.

    Elements with equal values differ by nothing, infinities included, and so do two NaNs. A difference where the sum of
    squares is zero or not finite counts as the largest error.

    Args:
        tables: a model's keys (or latents) are one table, its values another.

    Returns:
        In [0, `MAX_RECONSTRUCTION_ERROR`]; exactly 0 where every value came back.
    """
    return max((_table_error(pairs) for pairs in tables), default=0.0)


def chunk_error(layout: KVLayout, source: ChunkPlanes, decoded: ChunkPlanes) -> float:
    """`reconstruction_error` of a chunk, wherever its tokens lie.

    Plane by plane: what is copied stays in a cache, which makes it several times faster than whole stacks.
    """

    def pairs(positions: Iterable[int]) -> Pairs:
        for position in positions:
            original = _plane(source, position)
            yield original, _plane(decoded, position).to(original.device)

    return reconstruction_error(pairs(positions) for positions in layout.planes_by_table().values())


def _plane(chunk: ChunkPlanes, position: int) -> Tensor:
    plane = chunk.planes[position]
    return plane if chunk.rows is None else plane.index_select(0, chunk.rows)


def _table_error(pairs: Pairs) -> float:
    differences = energy = 0.0
    exact: list[Tensor] = []
    for source, decoded in pairs:
        if torch.equal(source, decoded):
            exact.append(source)
            continue
        wanted = source.double().flatten()
        differences += _square_of_difference(wanted, decoded.double().flatten())
        energy += float(wanted.dot(wanted))
    if differences == 0:
        return 0.0
    energy += sum(float(plane.dot(plane)) for plane in (source.double().flatten() for source in exact))
    if not (0 < energy < math.inf and differences < math.inf):
        return MAX_RECONSTRUCTION_ERROR
    return min(math.sqrt(differences / energy), MAX_RECONSTRUCTION_ERROR)


def _square_of_difference(wanted: Tensor, found: Tensor) -> float:
    difference = found - wanted
    square = float(difference.dot(difference))
    if math.isfinite(square):
        return square
    same = (wanted == found) | (wanted.isnan() & found.isnan())
    difference.masked_fill_(same, 0.0)
    return float(difference.dot(difference))
