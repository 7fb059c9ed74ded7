"""The reference engine's space of settings, and one of them in the engine's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from controld.contract.video import Transition
from dataplanes.longlive import settings
from dataplanes.longlive.engine import EngineError
from dataplanes.longlive.linear.precision import LinearPrecision
from dataplanes.longlive.reference.decoder import VaeMode
from dataplanes.longlive.reference.kv_tensor import KvFormat, KvRule
from dataplanes.longlive.reference.rolling_cache import CacheLimits
from dataplanes.numerics.nvfp4 import BlockRule

CHUNK_LATENTS: Final = 3

_NO_ROOM = "leaves the chunk before no place in the window, without which motion cannot go on"

SPACE: Final = StrategySpace(
    parameters=(
        Parameter(name=settings.WEIGHTS, values=("bf16", "fp8", "nvfp4")),
        Parameter(name=settings.ACTIVATIONS, values=("bf16", "fp8", "nvfp4")),
        Parameter(name=settings.BLOCK_RULE, values=("plain", "4over6")),
        Parameter(name=settings.KV, values=("bf16", "fp8", "nvfp4")),
        Parameter(name=settings.KV_SMOOTH, values=("none", "token_mean")),
        Parameter(name=settings.STEPS, values=(1, 2, 4, 8), ordered=True),
        Parameter(name=settings.WINDOW, values=(6, 9, 15), ordered=True),
        Parameter(name=settings.SINK, values=(0, 3), ordered=True),
        Parameter(name=settings.MULTI_SHOT, values=("yes", "no")),
        Parameter(name=settings.VAE, values=("batch", "stream", "async"), lossy=False),
        Parameter(name=settings.RANKS, values=(1, 2, 4), ordered=True, lossy=False),
    ),
    conditions=(
        Condition(parameter=settings.BLOCK_RULE, parent=settings.WEIGHTS, parent_values=("nvfp4",)),
        Condition(parameter=settings.KV_SMOOTH, parent=settings.KV, parent_values=("fp8", "nvfp4")),
    ),
    forbidden=(
        Forbidden(
            values={settings.WEIGHTS: ("bf16",), settings.ACTIVATIONS: ("fp8", "nvfp4")},
            reason="activations below bf16 need weights of the same precision",
        ),
        Forbidden(
            values={settings.WEIGHTS: ("fp8",), settings.ACTIVATIONS: ("nvfp4",)},
            reason="activations below bf16 need weights of the same precision",
        ),
        Forbidden(
            values={settings.WEIGHTS: ("nvfp4",), settings.ACTIVATIONS: ("fp8",)},
            reason="activations below bf16 need weights of the same precision",
        ),
        Forbidden(values={settings.WINDOW: (6,), settings.SINK: (3,)}, reason=f"a sink {_NO_ROOM}"),
        Forbidden(values={settings.WINDOW: (6,), settings.MULTI_SHOT: ("yes",)}, reason=f"a shot's sink {_NO_ROOM}"),
        Forbidden(
            values={settings.WINDOW: (9,), settings.SINK: (3,), settings.MULTI_SHOT: ("yes",)},
            reason=f"two sinks: {_NO_ROOM}",
        ),
    ),
)

FULL: Final = Configuration(
    {
        settings.WEIGHTS: "bf16",
        settings.ACTIVATIONS: "bf16",
        settings.KV: "bf16",
        settings.STEPS: 4,
        settings.WINDOW: 15,
        settings.SINK: 3,
        settings.MULTI_SHOT: "yes",
        settings.VAE: "async",
        settings.RANKS: 1,
    }
)
"""Everything at its best with the usual four steps."""

LEFT_OUT: Final = {
    "vae=pipeline": "needs a second device",
    "compile=yes": "the CPU engine is small enough without",
    "weights=nvfp4, activations=fp8": "no back end runs the pair",
}

TRANSITIONS: Final = {
    settings.WEIGHTS: Transition.RELOAD,
    settings.ACTIVATIONS: Transition.CHUNK,
    settings.BLOCK_RULE: Transition.RELOAD,
    settings.KV: Transition.KV_REBUILD,
    settings.KV_SMOOTH: Transition.KV_REBUILD,
    settings.STEPS: Transition.CHUNK,
    settings.WINDOW: Transition.CHUNK,
    settings.SINK: Transition.CHUNK,
    settings.MULTI_SHOT: Transition.CHUNK,
    settings.VAE: Transition.CHUNK,
    settings.RANKS: Transition.RESTART,
}
"""How far each parameter reaches; weights whose variant is resident reach only the chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A configuration of `SPACE`.

    Args:
        configuration: as it was given.
        precision: of the blocks' linear layers.
        kv: how keys and values are stored.
        limits: what attention sees.
        steps: denoising steps.
        vae: when latents are decoded.
        ranks: of sequence parallelism.
    """

    configuration: Configuration
    precision: LinearPrecision
    kv: KvRule
    limits: CacheLimits
    steps: int
    vae: VaeMode
    ranks: int

    @classmethod
    def of(cls, configuration: Configuration) -> Setting:
        """Read a configuration.

        Raises:
            EngineError: it is none of the space; says which parameter and why.
        """
        try:
            SPACE.validate(configuration)
            precision = LinearPrecision.of_setting(configuration)
        except FieldError as error:
            raise EngineError(error.message, hint=error.hint) from error
        whole = {name: _whole(configuration, name) for name in _WHOLE}
        return cls(
            configuration=configuration,
            precision=precision,
            kv=KvRule(
                format=KvFormat(configuration[settings.KV]),
                block_rule=BlockRule(configuration.get(settings.BLOCK_RULE, "plain")),
                smooth=configuration.get(settings.KV_SMOOTH) == "token_mean",
            ),
            limits=CacheLimits(
                window=whole[settings.WINDOW] // CHUNK_LATENTS,
                sink=whole[settings.SINK] // CHUNK_LATENTS,
                pins_shot=configuration[settings.MULTI_SHOT] == "yes",
            ),
            steps=whole[settings.STEPS],
            vae=VaeMode(configuration[settings.VAE]),
            ranks=whole[settings.RANKS],
        )


_WHOLE = (settings.STEPS, settings.WINDOW, settings.SINK, settings.RANKS)


def _whole(configuration: Mapping[str, object], name: str) -> int:
    value = configuration[name]
    assert isinstance(value, int)
    return value


def reach(current: Setting, wanted: Setting, *, is_resident: bool) -> Transition:
    """How far a change reaches: that of the parameter that reaches farthest.

    Args:
        current: in force.
        wanted: to be.
        is_resident: whether the wanted weights are there already.
    """
    found = Transition.NONE
    for name, transition in TRANSITIONS.items():
        if current.configuration.get(name) == wanted.configuration.get(name):
            continue
        if name in (settings.WEIGHTS, settings.BLOCK_RULE) and is_resident:
            transition = Transition.CHUNK
        found = max(found, transition)
    if found < Transition.KV_REBUILD and current.kv != wanted.kv:
        # The block rule is the cache's, too.
        found = Transition.KV_REBUILD
    return found
