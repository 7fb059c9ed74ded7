"""What one deployment can run on one machine: the space of settings, and why a value is not in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final

from controld.contract.configuration import Configuration, Value
from controld.contract.errors import FieldError
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from controld.contract.video import Transition
from dataplanes.longlive import settings as names
from dataplanes.longlive.adapter.deployment import Checkpoint, Deployment, Format
from dataplanes.longlive.adapter.hardware import (
    FP8_CAPABILITY,
    NVFP4_CAPABILITY,
    W4A4,
    W4A4_FOUR_OVER_SIX,
    W8A8,
    Hardware,
)
from dataplanes.longlive.engine import EngineError

PLAIN: Final = "plain"
FOUR_OVER_SIX: Final = "4over6"
SEQUENCE_DEGREES: Final = (1, 2, 4, 8)
"""Divisors of both the 24 heads and the 8 latent frames of a chunk."""

_CHOICES: Final[Mapping[str, tuple[Value, ...]]] = {
    names.WEIGHTS: ("bf16", "fp8", "nvfp4"),
    names.ACTIVATIONS: ("bf16", "fp8", "nvfp4"),
    names.BLOCK_RULE: (PLAIN, FOUR_OVER_SIX),
    names.KV: ("bf16", "fp8", "nvfp4"),
    names.MULTI_SHOT: ("no", "yes"),
    names.VAE: ("batch", "stream", "async", "pipeline"),
    names.RANKS: SEQUENCE_DEGREES,
    names.COMPILE: ("no", "yes"),
}
_ORDERED: Final = (names.WEIGHTS, names.ACTIVATIONS, names.KV, names.STEPS, names.WINDOW, names.SINK)


@dataclass(frozen=True, slots=True)
class Route:
    """How one precision of the weights is had.

    Args:
        backend: torch, torchao_fp8, te or fouroversix.
        checkpoint: the file that it begins with.
        scale_rule: of FourOverSix: `mse` takes the better of 4 and 6, `static_6` is plain NVFP4.
    """

    backend: str
    checkpoint: Checkpoint
    scale_rule: str = "static_6"


@dataclass(frozen=True, slots=True)
class Offer:
    """The space with what was left out of it, and why; `transitions` names each parameter's farthest reach."""

    space: StrategySpace
    left_out: Mapping[str, str]
    transitions: Mapping[str, Transition]
    backends: Mapping[str, str]


def route(deployment: Deployment, hardware: Hardware, *, weights: str, rule: str, steps: int) -> Route | str:
    """The back end and checkpoint for a precision, or why there is none."""
    fitting = [one for one in deployment.checkpoints if steps in one.steps]
    if not fitting:
        return f"no checkpoint is distilled for {steps} steps"
    of = {one.format: one for one in reversed(fitting)}
    whole = of.get(Format.BF16)
    if weights == "bf16":
        return Route("torch", whole) if whole else f"no bf16 checkpoint for {steps} steps"
    if weights == "fp8":
        if not hardware.has("torchao"):
            return "torchao is not installed"
        if (unfit := hardware.unfit.get(("torchao_fp8", W8A8))) is not None:
            return f"torchao_fp8: {unfit}"
        return Route("torchao_fp8", whole) if whole else f"no bf16 checkpoint for {steps} steps"
    return _nvfp4_route(of, hardware, rule=rule, steps=steps)


def _nvfp4_route(of: Mapping[Format, Checkpoint], hardware: Hardware, *, rule: str, steps: int) -> Route | str:
    merged = of.get(Format.TE) or of.get(Format.BF16)
    unfit = ""
    if rule == PLAIN and merged and hardware.has("transformer_engine"):
        if ("te", W4A4) not in hardware.unfit:
            return Route("te", merged)
        unfit = f"te: {hardware.unfit['te', W4A4]}"
    precision = W4A4_FOUR_OVER_SIX if rule == FOUR_OVER_SIX else W4A4
    if hardware.has("fouroversix") and ("fouroversix", precision) in hardware.unfit:
        return "; ".join(filter(None, (unfit, f"fouroversix: {hardware.unfit['fouroversix', precision]}")))
    if not hardware.has("fouroversix"):
        return unfit or (
            "neither transformer_engine nor fouroversix is installed"
            if rule == PLAIN
            else ("the 4over6 rule needs fouroversix, which is not installed")
        )
    if rule == FOUR_OVER_SIX and Format.FOUROVERSIX in of:
        return Route("fouroversix", of[Format.FOUROVERSIX], "mse")
    if merged is None:
        return f"the only NVFP4 checkpoint for {steps} steps has the 4over6 rule"
    return Route("fouroversix", merged, "mse" if rule == FOUR_OVER_SIX else "static_6")


def _too_old(hardware: Hardware, what: str, needed: tuple[int, int]) -> str:
    if hardware.compute_capability is None:
        return hardware.name
    have = ".".join(map(str, hardware.compute_capability))
    return f"{what} needs compute capability {needed[0]}.{needed[1]}, {hardware.name} has {have}"


