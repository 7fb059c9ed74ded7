"""What the reference engine offers here: its space without the precisions that fail their self-test."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import torch

from controld.contract.configuration import Configuration
from controld.contract.space import Forbidden, StrategySpace
from dataplanes.longlive import settings
from dataplanes.longlive.engine import EngineError
from dataplanes.longlive.linear.backend import Offer
from dataplanes.longlive.linear.probing import Offers, ProbeSize, probe_all
from dataplanes.longlive.reference.setting import LEFT_OUT, SPACE, Setting
from dataplanes.longlive.reference.stored_linear import BACKEND

_SIZE: Final = ProbeSize(rows=16, inputs=64, outputs=32, repeats=1)
"""Small: an emulated back end's speed decides nothing."""


@dataclass(frozen=True, slots=True)
class EngineOffer:
    """The space, back ends and what was left out, as in an engine's capabilities."""

    space: StrategySpace
    backends: dict[str, str]
    left_out: dict[str, str]

    def require(self, configuration: Configuration) -> Setting:
        """Read a setting.

        Raises:
            EngineError: it is none of the space, or its precision failed its self-test; says why.
        """
        setting = Setting.of(configuration)
        reason = self.left_out.get(_named(setting.precision.setting_values))
        if reason is not None:
            raise EngineError(f"{settings.WEIGHTS}: {reason}", hint="another precision")
        return setting


@cache
def find_offer() -> EngineOffer:
    """Probe the back end once in this process."""
    return offer_of(probe_all(torch.device("cpu"), backends=[BACKEND], size=_SIZE))


def offer_of(found: Offers) -> EngineOffer:
    """What probing leaves of the space."""
    failed = [probe for probe in found.probes if probe.offer is Offer.NOTHING]
    rules = tuple(
        Forbidden(
            values={name: (value,) for name, value in probe.precision.setting_values.items()}, reason=probe.reason
        )
        for probe in failed
    )
    left_out = {_named(probe.precision.setting_values): f"{probe.backend}: {probe.reason}" for probe in failed}
    space = replace(SPACE, forbidden=(*SPACE.forbidden, *rules)) if rules else SPACE
    return EngineOffer(space, found.offered, {**LEFT_OUT, **left_out})


def _named(values: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
