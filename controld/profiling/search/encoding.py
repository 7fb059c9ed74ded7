"""A strategy space as numbers: features of its lossy parts, drawing them, and their neighbours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from controld.contract.configuration import Configuration, Value
from controld.contract.errors import FieldError
from controld.contract.space import Parameter, StrategySpace
from controld.contract.variant import variant_name

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
        self._conditions = [
            [condition for condition in space.conditions if condition.parameter == parameter.name]
            for parameter in self.parameters
        ]
        lossy = {parameter.name for parameter in self.parameters}
        self._rules = [rule for rule in space.forbidden if rule.values and set(rule.values) <= lossy]
        self.coders = CoderLookup(space)
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
        places = dict(zip((parameter.name for parameter in self.parameters), coordinates, strict=True))

        def chosen(parameter: Parameter) -> Value:
            count = len(parameter.values)
            return parameter.values[min(int(places[parameter.name] * count), count - 1)]

        return self._assembled(chosen)

    def enumerated(self) -> list[Configuration] | None:
        """All lossy parts that have a coder, or None where there are more than `MAX_ENUMERATED`."""
        parts = list(itertools.islice(self.space.enumerate(lossy_only=True), MAX_ENUMERATED + 1))
        return parts if len(parts) <= MAX_ENUMERATED else None

    def neighbours(self, part: Mapping[str, Value]) -> Iterator[Configuration]:
        """Valid parts that differ from `part` in one parameter, and in what that one brings or takes."""
        for parameter in self.parameters:
            present = part.get(parameter.name, parameter.default)
            for value in _near(parameter, present):
                changed = self._assembled(partial(_kept, part, parameter, value))
                if changed is not None and changed != part:
                    yield changed

    def _assembled(self, choose: Callable[[Parameter], Value]) -> Configuration | None:
        """The part of chosen values, one parameter after another; None where it is forbidden or has no coder."""
        state: dict[str, Value] = {}
        for parameter, conditions in zip(self.parameters, self._conditions, strict=True):
            if all(state.get(condition.parent) in condition.parent_values for condition in conditions):
                state[parameter.name] = choose(parameter)
        if any(all(state.get(name) in held for name, held in rule.values.items()) for rule in self._rules):
            return None
        part = Configuration({p.name: state[p.name] for p in self.parameters if self._is_written(p, state)})
        return part if self.coders.of(part) else None

    @staticmethod
    def _is_written(parameter: Parameter, state: Mapping[str, Value]) -> bool:
        return parameter.name in state and not parameter.is_default(state[parameter.name])


class CoderLookup:
    """Which coders (or other variants) a lossy part has; parts alike in what these depend on are asked for once."""

    def __init__(self, space: StrategySpace) -> None:
        self._space = space
        lossless = {parameter.name for parameter in space.parameters if not parameter.lossy}
        linked = {name for rule in space.forbidden if lossless & set(rule.values) for name in rule.values}
        linked |= lossless
        # A parameter that is not written is at its default or does not exist: its parents, which stand before it, tell.
        for parameter in reversed(space.parameters):
            if parameter.name in linked:
                linked |= {condition.parent for condition in space.conditions if condition.parameter == parameter.name}
        self._names = sorted(linked - lossless)
        self._known: dict[tuple[object, ...], frozenset[str]] = {}

    def of(self, part: Configuration) -> frozenset[str]:
        """The coders; none where the combination has none."""
        key = tuple(part.get(name) for name in self._names)
        if key not in self._known:
            names = (variant_name(self._space, full) for full in self._space.coders(part))
            self._known[key] = frozenset(name for name in names if name)
        return self._known[key]


def _kept(part: Mapping[str, Value], changed: Parameter, value: Value, parameter: Parameter) -> Value:
    """What a neighbour of `part` has for `parameter`: the new value, its own, or what a new parameter begins with."""
    if parameter is changed:
        return value
    middle = parameter.values[len(parameter.values) // 2]
    return part.get(parameter.name, middle if parameter.default is None else parameter.default)


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
