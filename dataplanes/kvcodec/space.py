"""The strategy space that an agent advertises for its layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from controld.contract.configuration import Configuration, Value
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from dataplanes.kvcodec.coders import OFFERED_CODERS, SPLITZIP, CalibratedCoder
from dataplanes.kvcodec.head_profile import NO_ARTEFACTS, HeadProfile
from dataplanes.kvcodec.layout import KVLayout, PlaneRole
from dataplanes.kvcodec.native.library import has_calibrated_codec
from dataplanes.kvcodec.parameters import (
    COUNTED_FORMATS,
    GROUPED_FORMATS,
    PROFILED_FORMATS,
    SPLIT_FORMATS,
    Axis,
    CodecParameters,
    Quantise,
    Transform,
    parse_parameters,
)
from dataplanes.kvcodec.predictive import PredictiveArtefact
from dataplanes.numerics.nvfp4 import BlockRule

LEVELS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 64)
"""Levels worth trying: the codec takes any number from 2 to 256."""

GROUPS = (16, 32, 64, 128)
"""Group sizes worth trying, in tokens or channels."""

SINK_TOKENS = (0, 1, 4)
"""How many of a request's first tokens may be kept bit for bit."""

WINDOW_TOKENS = (0, 64)
"""How many of a request's last tokens may be kept bit for bit."""

LOW_LEVELS = (4, 5, 6, 8, 16)
"""The lower of two numbers of levels."""

BITS = (2.5, 3, 4)
"""Mean bits that a head profile may hand out."""

BIT_DECAY = 5
"""By what a bit divides the error of integer levels over a group's range (RateQuant's figure for KIVI)."""


def kv_strategy_space(layout: KVLayout, artefacts: Mapping[str, object] = NO_ARTEFACTS) -> StrategySpace:
    """Every configuration that is offered for `layout`.

    The codec accepts more: other levels, groups, windows and seeds, one step for all heads of a token without a head
    profile, the outside coders.

    Args:
        layout: decides which parts exist (a latent pool has no values) and which groups fit.
        artefacts: what sender and receiver hold; what needs one is offered where one fits the layout.
    """
    head_profiles = tuple(name for name, held in artefacts.items() if isinstance(held, HeadProfile))
    predictors = _fitting_predictors(layout, artefacts)
    calibrated = (Transform.KLT, Quantise.UNIFORM)
    formats = [member for member in Quantise if head_profiles or member not in PROFILED_FORMATS]
    formats = [member for member in formats if predictors or member not in calibrated]
    transforms = tuple(member.value for member in Transform if predictors or member not in calibrated)
    lossy_formats = tuple(member.value for member in formats if member not in (Quantise.NONE, Quantise.UNIFORM))
    parameters = [
        Parameter(name="transform", values=transforms),
        Parameter(name="quantise", values=tuple(member.value for member in formats)),
        Parameter(name="sink_tokens", values=SINK_TOKENS, ordered=True),
        Parameter(name="window_tokens", values=WINDOW_TOKENS, ordered=True, default=0),
        Parameter(name="block_rule", values=tuple(rule.value for rule in BlockRule), default=BlockRule.PLAIN.value),
    ]
    conditions = [
        Condition(parameter=name, parent="quantise", parent_values=lossy_formats)
        for name in ("sink_tokens", "window_tokens")
    ]
    conditions.append(_only_in("block_rule", {Quantise.NVFP4}))
    forbidden = [
        _forbid("a transform without quantisation", quantise=("none",), transform=("hadamard",)),
        _forbid("a Gaussian codebook without rotation", quantise=("lloyd_max",), transform=("none",)),
        _forbid("whole bytes cannot be bit-packed", quantise=("none", "fp8_e4m3"), code=("bitpack",)),
        _forbid(
            "SplitZip codes exponents, which integer symbols do not have",
            quantise=tuple(name for name in lossy_formats if name != Quantise.FP8_E4M3.value),
            code=(SPLITZIP,),
        ),
    ]
    parts = {
        "key": frozenset({PlaneRole.KEY, PlaneRole.LATENT}),
        "value": frozenset({PlaneRole.VALUE}),
    }
    for part, roles in parts.items():
        if not layout.roles & roles:
            continue
        head_dims = {plane.head_dim for plane in layout.planes if plane.role in roles}
        fitting = {
            Axis.CHANNEL: {group for group in GROUPS if _fits_pages(group, layout.page_tokens)},
            Axis.TOKEN: {group for group in _token_groups(max(head_dims)) if _fits_heads(group, head_dims)},
        }
        axes = tuple(axis.value for axis in fitting if fitting[axis])
        grouped_axes = axes
        if part == "value" and head_profiles:
            # KVServe's: a range for all of a token's heads of as many levels.
            axes = (*axes, Axis.ALL_HEADS.value)
        groups = tuple(sorted(fitting[Axis.CHANNEL] | fitting[Axis.TOKEN]))
        parameters += [
            Parameter(name=f"{part}_levels", values=LEVELS, ordered=True),
            Parameter(name=f"{part}_axis", values=axes),
            Parameter(name=f"{part}_group", values=groups, ordered=True),
            Parameter(name=f"{part}_low_levels", values=LOW_LEVELS, ordered=True),
            Parameter(name=f"{part}_low_percent", values=_low_percents(layout, part), ordered=True),
        ]
        conditions += [
            _only_in(f"{part}_levels", COUNTED_FORMATS),
            _only_in(f"{part}_axis", GROUPED_FORMATS),
            _only_in(f"{part}_group", GROUPED_FORMATS),
            Condition(parameter=f"{part}_group", parent=f"{part}_axis", parent_values=grouped_axes),
            _only_in(f"{part}_low_levels", SPLIT_FORMATS),
            _only_in(f"{part}_low_percent", SPLIT_FORMATS),
        ]
        if head_profiles:
            parameters.append(Parameter(name=f"{part}_bits", values=BITS, ordered=True))
            conditions.append(_only_in(f"{part}_bits", {Quantise.ALLOCATED_LEVELS}))
        for axis in fitting:
            misfits = tuple(group for group in groups if group not in fitting[axis])
            if misfits and fitting[axis]:
                rule = {f"{part}_axis": (axis.value,), f"{part}_group": misfits}
                forbidden.append(Forbidden(values=rule, reason=f"{part} groups that do not fit the {axis.value} axis"))
        for low in LOW_LEVELS:
            high = tuple(levels for levels in LEVELS if levels <= low)
            rule = {f"{part}_low_levels": (low,), f"{part}_levels": high}
            forbidden.append(Forbidden(values=rule, reason=f"{part} low levels that are not fewer"))
    if head_profiles:
        parameters += [
            Parameter(name="head_profile", values=tuple(head_profiles)),
            Parameter(name="bit_decay", values=(BIT_DECAY,)),
        ]
        conditions += [
            _only_in("head_profile", PROFILED_FORMATS),
            _only_in("bit_decay", {Quantise.ALLOCATED_LEVELS}),
        ]
    coders = OFFERED_CODERS
    if predictors:
        _offer_predictors(predictors, parameters, conditions, forbidden)
        coders = (*coders, CalibratedCoder.name)
    parameters.append(Parameter(name="code", values=coders, lossy=False))
    return StrategySpace(parameters=tuple(parameters), conditions=tuple(conditions), forbidden=tuple(forbidden))


