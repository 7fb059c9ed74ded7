"""A configuration: one point of a strategy space, with an identity that both sides compute alike."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from controld.contract.errors import FieldError

Value = str | int | float | bool

CODER_PARAMETER = "code"
"""The one lossless parameter of a KV configuration; everything else is its lossy part."""


class Configuration(Mapping[str, Value]):
    """An immutable mapping of parameter name to value; only active parameters are present.

    The canonical form is JSON with sorted keys and no spaces, so equal configurations have equal ids in every
    process. Integral floats are refused rather than turned into integers: `12` and `12.0` must not have two ids.

    Raises:
        FieldError: a name is not a lower-snake-case string, or a value is not a string, integer, boolean or finite
            non-integral float.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if not isinstance(name, str) or not name.isidentifier() or name != name.lower():
                raise FieldError(f"configuration.{name}", "a parameter name is lower snake case")
            if isinstance(value, bool | int | str):
                continue
            if not isinstance(value, float) or not math.isfinite(value) or value.is_integer():
                raise FieldError(
                    f"configuration.{name}",
                    f"{value!r} is not a string, integer, boolean or finite non-integral number",
                    hint="write whole numbers as integers",
                )
        self._values = dict(sorted(values.items()))

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self.canonical_json)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self.canonical_json == other.canonical_json

    def __repr__(self) -> str:
        return f"Configuration({self.canonical_json})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Configuration, (dict(self._values),)

    @cached_property
    def canonical_json(self) -> str:
        """Sorted keys, no spaces, ASCII."""
        return json.dumps(self._values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @cached_property
    def config_id(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the canonical JSON."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()[:16]

    @cached_property
    def lossy_part(self) -> Configuration:
        """The configuration without its coder: what decides quality."""
        return Configuration({name: value for name, value in self._values.items() if name != CODER_PARAMETER})

    @property
    def lossy_id(self) -> str:
        """The id of the lossy part."""
        return self.lossy_part.config_id

    def with_coder(self, code: str) -> Configuration:
        """The same lossy part under another coder."""
        return Configuration({**self._values, CODER_PARAMETER: code})

    @classmethod
    def from_json(cls, text: str) -> Configuration:
        """Parse canonical (or any equivalent) JSON.

        Raises:
            FieldError: the text is not a flat JSON object of allowed values.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise FieldError("configuration", f"not JSON: {error}") from error
        if not isinstance(values, dict):
            raise FieldError("configuration", "not a JSON object")
        return cls(values)
