"""A strategy space as data: parameters, when each is active, and what combinations are forbidden.

The agent advertises it, the daemon validates and enumerates it; neither knows the other's code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from controld.contract.configuration import Configuration, Value
from controld.contract.errors import FieldError


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One knob with its finite values.

    Args:
        name: lower snake case.
        values: what it may be, in order where `ordered`.
        ordered: whether neighbouring values are alike (an ordinal rather than a category).
        lossy: whether it decides quality; false only for lossless coders.
        default: a parameter at its default is left out of a configuration, so that a space may gain a parameter
            without changing the ids of the configurations that it had before; None where it is always written.
    """

    name: str
    values: tuple[Value, ...]
    ordered: bool = False
    lossy: bool = True
    default: Value | None = None

    def is_default(self, value: Value) -> bool:
        """Whether a configuration leaves this value out."""
        return self.default is not None and _same(value, self.default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """`parameter` exists only where `parent` is one of `parent_values`."""

    parameter: str
    parent: str
    parent_values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """A combination that is not allowed: every named parameter has one of its listed values."""

    values: Mapping[str, tuple[Value, ...]]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySpace:
    """All configurations of one kind of data plane.

    Parameters are listed parents before children. A lossy parameter does not depend on a lossless one.
    """

    parameters: tuple[Parameter, ...]
    conditions: tuple[Condition, ...] = ()
    forbidden: tuple[Forbidden, ...] = ()

    def __post_init__(self) -> None:
        known = {parameter.name: parameter for parameter in self.parameters}
        names = list(known)
        if len(names) != len(self.parameters):
            raise FieldError("space.parameters", "a name occurs twice")
        for parameter in self.parameters:
            field = f"space.parameters.{parameter.name}"
            if not parameter.values:
                raise FieldError(field, "has no values")
            if len({(type(value), value) for value in parameter.values}) != len(parameter.values):
                raise FieldError(field, "a value occurs twice")
            if parameter.default is not None and not _holds(parameter.values, parameter.default):
                raise FieldError(f"{field}.default", f"{parameter.default!r} is none of the values")
        for condition in self.conditions:
            field = f"space.conditions.{condition.parameter}"
            if condition.parameter not in known or condition.parent not in known:
                raise FieldError(field, "names an unknown parameter")
            if names.index(condition.parent) >= names.index(condition.parameter):
                raise FieldError(field, "stands before its parent")
            if known[condition.parameter].lossy and not known[condition.parent].lossy:
                raise FieldError(field, "is lossy but depends on a lossless parameter")
        for rule in self.forbidden:
            for name in rule.values:
                if name not in known:
                    raise FieldError("space.forbidden", f"names the unknown parameter {name!r}")

    def is_active(self, name: str, values: Mapping[str, Value]) -> bool:
        """Whether `name` exists, given the values of the parameters before it; those left out are at their default."""
        return all(
            self.value_of(condition.parent, values) in condition.parent_values
            for condition in self.conditions
            if condition.parameter == name
        )

    def value_of(self, name: str, values: Mapping[str, Value]) -> Value | None:
        """What a configuration has for `name`, written or by default; None where it does not exist."""
        if name in values:
            return values[name]
        default = next(parameter.default for parameter in self.parameters if parameter.name == name)
        return default if default is not None and self.is_active(name, values) else None

    def validate(self, configuration: Mapping[str, Value]) -> None:
        """Accept exactly the points of the space.

        Raises:
            FieldError: a parameter is unknown, missing, inactive, out of range or written though at its default, or
                the combination is forbidden.
        """
        known = {parameter.name for parameter in self.parameters}
        for name in configuration:
            if name not in known:
                raise FieldError(f"configuration.{name}", "unknown parameter", code="configuration.unknown")
        for parameter in self.parameters:
            field = f"configuration.{parameter.name}"
            active = self.is_active(parameter.name, configuration)
            if not active:
                if parameter.name in configuration:
                    raise FieldError(field, "does not exist with its parent's value", code="configuration.inactive")
                continue
            if parameter.name not in configuration:
                if parameter.default is not None:
                    continue
                raise FieldError(field, "is missing", code="configuration.missing")
            value = configuration[parameter.name]
            if not _holds(parameter.values, value):
                raise FieldError(
                    field,
                    f"{value!r} is not allowed",
                    hint=f"one of {list(parameter.values)}",
                    code="configuration.value",
                )
            if parameter.is_default(value):
                raise FieldError(field, f"{value!r} is its default", hint="leave it out", code="configuration.default")
        for rule in self.forbidden:
            if all(self.value_of(name, configuration) in values for name, values in rule.values.items()):
                raise FieldError("configuration", rule.reason, code="configuration.forbidden")

    def enumerate(self, *, lossy_only: bool = False) -> Iterator[Configuration]:
        """Every valid configuration once, in a fixed order.

        Args:
            lossy_only: leave the lossless parameters out, so that each lossy part comes once.
        """
        walk = _Walk(self)
        for state in walk.states({}, 0, walk.lossy_count):
            if lossy_only:
                if any(True for _ in walk.states(state, walk.lossy_count, len(walk.order))):
                    yield walk.configuration(state)
                continue
            for whole in walk.states(state, walk.lossy_count, len(walk.order)):
                yield walk.configuration(whole)

    def count(self, *, lossy_only: bool = False) -> int:
        """How many `enumerate` would give, without walking them all."""
        return _Walk(self).count(lossy_only=lossy_only)

    def coders(self, lossy_part: Mapping[str, Value]) -> tuple[Configuration, ...]:
        """All full configurations of one lossy part; none where the part is not of the space."""
        walk = _Walk(self)
        state = walk.state_of(lossy_part)
        found = tuple(walk.configuration(whole) for whole in walk.states(state, walk.lossy_count, len(walk.order)))
        try:
            for configuration in found[:1]:
                self.validate({**lossy_part, **configuration})
        except FieldError:
            return ()
        return found

    def restrict(self, values: Mapping[str, Sequence[Value]]) -> StrategySpace:
        """The same space with fewer values of some parameters: every configuration of it is one of this space.

        Values keep their order here. A parameter that loses its default is always written.

        Raises:
            FieldError: a parameter or a value is unknown, or a parameter would have no value left.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        for name, wanted in values.items():
            if name not in known:
                raise FieldError(f"restrict.{name}", "unknown parameter", hint=f"one of {list(known)}")
            for value in wanted:
                if not _holds(known[name].values, value):
                    hint = f"one of {list(known[name].values)}"
                    raise FieldError(f"restrict.{name}", f"{value!r} is not a value of it", hint=hint)
        return replace(
            self,
            parameters=tuple(
                _restricted(parameter, values[parameter.name]) if parameter.name in values else parameter
                for parameter in self.parameters
            ),
        )

    def require_part_of(self, whole: StrategySpace) -> None:
        """Accept a space of which every configuration is one of `whole`, written alike.

        Raises:
            FieldError: a parameter, value, default or condition differs, or something forbidden there is allowed.
        """
        known = {parameter.name: parameter for parameter in whole.parameters}
        if [parameter.name for parameter in self.parameters] != list(known):
            raise FieldError("space.parameters", "are not those of the whole space", hint=f"in order: {list(known)}")
        for parameter in self.parameters:
            field, original = f"space.parameters.{parameter.name}", known[parameter.name]
            for value in parameter.values:
                if not _holds(original.values, value):
                    raise FieldError(f"{field}.values", f"{value!r} is not a value of it")
            if replace(parameter, values=()) != replace(_restricted(original, parameter.values), values=()):
                raise FieldError(field, "differs from the whole space in more than its values")
        if self.conditions != whole.conditions:
            raise FieldError("space.conditions", "are not those of the whole space")
        missing = [rule for rule in whole.forbidden if rule not in self.forbidden]
        if missing:
            raise FieldError("space.forbidden", f"lacks a rule of the whole space: {missing[0].reason}")

    def to_json(self) -> str:
        """Canonical JSON, as carried in an agent's capabilities."""
        data = asdict(self)
        for parameter in data["parameters"]:
            if parameter["default"] is None:
                del parameter["default"]
        return json.dumps(data, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StrategySpace:
        """Parse what `to_json` wrote.

        Raises:
            FieldError: not JSON, or not a space; unknown keys are refused.
        """
        try:
            data = json.loads(text)
            for name in data:
                if name not in ("parameters", "conditions", "forbidden"):
                    raise FieldError("capabilities.space_json", f"unknown key {name!r}", code="space.malformed")
            return cls(
                parameters=tuple(Parameter(**{**p, "values": tuple(p["values"])}) for p in data["parameters"]),
                conditions=tuple(
                    Condition(**{**c, "parent_values": tuple(c["parent_values"])}) for c in data["conditions"]
                ),
                forbidden=tuple(
                    Forbidden(**{**f, "values": {name: tuple(allowed) for name, allowed in f["values"].items()}})
                    for f in data["forbidden"]
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise FieldError(
                "capabilities.space_json", f"not a strategy space: {error}", code="space.malformed"
            ) from error


class _Walk:
    """Goes through a space one parameter after another, the lossless ones last.

    A state maps the name of each parameter that exists so far to its value, defaults written out.
    """

    def __init__(self, space: StrategySpace) -> None:
        self.order = sorted(space.parameters, key=lambda parameter: not parameter.lossy)
        self.lossy_count = sum(parameter.lossy for parameter in self.order)
        place = {parameter.name: position for position, parameter in enumerate(self.order)}
        self._conditions = [[c for c in space.conditions if c.parameter == p.name] for p in self.order]
        self._rules: list[list[Forbidden]] = [[] for _ in self.order]
        last_use = dict.fromkeys(place, -1)
        self._impossible = False
        for rule in space.forbidden:
            if not rule.values:
                self._impossible = True
                continue
            decided = max(place[name] for name in rule.values)
            self._rules[decided].append(rule)
            for name in rule.values:
                last_use[name] = max(last_use[name], decided)
        for condition in space.conditions:
            last_use[condition.parent] = max(last_use[condition.parent], place[condition.parameter])
        self._remembered = [
            tuple(p.name for p in self.order[:position] if last_use[p.name] >= position)
            for position in range(len(self.order) + 1)
        ]

    def states(self, state: Mapping[str, Value], start: int, end: int) -> Iterator[dict[str, Value]]:
        """What `state` may grow into by the parameters start .. end - 1."""
        if start == end:
            if not self._impossible:
                yield dict(state)
            return
        for grown in self._grow(state, start):
            yield from self.states(grown, start + 1, end)

    def configuration(self, state: Mapping[str, Value]) -> Configuration:
        """The state as it is written: without defaults."""
        return Configuration(
            {p.name: state[p.name] for p in self.order if p.name in state and not p.is_default(state[p.name])}
        )

    def state_of(self, lossy_part: Mapping[str, Value]) -> dict[str, Value]:
        """The state after the lossy parameters; defaults are written out where they are active."""
        state = dict(lossy_part)
        for position, parameter in enumerate(self.order[: self.lossy_count]):
            if parameter.name not in state and parameter.default is not None and self._is_active(state, position):
                state[parameter.name] = parameter.default
        return state

    def count(self, *, lossy_only: bool) -> int:
        """By recursion over what later parameters still ask for, each such state once."""
        known: dict[tuple[int, tuple[Value | None, ...]], int] = {}

        def below(position: int, state: Mapping[str, Value]) -> int:
            if position == len(self.order):
                return int(not self._impossible)
            names = self._remembered[position]
            key = (position, tuple(state.get(name) for name in names))
            if key not in known:
                kept = {name: state[name] for name in names if name in state}
                total = sum(below(position + 1, grown) for grown in self._grow(kept, position))
                known[key] = min(total, 1) if lossy_only and position >= self.lossy_count else total
            return known[key]

        return below(0, {})

    def _grow(self, state: Mapping[str, Value], position: int) -> Iterator[Mapping[str, Value]]:
        parameter = self.order[position]
        if not self._is_active(state, position):
            yield state
            return
        for value in parameter.values:
            grown = {**state, parameter.name: value}
            if not any(
                all(grown.get(name) in allowed for name, allowed in rule.values.items())
                for rule in self._rules[position]
            ):
                yield grown

    def _is_active(self, state: Mapping[str, Value], position: int) -> bool:
        return all(state.get(c.parent) in c.parent_values for c in self._conditions[position])


def _restricted(parameter: Parameter, wanted: Sequence[Value]) -> Parameter:
    kept = tuple(value for value in parameter.values if _holds(wanted, value))
    keeps_default = parameter.default is not None and _holds(kept, parameter.default)
    return replace(parameter, values=kept, default=parameter.default if keeps_default else None)


def _same(a: Value, b: Value) -> bool:
    return a == b and type(a) is type(b)


def _holds(values: Sequence[Value], value: Any) -> bool:
    return any(_same(value, one) for one in values)
