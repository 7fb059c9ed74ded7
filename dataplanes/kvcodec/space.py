"""The strategy space that an agent advertises for its layout."""

from __future__ import annotations

from collections.abc import Mapping

from controld.contract.configuration import Configuration, Value
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from dataplanes.kvcodec.coders import CODERS, CalibratedCoder
from dataplanes.kvcodec.layout import KVLayout, PlaneRole
from dataplanes.kvcodec.native.library import load_predictive_library
from dataplanes.kvcodec.parameters import Axis, CodecParameters, Quantise, Transform, parse_parameters
from dataplanes.kvcodec.predictive import NO_ARTEFACTS, ArtefactShelf, PredictiveArtefact

LEVELS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 64)
"""Levels worth trying: the codec takes any number from 2 to 256."""

GROUPS = (16, 32, 64, 128)
"""Group sizes worth trying, in tokens or channels."""

SINK_TOKENS = (0, 1, 4)
"""How many of a request's first tokens may be kept bit for bit."""


def kv_strategy_space(layout: KVLayout, artefacts: ArtefactShelf = NO_ARTEFACTS) -> StrategySpace:
    """Every configuration that is offered for `layout`; the codec accepts more (other levels, groups and seeds).

    Args:
        layout: decides which parts exist (a latent pool has no values) and which groups fit.
        artefacts: what is calibrated; those that fit the layout are offered.
    """
    fitting_artefacts = {artefact.artefact_id: artefact for artefact in artefacts if not artefact.fits(layout)}
    if fitting_artefacts and load_predictive_library() is None:
        fitting_artefacts = {}
    without = () if fitting_artefacts else (Transform.KLT, Quantise.UNIFORM)
    transforms = tuple(member.value for member in Transform if member not in without)
    formats = tuple(member.value for member in Quantise if member not in without)
    coders = tuple(name for name in CODERS if fitting_artefacts or name != CalibratedCoder.name)
    lossy_formats = tuple(name for name in formats if name not in (Quantise.NONE.value, Quantise.UNIFORM.value))
    parameters = [
        Parameter(name="transform", values=transforms),
        Parameter(name="quantise", values=formats),
        Parameter(name="sink_tokens", values=SINK_TOKENS, ordered=True),
    ]
    conditions = [Condition(parameter="sink_tokens", parent="quantise", parent_values=lossy_formats)]
    forbidden = [
        _forbid("a transform without quantisation", quantise=("none",), transform=("hadamard",)),
        _forbid("whole bytes cannot be bit-packed", quantise=("none", "fp8_e4m3"), code=("bitpack",)),
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
        axes = tuple(axis.value for axis in Axis if fitting[axis])
        groups = tuple(sorted(fitting[Axis.CHANNEL] | fitting[Axis.TOKEN]))
        parameters += [
            Parameter(name=f"{part}_levels", values=LEVELS, ordered=True),
            Parameter(name=f"{part}_axis", values=axes),
            Parameter(name=f"{part}_group", values=groups, ordered=True),
        ]
        conditions += [
            Condition(parameter=f"{part}_{suffix}", parent="quantise", parent_values=("levels",))
            for suffix in ("levels", "axis", "group")
        ]
        for axis in Axis:
            misfits = tuple(group for group in groups if group not in fitting[axis])
            if misfits and fitting[axis]:
                rule = {f"{part}_axis": (axis.value,), f"{part}_group": misfits}
                forbidden.append(Forbidden(values=rule, reason=f"{part} groups that do not fit the {axis.value} axis"))
    if fitting_artefacts:
        _offer_artefacts(fitting_artefacts, parameters, conditions, forbidden)
    parameters.append(Parameter(name="code", values=coders, lossy=False))
    return StrategySpace(parameters=tuple(parameters), conditions=tuple(conditions), forbidden=tuple(forbidden))


def _offer_artefacts(
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
    other_coders = tuple(name for name in CODERS if name != rans)
    reason = "the calibrated transform, its step and its tables go together"
    forbidden += [
        _forbid(reason, quantise=(uniform,), transform=other_transforms),
        _forbid(reason, quantise=other_formats, transform=(klt,)),
        _forbid(reason, quantise=(uniform,), code=other_coders),
        _forbid(reason, quantise=other_formats, code=(rans,)),
    ]
    for artefact_id, artefact in artefacts.items():
        missing = tuple(step for step in steps if step not in artefact.steps)
        if missing:
            forbidden.append(_forbid("no tables for that step", artefact=(artefact_id,), step=missing))


def validate_configuration(
    configuration: Configuration, layout: KVLayout, artefacts: ArtefactShelf = NO_ARTEFACTS
) -> CodecParameters:
    """What the codec makes of a configuration; wider than the advertised space.

    Raises:
        CodecError: the codec would refuse it.
    """
    return parse_parameters(configuration, layout, artefacts)


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
