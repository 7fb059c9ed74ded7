"""A linear layer that keeps its weights as they were loaded and swaps what it computes with.

Variants are built when a precision is first used and kept until `release_unused`. A switch assigns one attribute, so a
product that runs meanwhile uses the old variant or the new one, never parts of both; switch between chunks, so that a
chunk has one precision. What is kept in bf16 always: see `KEPT_IN_BF16`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dataplanes.longlive.linear.backend import LinearBackend, QuantisedWeight
from dataplanes.longlive.linear.precision import BF16, LinearPrecision

BackendChoice = Callable[[LinearPrecision], LinearBackend]
"""`Offers.backend_for`."""

KEPT_IN_BF16 = ("*embedding*", "*patch*", "*time*", "head", "*norm*")
"""Patterns of single components of a layer's name: embeddings of text, patches and time, time projections, the output
head and norms, as LongLive-2.0 keeps them."""


@dataclass(frozen=True, slots=True)
class _Variant:
    backend: LinearBackend
    weight: QuantisedWeight


class SwitchableLinear(nn.Module):
    """`nn.Linear` with the same parameters and names in a state dictionary, at a precision that changes.

    Args:
        linear: whose parameters it takes over, not copied.
        backend_for: what carries a precision.
    """

    def __init__(self, linear: nn.Linear, backend_for: BackendChoice) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias
        self._backend_for = backend_for
        self._variants: dict[LinearPrecision, _Variant] = {}
        self._precision = BF16
        self._active: _Variant | None = None
        self.register_load_state_dict_post_hook(_forget_variants)  # type: ignore[no-untyped-call]

    @property
    def precision(self) -> LinearPrecision:
        """In force."""
        return self._precision

    @property
    def backend_name(self) -> str:
        """What computes now; `bf16` for none."""
        active = self._active
        return "bf16" if active is None else active.backend.name

    def set_precision(self, precision: LinearPrecision) -> None:
        """Build the variant if it is not there, then swap.

        Raises:
            FieldError: no back end offers it, or not for this shape; nothing has changed then.
        """
        if precision.is_full:
            self._active, self._precision = None, precision
            return
        if precision not in self._variants:
            backend = self._backend_for(precision)
            self._variants[precision] = _Variant(backend, backend.quantise_weight(self.weight.detach(), precision))
        self._active, self._precision = self._variants[precision], precision

    def forward(self, x: Tensor) -> Tensor:
        """`x @ weight.T + bias` at the precision in force; without gradients below bf16."""
        active = self._active
        if active is None:
            return functional.linear(x, self.weight, self.bias)
        with torch.no_grad():
            return active.backend.linear(x, active.weight, self.bias)

    def weight_bytes(self) -> int:
        """Of the weights that are computed with now: what a device needs that holds nothing else."""
        active = self._active
        return self.weight.nbytes if active is None else active.weight.nbytes

    def held_bytes(self) -> int:
        """Of the loaded weights and all variants that are kept."""
        return self.weight.nbytes + sum(variant.weight.nbytes for variant in self._variants.values())

    def release_unused(self) -> None:
        """Drop variants other than the one in force."""
        self._variants = {key: kept for key, kept in self._variants.items() if kept is self._active}

    def extra_repr(self) -> str:
        """For printing a model."""
        return f"{self.in_features}, {self.out_features}, {self._precision}, {self.backend_name}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> SwitchableLinear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._forget()
        return self

    def _forget(self) -> None:
        """The loaded weights are others, or elsewhere."""
        self._variants.clear()
        self._active = None
        self.set_precision(self._precision)


def _forget_variants(layer: SwitchableLinear, _: object) -> None:
    layer._forget()


def make_linear(linear: nn.Linear, precision: LinearPrecision, backend_for: BackendChoice) -> SwitchableLinear:
    """A switchable layer at a precision.

    Raises:
        FieldError: see `SwitchableLinear.set_precision`.
    """
    layer = SwitchableLinear(linear, backend_for)
    layer.set_precision(precision)
    return layer


def convert_linears(
    model: nn.Module, backend_for: BackendChoice, *, kept: Iterable[str] = KEPT_IN_BF16
) -> dict[str, SwitchableLinear]:
    """Replace a model's linear layers in place, at bf16 for now.

    Args:
        model: whose `nn.Linear` children, at any depth, are replaced.
        backend_for: what carries a precision.
        kept: a layer stays as it is if a component of its name matches one of these.

    Returns:
        The new layers by name.
    """
    patterns = tuple(kept)
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not _is_kept(name, patterns)
    }
    layers = {name: SwitchableLinear(module, backend_for) for name, module in found.items()}
    for name, layer in layers.items():
        model.set_submodule(name, layer)
    return layers


def set_precision(layers: Iterable[SwitchableLinear], precision: LinearPrecision) -> None:
    """Switch all or none.

    Raises:
        FieldError: a layer refuses; all are at what they were.
    """
    before: list[tuple[SwitchableLinear, LinearPrecision]] = []
    try:
        for layer in layers:
            before.append((layer, layer.precision))
            layer.set_precision(precision)
    except BaseException:
        for layer, old in before:
            layer.set_precision(old)
        raise


def _is_kept(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(part, pattern) for part in name.split(".") for pattern in patterns)
