"""What somebody asks of a study."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, TypeVar

from controld.contract.configuration import Value
from controld.contract.errors import FieldError
from controld.contract.quantity import parse_duration_s
from controld.profiling.grid import GridSize

_MAX_LENGTHS = 8
_MAX_PROMPT_TOKENS = 1_000_000
_MAX_SEGMENTS = 1_000
_MAX_CONTINUATION_TOKENS = 1_000
_MAX_TRIALS = 100_000
_MAX_SEED = 2**31 - 1
_MAX_RESTRICTED_VALUES = 1_000
_MAX_TEXT_CHARACTERS = 256
# As policies name things: a workload is found by its name in the worker's folder of texts.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_Kind = TypeVar("_Kind", bound=StrEnum)


class Method(StrEnum):
    """How trials are chosen. `GRID`: a curated grid, all at once. `SEARCH`: one after another, by what came before."""

    GRID = "grid"
    SEARCH = "search"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyDefaults:
    """What a study of one kind of plane has where the request is silent.

    Args:
        lengths: see `StudyRequest`.
        segments_of_grid, segments_of_search: the first fidelity.
        max_segments: of a search.
        continuation_tokens: 0: such a plane has none.
        max_length: the largest length that may be asked for.
    """

    lengths: tuple[int, ...]
    segments_of_grid: int
    segments_of_search: int
    max_segments: int
    continuation_tokens: int
    max_length: int


KV_DEFAULTS = StudyDefaults(
    lengths=(256, 1024, 2048),
    segments_of_grid=8,
    segments_of_search=2,
    max_segments=8,
    continuation_tokens=128,
    max_length=_MAX_PROMPT_TOKENS,
)
VIDEO_DEFAULTS = StudyDefaults(
    lengths=(8,), segments_of_grid=12, segments_of_search=8, max_segments=32, continuation_tokens=0, max_length=1_000
)
"""Losses of single clips scatter as widely as settings differ, so a clip or two say nothing; and in a clip that fits
into the window nothing was ever forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a search has cost enough: exactly one of the two is given.

    Args:
        trials: how many trials, whatever comes of them.
        seconds: of measuring, summed over the workers, attempts that failed included; pauses and a daemon that is
            away cost nothing.
    """

    trials: int | None = None
    seconds: float | None = None

    @classmethod
    def from_json(cls, value: object) -> Budget:
        """`200` is trials, `"30min"` a duration.

        Raises:
            FieldError: it is neither.
        """
        if isinstance(value, str):
            seconds = parse_duration_s(value, field="budget")
            if seconds <= 0:
                raise FieldError("budget", f"{value!r} is no time", hint="as 30min, or a number of trials, as 200")
            return cls(seconds=seconds)
        _require_count("budget", value, _MAX_TRIALS)
        assert isinstance(value, int)
        return cls(trials=value)

    def to_json(self) -> int | str:
        """What `from_json` reads."""
        return self.trials if self.trials is not None else f"{self.seconds!r}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRequest:
    """What somebody asks for.

    Args:
        plane: kind of data plane.
        workload: whose texts are measured on and whose profiles these become.
        method: how trials are chosen.
        grid: which curated grid; of a grid study only.
        budget: of a search only, and needed there.
        restrict: fewer values of some parameters, by name; of a search only.
        seed: of a search's start points and ties.
        segments: per length, in a search of the first trial of a part.
        max_segments: to how many a search may take a part that is worth it; of a search only.
        lengths: prompt lengths in tokens; of a video plane, clip lengths in chunks.
        deployment: only profilers of this deployment; empty: any.
        model: only this model fingerprint; empty: the one that the profilers have.
        continuation_tokens: over how many tokens the loss is meant; 0: of clips.
    """

    plane: str
    workload: str
    method: Method = Method.GRID
    grid: GridSize = GridSize.FULL
    budget: Budget | None = None
    restrict: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    seed: int = 0
    segments: int = KV_DEFAULTS.segments_of_grid
    max_segments: int = KV_DEFAULTS.max_segments
    lengths: tuple[int, ...] = KV_DEFAULTS.lengths
    deployment: str = ""
    model: str = ""
    continuation_tokens: int = KV_DEFAULTS.continuation_tokens

    @classmethod
    def from_json(cls, body: Mapping[str, Any], defaults: StudyDefaults = KV_DEFAULTS) -> StudyRequest:
        """Read a request strictly.

        Args:
            body: plane and workload at least.
            defaults: of the plane's kind.

        Raises:
            FieldError: a field is unknown, missing, out of range, or of the other method; it is named.
        """
        known = {one.name for one in fields(cls)}
        for name in body:
            if name not in known:
                raise FieldError(name, "unknown field", hint=f"one of {sorted(known)}")
        for name in ("plane", "workload"):
            _require_name(name, body.get(name))
        for name in ("deployment", "model"):
            if name in body:
                _require_text(name, body[name])
        values = dict(body)
        method = values["method"] = _choice("method", body.get("method", Method.GRID.value), Method)
        _require_fields_of(method, body)
        if "grid" in values:
            values["grid"] = _choice("grid", values["grid"], GridSize)
        if "budget" in values:
            values["budget"] = Budget.from_json(values["budget"])
        if "restrict" in values:
            values["restrict"] = _restriction(values["restrict"])
        if "seed" in values:
            _require_count("seed", values["seed"], _MAX_SEED, smallest=0)
        is_search = method is Method.SEARCH
        values.setdefault("segments", defaults.segments_of_search if is_search else defaults.segments_of_grid)
        for name in ("segments", "max_segments"):
            if name in values:
                _require_count(name, values[name], _MAX_SEGMENTS)
        if "continuation_tokens" in values:
            if not defaults.continuation_tokens:
                raise FieldError("continuation_tokens", "clips have none")
            _require_count("continuation_tokens", values["continuation_tokens"], _MAX_CONTINUATION_TOKENS)
        values.setdefault("continuation_tokens", defaults.continuation_tokens)
        if is_search:
            most = values.setdefault("max_segments", max(values["segments"], defaults.max_segments))
            if most < values["segments"]:
                raise FieldError("max_segments", f"{most} is below segments ({values['segments']})")
        values["lengths"] = _lengths(values["lengths"], defaults) if "lengths" in values else defaults.lengths
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        body: dict[str, Any] = {"plane": self.plane, "workload": self.workload, "method": self.method.value}
        if self.method is Method.GRID:
            body["grid"] = self.grid.value
        else:
            assert self.budget is not None
            body["budget"] = self.budget.to_json()
            body["restrict"] = {name: list(values) for name, values in self.restrict.items()}
            body["seed"] = self.seed
            body["max_segments"] = self.max_segments
        if self.continuation_tokens:
            body["continuation_tokens"] = self.continuation_tokens
        return {
            **body,
            "segments": self.segments,
            "lengths": list(self.lengths),
            "deployment": self.deployment,
            "model": self.model,
        }


def _lengths(value: object, defaults: StudyDefaults) -> tuple[int, ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= _MAX_LENGTHS:
        raise FieldError("lengths", f"must be a list of 1 to {_MAX_LENGTHS} lengths")
    for length in value:
        _require_count("lengths", length, defaults.max_length)
    return tuple(sorted(set(value)))


def _require_fields_of(method: Method, body: Mapping[str, Any]) -> None:
    foreign = ("budget", "restrict", "seed", "max_segments") if method is Method.GRID else ("grid",)
    for name in foreign:
        if name in body:
            other = Method.SEARCH if method is Method.GRID else Method.GRID
            raise FieldError(name, f"does not belong to a {method} study", hint=f"method: {other}")
    if method is Method.SEARCH and "budget" not in body:
        raise FieldError("budget", "is missing", hint="a number of trials, as 200, or of measuring time, as 30min")


def _choice(name: str, value: object, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, str) or value not in [one.value for one in kind]:
        raise FieldError(name, f"{value!r} is no {name}", hint=f"one of {[one.value for one in kind]}")
    return kind(value)


def _restriction(value: object) -> dict[str, tuple[Value, ...]]:
    if not isinstance(value, dict):
        raise FieldError("restrict", "must map parameters to lists of values")
    for name, allowed in value.items():
        if not isinstance(allowed, list) or not allowed or not all(isinstance(v, str | int | float) for v in allowed):
            raise FieldError(f"restrict.{name}", "must be a list of values")
        if len(allowed) > _MAX_RESTRICTED_VALUES:
            raise FieldError(f"restrict.{name}", f"has {len(allowed)} values, more than {_MAX_RESTRICTED_VALUES}")
        if len(set(allowed)) < len(allowed):
            twice = next(v for index, v in enumerate(allowed) if v in allowed[:index])
            raise FieldError(f"restrict.{name}", f"{twice!r} is there twice")
    return {name: tuple(allowed) for name, allowed in value.items()}


def _require_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        hint = "1 to 63 letters, digits, '_', '.' and '-', the first a letter or digit"
        raise FieldError(name, "must be a name", hint=hint)


def _require_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise FieldError(name, f"{value!r} is not text")
    if len(value) > _MAX_TEXT_CHARACTERS:
        raise FieldError(name, f"has {len(value)} characters, more than {_MAX_TEXT_CHARACTERS}")
    if not value.isprintable():
        raise FieldError(name, f"{value!r} is not a text of printable characters")


def _require_count(name: str, value: object, largest: int, smallest: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
        raise FieldError(name, f"{value!r} is not a whole number from {smallest} to {largest}")
