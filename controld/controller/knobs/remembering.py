"""A knob that predicts nothing twice.

Classes of one workload ask for the same arms at the same points, and every sweep over the classes asks again, under
another load. What does not depend on the load is predicted once and shared. One lives as long as one table is being
decided, no longer: a prediction of a whole grid takes megabytes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from controld.controller.knobs.base import Array, AtRest, Context, Knob, Prediction, Stage, StageModels


class Remembering:
    """The same answers as another knob's. Nobody may write into them."""

    def __init__(self, knob: Knob) -> None:
        self._knob = knob
        self._at_rest: dict[bytes, AtRest] = {}
        self._alone: dict[tuple[bytes, bytes, float], Prediction] = {}

    @property
    def name(self) -> str:
        return self._knob.name

    @property
    def work_stages(self) -> tuple[str, ...]:
        return self._knob.work_stages

    @property
    def switch_cost_s(self) -> float:
        return self._knob.switch_cost_s

    def to_document(self) -> dict[str, Any]:
        """The other knob's parameters."""
        return self._knob.to_document()

    def at_rest(self, models: StageModels, factors: Array, context: Context) -> AtRest:
        """See `Knob.at_rest`."""
        key = _key(models, factors, context)
        if key not in self._at_rest:
            self._at_rest[key] = self._knob.at_rest(models, factors, context)
        return self._at_rest[key]

    def predict(
        self,
        models: StageModels,
        factors: Array,
        context: Context,
        *,
        share: float = 1.0,
        other_work: Array | None = None,
    ) -> Prediction:
        """See `Knob.predict`."""
        if other_work is not None:
            return self.at_rest(models, factors, context).under_load(context, share, other_work)
        key = (_key(models, factors, context), context.loads.tobytes(), share)
        if key not in self._alone:
            self._alone[key] = self.at_rest(models, factors, context).under_load(context, share, None)
        return self._alone[key]

    def break_even_raw_s(
        self, models: StageModels, factors: Array, sizes_bytes: Array, *, margin: float
    ) -> Array | None:
        """See `Knob.break_even_raw_s`."""
        return self._knob.break_even_raw_s(models, factors, sizes_bytes, margin=margin)

    def stage_seconds(
        self, models: StageModels, arm: int, *, raw_bytes: float, wire_bytes: float, bandwidth: float
    ) -> dict[Stage, float]:
        """See `Knob.stage_seconds`."""
        return self._knob.stage_seconds(models, arm, raw_bytes=raw_bytes, wire_bytes=wire_bytes, bandwidth=bandwidth)


def _key(models: StageModels, factors: Array, context: Context) -> bytes:
    """The numbers, and how many of them there are in each array, for the same numbers may be cut otherwise."""
    parts = [getattr(models, each.name) for each in fields(models)]
    parts += [factors, context.sizes_bytes, context.bandwidths_bytes_per_s]
    return b"".join([*(len(part).to_bytes(4) for part in parts), *(part.tobytes() for part in parts)])
