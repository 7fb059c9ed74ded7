"""How far decoded KV lies from what was coded: the figure that the quality guard watches."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from controld.contract.effect import MAX_RECONSTRUCTION_ERROR
from dataplanes.kvcodec.layout import ChunkPlanes, KVLayout, Plane, PlaneRole

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
    """`reconstruction_error` of a chunk, wherever its tokens lie."""

    def pairs(of_values: bool) -> Pairs:
        for stack in layout.stacks:
            if _is_value(stack.plane) == of_values:
                original = source.read(stack)
                yield original, decoded.read(stack).to(original.device)

    return reconstruction_error(pairs(of_values) for of_values in (False, True))


def _is_value(plane: Plane) -> bool:
    return plane.role is PlaneRole.VALUE


def _table_error(pairs: Pairs) -> float:
    differences = energy = 0.0
    exact: list[Tensor] = []
    for source, decoded in pairs:
        if torch.equal(source, decoded):
            exact.append(source)
            continue
        wanted, found = source.double(), decoded.double()
        same = (wanted == found) | (wanted.isnan() & found.isnan())
        differences += float((found - wanted).masked_fill_(same, 0.0).square_().sum())
        energy += float(wanted.square_().sum())
    if differences == 0:
        return 0.0
    energy += sum(float(source.double().square_().sum()) for source in exact)
    if not (0 < energy < math.inf and differences < math.inf):
        return MAX_RECONSTRUCTION_ERROR
    return min(math.sqrt(differences / energy), MAX_RECONSTRUCTION_ERROR)
