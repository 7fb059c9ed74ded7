"""A strategy space as numbers: features of its lossy parts, drawing them, and their neighbours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from controld.contract.configuration import Configuration, Value
from controld.contract.errors import FieldError
from controld.contract.space import Parameter, StrategySpace

Array = NDArray[np.float64]

MAX_ENUMERATED = 20_000
"""Spaces of up to so many lossy parts are searched whole; of larger ones a sample is, and what is near the front."""

_INACTIVE = 0.5


class SpaceEncoding:
    """Features of lossy parts in the unit cube.

    An ordered number becomes its place on a logarithmic scale between the least and the largest value, another ordered
    value its rank, a category one column for each value. A parameter that does not exist with its parent's value stands
    in the middle: its parent's columns tell the two apart, so that values of different meaning are never compared.

    Args:
        space: the lossless parameters are left out.
    """

    def __init__(self, space: StrategySpace) -> None:
        self.space = space
        self.parameters = tuple(parameter for parameter in space.parameters if parameter.lossy)
        self._places = [_places(parameter) for parameter in self.parameters]
        self.columns = sum(1 if parameter.ordered else len(parameter.values) for parameter in self.parameters)

    def encode(self, parts: Sequence[Mapping[str, Value]]) -> Array:
        """Features, `[parts, columns]`.

        Raises:
            FieldError: a value is not one of the space's.
        """
        features = np.full((len(parts), self.columns), _INACTIVE)
        column = 0
        for parameter, places in zip(self.parameters, self._places, strict=True):
            width = 1 if parameter.ordered else len(parameter.values)
            for row, part in enumerate(parts):
                value = part.get(parameter.name, parameter.default)
                if parameter.name not in part and not self._is_at_default(parameter, part):
                    continue
                if value not in places:
                    raise FieldError(f"configuration.{parameter.name}", f"{value!r} is none of the space's values")
                if parameter.ordered:
                    features[row, column] = places[value]
                else:
                    features[row, column : column + width] = 0.0
                    features[row, column + int(places[value])] = 1.0
            column += width
        return features

    def _is_at_default(self, parameter: Parameter, part: Mapping[str, Value]) -> bool:
        return parameter.default is not None and self.space.is_active(parameter.name, part)

    def draw(self, coordinates: Sequence[float]) -> Configuration | None:
        """The lossy part at a point of the unit cube (one coordinate for each parameter); None if it is forbidden."""
        values: dict[str, Value] = {}
        for parameter, coordinate in zip(self.parameters, coordinates, strict=True):
            if self.space.is_active(parameter.name, values):
                chosen = parameter.values[min(int(coordinate * len(parameter.values)), len(parameter.values) - 1)]
                if chosen != parameter.default:
                    values[parameter.name] = chosen
        part = Configuration(values)
        return part if self.space.coders(part) else None

    def enumerated(self) -> list[Configuration] | None:
        """All lossy parts that have a coder, or None where there are more than `MAX_ENUMERATED`."""
        parts = list(itertools.islice(self.space.enumerate(lossy_only=True), MAX_ENUMERATED + 1))
        return parts if len(parts) <= MAX_ENUMERATED else None

    def neighbours(self, part: Mapping[str, Value]) -> Iterator[Configuration]:
        """Valid parts that differ from `part` in one parameter, and in what that one brings or takes."""
        for parameter in self.parameters:
            present = part.get(parameter.name, parameter.default)
            for value in _near(parameter, present):
                changed = self._with(part, parameter.name, value)
                if changed is not None:
                    yield changed

    def _with(self, part: Mapping[str, Value], name: str, value: Value) -> Configuration | None:
        values: dict[str, Value] = {}
        for parameter in self.parameters:
            if not self.space.is_active(parameter.name, values):
                continue
            middle = parameter.values[len(parameter.values) // 2]
            fallback = middle if parameter.default is None else parameter.default
            chosen = value if parameter.name == name else part.get(parameter.name, fallback)
            if chosen != parameter.default:
                values[parameter.name] = chosen
        changed = Configuration(values)
        same = changed == Configuration(dict(part))
        return None if same or not self.space.coders(changed) else changed


def _places(parameter: Parameter) -> dict[Value, float]:
    """Where each value stands: on [0, 1] if ordered, else its column."""
    if not parameter.ordered:
        return {value: float(column) for column, value in enumerate(parameter.values)}
    numbers = [value for value in parameter.values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(parameter.values) or min(numbers) < 0:
        positions = [float(rank) for rank in range(len(parameter.values))]
    else:
        positive = [float(number) for number in numbers if number > 0]
        # Zero stands one octave below the least number.
        floor = min(positive, default=1.0) / 2
        positions = [math.log(max(float(number), floor)) for number in numbers]
    low, high = min(positions), max(positions)
    span = high - low or 1.0
    return {value: (place - low) / span for value, place in zip(parameter.values, positions, strict=True)}


def _near(parameter: Parameter, present: Value | None) -> Sequence[Value]:
    if present not in parameter.values:
        return ()
    if not parameter.ordered:
        return [value for value in parameter.values if value != present]
    index = parameter.values.index(present)
    return parameter.values[max(index - 1, 0) : index] + parameter.values[index + 1 : index + 2]
