"""The strategy space that an agent advertises for its layout."""

from __future__ import annotations

from collections.abc import Mapping

from controld.contract.configuration import Configuration, Value
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from dataplanes.kvcodec.coders import OFFERED_CODERS, SPLITZIP
from dataplanes.kvcodec.layout import KVLayout, PlaneRole
from dataplanes.kvcodec.parameters import Axis, CodecParameters, Quantise, Transform, parse_parameters

LEVELS = (4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 64)
"""Levels worth trying: the codec takes any number from 2 to 256."""

GROUPS = (16, 32, 64, 128)
"""Group sizes worth trying, in tokens or channels."""

SINK_TOKENS = (0, 1, 4)
"""How many of a request's first tokens may be kept bit for bit."""


def kv_strategy_space(layout: KVLayout) -> StrategySpace:
    """Every configuration that is offered for `layout`; the codec accepts more (other levels, groups and seeds).

    Args:
        layout: decides which parts exist (a latent pool has no values) and which groups fit.
    """
    lossy_formats = tuple(member.value for member in Quantise if member is not Quantise.NONE)
    parameters = [
        Parameter(name="transform", values=tuple(member.value for member in Transform)),
        Parameter(name="quantise", values=tuple(member.value for member in Quantise)),
        Parameter(name="sink_tokens", values=SINK_TOKENS, ordered=True),
    ]
    conditions = [Condition(parameter="sink_tokens", parent="quantise", parent_values=lossy_formats)]
    forbidden = [
        _forbid("a transform without quantisation", quantise=("none",), transform=("hadamard",)),
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
    parameters.append(Parameter(name="code", values=OFFERED_CODERS, lossy=False))
    return StrategySpace(parameters=tuple(parameters), conditions=tuple(conditions), forbidden=tuple(forbidden))


def validate_configuration(configuration: Configuration, layout: KVLayout) -> CodecParameters:
    """What the codec makes of a configuration; wider than the advertised space.

    Raises:
        CodecError: the codec would refuse it.
    """
    return parse_parameters(configuration, layout)


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
