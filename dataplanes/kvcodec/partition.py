"""Which heads of which planes are coded together: those of one role and shape that have as many levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataplanes.kvcodec.bit_allocation import allocate_bits
from dataplanes.kvcodec.head_profile import HeadProfile, find_head_profile
from dataplanes.kvcodec.layout import KVLayout, Plane, PlaneRole, Stack
from dataplanes.kvcodec.parameters import CodecParameters, LevelsParameters, Quantise

LevelCounts = tuple[int, ...]
"""Levels of each head of a plane; 0 where the format has none."""


@dataclass(frozen=True, slots=True)
class StackPart:
    """What one stage codes.

    Args:
        stack: which planes, and the shape that is coded of each.
        heads: which heads of each plane, in order; None for all.
        levels: of every one of them; None where the format has none.
    """

    stack: Stack
    heads: tuple[tuple[int, ...], ...] | None
    levels: LevelsParameters | None


def parts_of(layout: KVLayout, parameters: CodecParameters, artefacts: Mapping[str, object]) -> tuple[StackPart, ...]:
    """A layout cut up, in order of first occurrence.

    Raises:
        CodecError: the head profile that the configuration names is unknown, or describes another layout.
    """
    profile = None
    if parameters.head_profile is not None:
        profile = find_head_profile(artefacts, parameters.head_profile)
        profile.check_layout(layout)
    found: dict[tuple[Plane, int, bool], list[tuple[int, tuple[int, ...]]]] = {}
    for position, counts in enumerate(_level_counts(layout, parameters, profile)):
        plane = layout.planes[position]
        for levels in dict.fromkeys(counts):
            heads = tuple(head for head, count in enumerate(counts) if count == levels)
            shape = Plane(plane.role, len(heads), plane.head_dim)
            found.setdefault((shape, levels, len(heads) == plane.heads), []).append((position, heads))
    return tuple(
        StackPart(
            stack=Stack(positions=tuple(position for position, _ in chosen), plane=plane),
            heads=None if is_whole else tuple(heads for _, heads in chosen),
            levels=replace(parameters.levels_of(plane), levels=levels) if levels else None,
        )
        for (plane, levels, is_whole), chosen in found.items()
    )


def _level_counts(layout: KVLayout, parameters: CodecParameters, profile: HeadProfile | None) -> list[LevelCounts]:
    """Of every plane in the layout's order."""
    counts = [(0,) * plane.heads for plane in layout.planes]
    for role, positions in layout.planes_by_table().items():
        levels = parameters.value if role is PlaneRole.VALUE else parameters.key
        if levels is None:
            continue
        for layer, position in enumerate(positions):
            heads = layout.planes[position].heads
            match parameters.quantise:
                case Quantise.LAYER_LEVELS | Quantise.ABSMAX_LEVELS:
                    assert levels.low_levels is not None
                    is_low = layer >= len(positions) - levels.share_of(len(positions))
                    counts[position] = (levels.low_levels if is_low else levels.levels,) * heads
                case Quantise.HEAD_LEVELS | Quantise.ALLOCATED_LEVELS:
                    assert profile is not None
                    counts[position] = _by_head(role, levels, parameters.bit_decay, profile)[layer]
                case _:
                    counts[position] = (levels.levels,) * heads
    return counts


def _by_head(
    role: PlaneRole, levels: LevelsParameters, bit_decay: float, profile: HeadProfile
) -> Sequence[LevelCounts]:
    """Levels of each head, layer by layer."""
    importance = profile.table_of(role)
    if levels.bits is not None:
        table = 1 << allocate_bits(importance, levels.bits, bit_decay)
    else:
        assert levels.low_levels is not None
        # The least important heads of all layers; among equals the first.
        order = np.argsort(importance, axis=None, kind="stable")
        table = np.full(importance.size, levels.levels)
        table[order[: levels.share_of(importance.size)]] = levels.low_levels
        table = table.reshape(importance.shape)
    return [tuple(int(count) for count in row) for row in table]
