"""The curated grid: a handful of lossy parts, spread over quality, that any KV or video plane can be judged by.

The grid is written as wishes in the words of a KV or a video strategy space. Each wish is moved to the nearest point
that the advertised space has; a wish whose categories the space lacks is dropped. A space that grants no wish (another
kind of plane) gets an even spread of its own lossy parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from controld.contract.configuration import Configuration, Value
from controld.contract.errors import ControldError
from controld.contract.space import Parameter, StrategySpace
from controld.contract.variant import variant_name

_MAX_ENUMERATED = 20_000
_SPREAD_PARTS = 12
_UNCODED = "none"
_KV_PARAMETER = "quantise"
_VIDEO_PARAMETER = "steps"


class GridSize(StrEnum):
    """How much of the grid. `QUICK` is for a show of two minutes, `FULL` for evidence."""

    QUICK = "quick"
    FULL = "full"


class EmptyGridError(ControldError):
    """The space has nothing to measure."""

    def __init__(self) -> None:
        super().__init__("the strategy space has no configuration with a coder or another variant", code="grid.empty")


@dataclass(frozen=True, slots=True)
class GridPoint:
    """One trial of the grid: a lossy part and the coders that are measured with it."""

    lossy: Configuration
    coders: tuple[str, ...]


def _levels(
    key: int,
    value: int,
    *,
    transform: str = "hadamard",
    sink_tokens: int = 1,
    key_axis: str = "channel",
    value_axis: str = "token",
    group: int = 64,
) -> dict[str, Value]:
    return {
        "transform": transform,
        "quantise": "levels",
        "sink_tokens": sink_tokens,
        "key_levels": key,
        "key_axis": key_axis,
        "key_group": group,
        "value_levels": value,
        "value_axis": value_axis,
        "value_group": group,
    }


def _calibrated(step: float) -> dict[str, Value]:
    """With whatever artefact the space offers first."""
    return {"transform": "klt", "quantise": "uniform", "step": step}


def _published(quantise: str, key: tuple[int, int], value: tuple[int, int], **changes: Value) -> dict[str, Value]:
    """A published method with two numbers of levels; with whatever head profile the space offers first."""
    return {
        "transform": "none",
        "quantise": quantise,
        "sink_tokens": 1,
        "key_levels": key[0],
        "key_axis": "channel",
        "key_group": 64,
        "key_low_levels": key[1],
        "key_low_percent": 80,
        "value_levels": value[0],
        "value_axis": "all_heads",
        "value_low_levels": value[1],
        "value_low_percent": 80,
        **changes,
    }


def _engine(weights: str, kv: str, steps: int, window: int, *, activations: str = "bf16") -> dict[str, Value]:
    """A setting of a video engine; a small window has no room for a second sink, elsewhere a shot keeps its own."""
    return {
        "weights": weights,
        "activations": activations,
        "block_rule": "4over6",
        "kv": kv,
        "kv_smooth": "token_mean",
        "steps": steps,
        "window": window,
        "sink": 3,
        "multi_shot": "no" if window == _SMALL_WINDOW else "yes",
    }


_SMALL_WINDOW = 9
_VIDEO_QUICK: tuple[dict[str, Value], ...] = tuple(
    _engine("bf16", kv, steps, window)
    for steps, kv, window in itertools.product((4, 2, 1), ("bf16", "nvfp4"), (15, _SMALL_WINDOW))
)
_VIDEO_FULL: tuple[dict[str, Value], ...] = (
    *_VIDEO_QUICK,
    *(
        _engine("nvfp4", kv, steps, window, activations=activations)
        for activations, steps, kv, window in itertools.product(
            ("bf16", "nvfp4"), (4, 2, 1), ("bf16", "nvfp4"), (15, _SMALL_WINDOW)
        )
    ),
)
_QUICK: tuple[dict[str, Value], ...] = (
    {"transform": "none", "quantise": "none"},
    _levels(10, 5),
    _calibrated(0.14),
    _levels(16, 8),
    _calibrated(0.17),
    _levels(12, 6),
    _levels(20, 10),
    _levels(8, 4),
    {"transform": "none", "quantise": "fp8_e4m3", "sink_tokens": 1},
    _levels(32, 16),
    _published("head_levels", (16, 8), (10, 5), transform="hadamard"),
)
_FULL: tuple[dict[str, Value], ...] = (
    *_QUICK,
    {"transform": "none", "quantise": "nvfp4", "sink_tokens": 1},
    _calibrated(0.2),
    _calibrated(0.28),
    _calibrated(0.4),
    _calibrated(0.56),
    _calibrated(0.1),
    _levels(14, 7),
    _levels(10, 6),
    _levels(8, 6),
    _levels(12, 6, sink_tokens=0),
    _levels(10, 5, sink_tokens=4),
    _levels(10, 5, transform="none"),
    _levels(10, 5, group=32),
    _levels(12, 6, key_axis="token"),
    _levels(6, 4),
    _published("head_levels", (16, 8), (10, 5)),
    _published("head_levels", (12, 6), (8, 4), transform="hadamard"),
    _published("absmax_levels", (32, 16), (32, 16), key_low_percent=67, value_low_percent=93),
    _published("absmax_levels", (24, 16), (24, 16), key_low_percent=67, value_low_percent=93),
)


def curated_grid(space: StrategySpace, size: GridSize = GridSize.FULL) -> tuple[GridPoint, ...]:
    """The grid of a space, each lossy part once, in a fixed order.

    The quick grid leaves out the coder that does not code. A video engine's begins with its usual setting.

    Raises:
        EmptyGridError: the space holds no configuration with a coder.
    """
    wishes = _wishes({parameter.name for parameter in space.parameters}, size)
    parts = dict.fromkeys(part for part in (nearest(space, wish) for wish in wishes) if part is not None)
    if not parts:
        parts = dict.fromkeys(_spread(space))
    points = []
    for part in parts:
        coders = coders_of(space, part)
        if size is GridSize.QUICK and len(coders) > 1:
            coders = tuple(code for code in coders if code != _UNCODED)
        if coders:
            points.append(GridPoint(part, coders))
    if not points:
        raise EmptyGridError
    return tuple(points)


def _wishes(names: Collection[str], size: GridSize) -> tuple[dict[str, Value], ...]:
    if _KV_PARAMETER in names:
        return _QUICK if size is GridSize.QUICK else _FULL
    if _VIDEO_PARAMETER in names:
        return _VIDEO_QUICK if size is GridSize.QUICK else _VIDEO_FULL
    return ()


def nearest(space: StrategySpace, wish: Mapping[str, Value]) -> Configuration | None:
    """The lossy part of the space that is nearest to a wish; None where it lacks a category that was wished for.

    Ordered numbers move to the value that is nearest on a logarithmic scale and that no rule of the space forbids,
    later parameters first.
    What the wish leaves open takes its default, else the first category or the middle number.
    """
    lossy = [parameter for parameter in space.parameters if parameter.lossy]
    return next(itertools.islice(_by_distance(space, lossy, wish, {}), 1), None)


def _by_distance(
    space: StrategySpace, left: Sequence[Parameter], wish: Mapping[str, Value], values: dict[str, Value]
) -> Iterator[Configuration]:
    if not left:
        part = Configuration(values)
        if space.coders(part):
            yield part
        return
    parameter, rest = left[0], left[1:]
    if not space.is_active(parameter.name, values):
        yield from _by_distance(space, rest, wish, values)
        return
    for value in _choices(parameter, wish.get(parameter.name)):
        written = {} if parameter.is_default(value) else {parameter.name: value}
        yield from _by_distance(space, rest, wish, {**values, **written})


def _choices(parameter: Parameter, wanted: Value | None) -> list[Value]:
    """What a parameter may become, the nearest first; only the very value where it is a category."""
    if wanted is None:
        wanted = parameter.default
    if wanted is None:
        wanted = parameter.values[len(parameter.values) // 2 if parameter.ordered else 0]
    numbers = [value for value in parameter.values if not isinstance(value, str | bool) and value >= 0]
    if not parameter.ordered or not numbers or isinstance(wanted, str | bool) or wanted < 0:
        return [wanted] if wanted in parameter.values else []
    target = math.log1p(wanted)
    return sorted(numbers, key=lambda number: abs(math.log1p(float(number)) - target))


def _spread(space: StrategySpace) -> list[Configuration]:
    parts = list(itertools.islice(space.enumerate(lossy_only=True), _MAX_ENUMERATED))
    if len(parts) <= _SPREAD_PARTS:
        return parts
    return [parts[round(i * (len(parts) - 1) / (_SPREAD_PARTS - 1))] for i in range(_SPREAD_PARTS)]


def coders_of(space: StrategySpace, part: Configuration) -> tuple[str, ...]:
    """The coders of a lossy part, in the order in which a trial has them; none where it is no part of the space.

    Of a plane without coders, the names of its other variants.
    """
    coders = (name for full in space.coders(part) if (name := variant_name(space, full)))
    # The first coder is the one that every segment runs through; the others see a few segments only.
    return tuple(sorted(coders, key=lambda code: (code != "entropy", code == _UNCODED, code)))