def _out_of_hardware(hardware: Hardware, run_vae_device: str | None) -> Iterator[tuple[str, Value, str]]:
    if not hardware.reaches(NVFP4_CAPABILITY):
        reason = _too_old(hardware, "NVFP4", NVFP4_CAPABILITY)
        yield from ((name, "nvfp4", reason) for name in (names.WEIGHTS, names.ACTIVATIONS, names.KV))
        yield from ((names.BLOCK_RULE, rule, reason) for rule in (PLAIN, FOUR_OVER_SIX))
    if not hardware.reaches(FP8_CAPABILITY):
        reason = _too_old(hardware, "FP8", FP8_CAPABILITY)
        yield from ((name, "fp8", reason) for name in (names.WEIGHTS, names.ACTIVATIONS))
    yield names.KV, "fp8", "LongLive has no FP8 cache"
    for degree in SEQUENCE_DEGREES[1:]:
        yield (
            names.RANKS,
            degree,
            "sequence parallelism is a torchrun world of its own (inference_sp.py), which this adapter does not steer, "
            "and LongLive refuses a quantised cache in it",
        )
    if not run_vae_device:
        yield names.VAE, "pipeline", "vae_device is not set in LongLive's YAML"


def _left_out(deployment: Deployment, hardware: Hardware) -> dict[str, str]:
    if not hardware.device:
        every = [*_CHOICES.items(), (names.STEPS, _all_steps(deployment))]
        every += [(names.WINDOW, deployment.windows), (names.SINK, deployment.sinks)]
        return {
            f"{name}={value}": f"{hardware.name}: LongLive runs on CUDA only" for name, some in every for value in some
        }
    out = {f"{name}={value}": reason for name, value, reason in _out_of_hardware(hardware, deployment.run.vae_device)}
    for steps in (2, 4):
        if steps not in _all_steps(deployment):
            out[f"{names.STEPS}={steps}"] = f"no checkpoint is distilled for {steps} steps"
    for weights in ("bf16", "fp8", "nvfp4"):
        rules = (PLAIN, FOUR_OVER_SIX) if weights == "nvfp4" else (PLAIN,)
        failed = {}
        for rule in rules:
            found = [
                route(deployment, hardware, weights=weights, rule=rule, steps=steps) for steps in _all_steps(deployment)
            ]
            if all(isinstance(one, str) for one in found):
                failed[rule] = str(found[0])
                if weights == "nvfp4":
                    out.setdefault(f"{names.BLOCK_RULE}={rule}", failed[rule])
        if len(failed) == len(rules):
            for name in (names.WEIGHTS, names.ACTIVATIONS):
                out.setdefault(f"{name}={weights}", failed[PLAIN])
    return out


def _all_steps(deployment: Deployment) -> tuple[int, ...]:
    return tuple(sorted({steps for one in deployment.checkpoints for steps in one.steps}))


def make_offer(deployment: Deployment, hardware: Hardware) -> Offer:
    """The space of a deployment on a machine; without a device, or without weights, it is empty."""
    left_out = _left_out(deployment, hardware)
    choices = {
        **_CHOICES,
        names.STEPS: _all_steps(deployment),
        names.WINDOW: deployment.windows,
        names.SINK: deployment.sinks,
    }
    kept = {name: tuple(value for value in choices[name] if f"{name}={value}" not in left_out) for name in _ORDER}
    if not kept[names.BLOCK_RULE]:
        del kept[names.BLOCK_RULE]
    if not all(kept.values()):
        return Offer(StrategySpace(parameters=()), left_out, {}, {})
    parameters = tuple(
        Parameter(name=name, values=values, ordered=name in _ORDERED, lossy=name not in names.LOSSLESS)
        for name, values in kept.items()
    )
    rule = Condition(parameter=names.BLOCK_RULE, parent=names.WEIGHTS, parent_values=("nvfp4",))
    space = StrategySpace(
        parameters=parameters,
        conditions=(rule,) if names.BLOCK_RULE in kept else (),
        forbidden=tuple(_forbidden(deployment, hardware, kept)),
    )
    return Offer(space, left_out, _reach(deployment, hardware, kept), _backends(deployment, hardware, kept))


_ORDER: Final = (
    names.WEIGHTS,
    names.ACTIVATIONS,
    names.BLOCK_RULE,
    names.KV,
    names.STEPS,
    names.WINDOW,
    names.SINK,
    names.MULTI_SHOT,
    names.VAE,
    names.RANKS,
    names.COMPILE,
)


