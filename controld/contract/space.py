"""A strategy space as data: parameters, when each is active, and what combinations are forbidden.

The agent advertises it, the daemon validates and enumerates it; neither knows the other's code.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

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
    """

    name: str
    values: tuple[Value, ...]
    ordered: bool = False
    lossy: bool = True


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

    Parameters are listed parents before children.
    """

    parameters: tuple[Parameter, ...]
    conditions: tuple[Condition, ...] = ()
    forbidden: tuple[Forbidden, ...] = ()

    def __post_init__(self) -> None:
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) != len(names):
            raise FieldError("space.parameters", "a name occurs twice")
        for parameter in self.parameters:
            if not parameter.values:
                raise FieldError(f"space.parameters.{parameter.name}", "has no values")
        for condition in self.conditions:
            if condition.parameter not in names or condition.parent not in names:
                raise FieldError(f"space.conditions.{condition.parameter}", "names an unknown parameter")
            if names.index(condition.parent) >= names.index(condition.parameter):
                raise FieldError(f"space.conditions.{condition.parameter}", "stands before its parent")

    def is_active(self, name: str, values: Mapping[str, Value]) -> bool:
        """Whether `name` exists, given the values of the parameters before it."""
        return all(
            values.get(condition.parent) in condition.parent_values
            for condition in self.conditions
            if condition.parameter == name
        )

    def validate(self, configuration: Mapping[str, Value]) -> None:
        """Accept exactly the points of the space.

        Raises:
            FieldError: a parameter is unknown, missing, inactive or out of range, or the combination is forbidden.
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
                raise FieldError(field, "is missing", code="configuration.missing")
            value = configuration[parameter.name]
            if not any(value == allowed and type(value) is type(allowed) for allowed in parameter.values):
                raise FieldError(
                    field,
                    f"{value!r} is not allowed",
                    hint=f"one of {list(parameter.values)}",
                    code="configuration.value",
                )
        for rule in self.forbidden:
            if all(configuration.get(name) in values for name, values in rule.values.items()):
                raise FieldError("configuration", rule.reason, code="configuration.forbidden")

    def enumerate(self, *, lossy_only: bool = False) -> Iterator[Configuration]:
        """Every valid configuration once, in a fixed order.

        Args:
            lossy_only: leave the lossless parameters out, so that each lossy part comes once.
        """
        seen: set[str] = set()
        for values in self._extend({}, 0):
            if lossy_only:
                values = {p.name: values[p.name] for p in self.parameters if p.lossy and p.name in values}
            configuration = Configuration(values)
            if configuration.canonical_json not in seen:
                seen.add(configuration.canonical_json)
                yield configuration

    def _extend(self, values: dict[str, Value], position: int) -> Iterator[dict[str, Value]]:
        if position == len(self.parameters):
            forbidden = any(
                all(values.get(name) in allowed for name, allowed in rule.values.items()) for rule in self.forbidden
            )
            if not forbidden:
                yield values
            return
        parameter = self.parameters[position]
        if not self.is_active(parameter.name, values):
            yield from self._extend(values, position + 1)
            return
        for value in parameter.values:
            yield from self._extend({**values, parameter.name: value}, position + 1)

    def coders(self, lossy_part: Mapping[str, Value]) -> tuple[Configuration, ...]:
        """All full configurations of one lossy part."""
        lossless = [parameter for parameter in self.parameters if not parameter.lossy]
        result = []
        for choice in itertools.product(*(parameter.values for parameter in lossless)):
            configuration = Configuration(
                {**lossy_part, **{p.name: value for p, value in zip(lossless, choice, strict=True)}}
            )
            try:
                self.validate(configuration)
            except FieldError:
                continue
            result.append(configuration)
        return tuple(result)

    def to_json(self) -> str:
        """Canonical JSON, as carried in an agent's capabilities."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> StrategySpace:
        """Parse what `to_json` wrote.

        Raises:
            FieldError: not JSON, or not a space; unknown keys are refused.
        """
        try:
            data = json.loads(text)
            return cls(
                parameters=tuple(Parameter(**{**p, "values": tuple(p["values"])}) for p in data["parameters"]),
                conditions=tuple(
                    Condition(**{**c, "parent_values": tuple(c["parent_values"])}) for c in data["conditions"]
                ),
                forbidden=tuple(
                    Forbidden(values={k: tuple(v) for k, v in f["values"].items()}, reason=f["reason"])
                    for f in data["forbidden"]
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FieldError(
                "capabilities.space_json", f"not a strategy space: {error}", code="space.malformed"
            ) from error