def _fitting_predictors(layout: KVLayout, artefacts: Mapping[str, object]) -> dict[str, PredictiveArtefact]:
    """By id; none where their kernels cannot run."""
    held = {name: item for name, item in artefacts.items() if isinstance(item, PredictiveArtefact)}
    fitting = {name: artefact for name, artefact in held.items() if not artefact.fits(layout)}
    return fitting if fitting and has_calibrated_codec() else {}


def _offer_predictors(
    artefacts: Mapping[str, PredictiveArtefact],
    parameters: list[Parameter],
    conditions: list[Condition],
    forbidden: list[Forbidden],
) -> None:
    """The layer-predictive transform codec: its transform, step and tables come together or not at all."""
    steps = sorted({step for artefact in artefacts.values() for step in artefact.steps})
    uniform, klt, rans = Quantise.UNIFORM.value, Transform.KLT.value, CalibratedCoder.name
    parameters += [
        Parameter(name="artefact", values=tuple(artefacts)),
        Parameter(name="step", values=tuple(steps), ordered=True),
    ]
    conditions += [
        Condition(parameter=name, parent="quantise", parent_values=(uniform,)) for name in ("artefact", "step")
    ]
    other_transforms = tuple(member.value for member in Transform if member is not Transform.KLT)
    other_formats = tuple(member.value for member in Quantise if member is not Quantise.UNIFORM)
    reason = "the calibrated transform, its step and its tables go together"
    forbidden += [
        _forbid(reason, quantise=(uniform,), transform=other_transforms),
        _forbid(reason, quantise=other_formats, transform=(klt,)),
        _forbid(reason, quantise=(uniform,), code=OFFERED_CODERS),
        _forbid(reason, quantise=other_formats, code=(rans,)),
    ]
    for artefact_id, artefact in artefacts.items():
        missing = tuple(step for step in steps if step not in artefact.steps)
        if missing:
            forbidden.append(_forbid("no tables for that step", artefact=(artefact_id,), step=missing))


def validate_configuration(
    configuration: Configuration, layout: KVLayout, artefacts: Mapping[str, object] = NO_ARTEFACTS
) -> CodecParameters:
    """What the codec makes of a configuration; wider than the advertised space.

    Raises:
        CodecError: the codec would refuse it.
    """
    return parse_parameters(configuration, layout, artefacts)


def lmcache_low_percent(layout: KVLayout, part: str) -> int:
    """Share of layers that LMCache's CacheGen gives fewer bins: keys from the eleventh on, values from the third."""
    role = PlaneRole.VALUE if part == "value" else PlaneRole.KEY
    layers = len(layout.planes_by_table().get(role, ()))
    high = 2 if part == "value" else 10
    return min(max(round(100 * (layers - high) / layers), 1), 99) if layers > high else 1


def _low_percents(layout: KVLayout, part: str) -> tuple[int, ...]:
    """KVServe's (a third, or most) and CacheGen's."""
    return tuple(sorted({33, 80, lmcache_low_percent(layout, part)}))


def _only_in(name: str, formats: Iterable[Quantise]) -> Condition:
    wanted = set(formats)
    return Condition(parameter=name, parent="quantise", parent_values=tuple(m.value for m in Quantise if m in wanted))


def _token_groups(head_dim: int) -> set[int]:
    """Offered group sizes within a head: one whole head counts once, under its own size."""
    return {group for group in GROUPS if group < head_dim} | {head_dim}


def _fits_pages(group: int, page_tokens: int) -> bool:
    return group % page_tokens == 0 or page_tokens % group == 0


def _fits_heads(group: int, head_dims: set[int]) -> bool:
    return all(head_dim % min(group, head_dim) == 0 for head_dim in head_dims)


def _forbid(reason: str, **values: tuple[Value, ...]) -> Forbidden:
    rule: Mapping[str, tuple[Value, ...]] = values
    return Forbidden(values=rule, reason=reason)