def _forbidden(
    deployment: Deployment, hardware: Hardware, kept: Mapping[str, tuple[Value, ...]]
) -> Iterator[Forbidden]:
    for weights, activations in product(kept[names.WEIGHTS], kept[names.ACTIVATIONS]):
        if weights != activations:
            yield Forbidden(
                values={names.WEIGHTS: (weights,), names.ACTIVATIONS: (activations,)},
                reason=f"LongLive's layers take {weights} inputs with {weights} weights",
            )
    for weights, rule, steps in _routes(kept):
        found = route(deployment, hardware, weights=weights, rule=rule, steps=steps)
        if isinstance(found, str):
            values: dict[str, tuple[Value, ...]] = {names.WEIGHTS: (weights,), names.STEPS: (steps,)}
            if weights == "nvfp4":
                values[names.BLOCK_RULE] = (rule,)
            yield Forbidden(values=values, reason=found)
    chunk = deployment.run.num_frame_per_block
    for window, sink in product(deployment.windows, deployment.sinks):
        if window < sink + chunk:
            yield Forbidden(
                values={names.WINDOW: (window,), names.SINK: (sink,)},
                reason=f"a window of {window} has no room for a sink of {sink} and a chunk of {chunk}",
            )


def _routes(kept: Mapping[str, tuple[Value, ...]]) -> Iterator[tuple[str, str, int]]:
    for weights, steps in product(kept[names.WEIGHTS], kept[names.STEPS]):
        for rule in kept.get(names.BLOCK_RULE, (PLAIN,)) if weights == "nvfp4" else (PLAIN,):
            yield str(weights), str(rule), int(steps)


def _backends(deployment: Deployment, hardware: Hardware, kept: Mapping[str, tuple[Value, ...]]) -> dict[str, str]:
    found = (
        route(deployment, hardware, weights=weights, rule=rule, steps=steps) for weights, rule, steps in _routes(kept)
    )
    # None of them emulates, and on a GPU one that is slower than bf16 has no route.
    return {one.backend: "speed" for one in found if isinstance(one, Route)}


def _reach(deployment: Deployment, hardware: Hardware, kept: Mapping[str, tuple[Value, ...]]) -> dict[str, Transition]:
    files: dict[tuple[str, str], set[str]] = {}
    for weights, rule, steps in _routes(kept):
        found = route(deployment, hardware, weights=weights, rule=rule, steps=steps)
        if isinstance(found, Route):
            files.setdefault((weights, rule), set()).add(str(found.checkpoint.file))
    one_file = all(len(some) == 1 for some in files.values())
    reach = {
        names.WEIGHTS: Transition.RELOAD,
        names.ACTIVATIONS: Transition.RELOAD,
        names.BLOCK_RULE: Transition.RELOAD,
        names.KV: Transition.KV_REBUILD,
        names.STEPS: Transition.CHUNK if one_file else Transition.RELOAD,
        names.WINDOW: Transition.KV_REBUILD,
        names.SINK: Transition.NEXT_CALL,
        names.MULTI_SHOT: Transition.CHUNK,
        names.VAE: Transition.NEXT_CALL,
        names.RANKS: Transition.RESTART,
        names.COMPILE: Transition.RELOAD,
    }
    return {name: reach[name] for name in kept}


def route_of(deployment: Deployment, hardware: Hardware, setting: Mapping[str, Value]) -> Route:
    """The route of a setting that `require` accepted."""
    found = route(
        deployment,
        hardware,
        weights=str(setting[names.WEIGHTS]),
        rule=str(setting.get(names.BLOCK_RULE, PLAIN)),
        steps=int(setting[names.STEPS]),
    )
    if isinstance(found, str):
        raise EngineError(f"{names.WEIGHTS}: {found}")
    return found


def require(deployment: Deployment, offer: Offer, setting: Configuration) -> None:
    """Accept exactly the settings of the offer.

    Raises:
        EngineError: names the parameter, and why this machine, checkout or checkpoint cannot do it.
    """
    for name, value in setting.items():
        reason = offer.left_out.get(f"{name}={value}") or _never(deployment, name, value)
        if reason and not (name == names.RANKS and value == 1):
            raise EngineError(f"{name}={value}: {reason}")
    if not offer.space.parameters:
        raise EngineError(next(iter(offer.left_out.values()), "nothing can be offered here"))
    if setting.get(names.KV) == "nvfp4" and setting.get(names.RANKS) != 1:
        raise EngineError(f"{names.KV}=nvfp4: LongLive refuses a quantised cache with sequence parallelism")
    try:
        offer.space.validate(setting)
    except FieldError as error:
        raise EngineError(error.message, hint=error.hint) from error


def _never(deployment: Deployment, name: str, value: Value) -> str:
    chunk = deployment.run.num_frame_per_block
    if name in (names.WINDOW, names.SINK) and type(value) is int and value % chunk:
        return f"not a multiple of the chunk's {chunk} latent frames"
    if name == names.RANKS and value not in SEQUENCE_DEGREES:
        return f"not one of the degrees {list(SEQUENCE_DEGREES)}: it divides the heads and the frames of a chunk"
    if name == names.STEPS and type(value) is int and value not in _all_steps(deployment):
        return f"no checkpoint is distilled for {value} steps"
    if name == names.KV_SMOOTH:
        return "LongLive subtracts its own mean from quantised keys, which cannot be chosen"
    return ""
