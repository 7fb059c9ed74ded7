"""What carries a linear layer at a precision: the interface, and what probing one says."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from controld.contract.errors import FieldError
from dataplanes.longlive.linear.precision import LinearPrecision


class Offer(enum.Enum):
    """What a back end is offered for."""

    SPEED = "speed"
    """Faster than bf16 here, by measurement."""
    MEMORY = "memory"
    """Emulated: its memory and its quality are the format's, its time is not."""
    NOTHING = "nothing"
    """Not offered; `Probe.reason` says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What a back end showed at one precision on one device.

    Args:
        backend: its name.
        precision: what was probed.
        passed: it ran, and its result was within its bound of that by definition.
        error: root mean square of its distance from the result by definition over that result's own; None: it did not
            run.
        speed_ratio: seconds of bf16 over seconds of this back end, side by side; above 1 is faster; None: not measured.
        offer: what it is offered for.
        is_emulated: it computes in another format than the one that it stores.
        reason: why it is offered for this and no more.
    """

    backend: str
    precision: LinearPrecision
    passed: bool
    error: float | None
    speed_ratio: float | None
    offer: Offer
    is_emulated: bool
    reason: str


class QuantisedWeight(Protocol):
    """A weight matrix as one back end keeps it."""

    @property
    def precision(self) -> LinearPrecision:
        """For which it was made."""
        ...

    @property
    def nbytes(self) -> int:
        """Device memory that it holds."""
        ...


LIBRARY_ERROR_BOUND = 0.03
"""Of a library that rounds scales and results to bf16 or resolves ties another way: 0.002 to 0.009 of those that ran
here. A wrong scale or layout gives 0.1 and more."""


class LinearBackend(Protocol):
    """Linear layers at precisions below bf16. Stateless: one instance serves every layer and thread."""

    @property
    def name(self) -> str:
        """`te`, `fouroversix`, `torchao_fp8` or `torch_emulated`."""
        ...

    @property
    def precisions(self) -> frozenset[LinearPrecision]:
        """What it can carry where its library and device can."""
        ...

    @property
    def is_emulated(self) -> bool:
        """Whether it computes in another format than the one that it stores."""
        ...

    @property
    def error_bound(self) -> float:
        """What `Probe.error` may be."""
        ...

    def refusal(self, precision: LinearPrecision, device: torch.device) -> str | None:
        """Why it cannot run here; None: it can, as far as versions and hardware say."""
        ...

    def quantise_weight(self, weight: Tensor, precision: LinearPrecision) -> QuantisedWeight:
        """Quantise once.

        Args:
            weight: floating-point `[out, in]`, finite.
            precision: one of `precisions`.

        Raises:
            FieldError: a precision or shape that it does not carry.
        """
        ...

    def linear(self, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
        """`x @ weight.T + bias`.

        Args:
            x: `[..., in]`.
            weight: what `quantise_weight` of this back end returned.
            bias: `[out]`.

        Returns:
            `[..., out]` of x's type.
        """
        ...


def check_weight(backend: LinearBackend, weight: Tensor, precision: LinearPrecision) -> None:
    """Refuse what a back end does not carry.

    Raises:
        FieldError: it cannot run at the precision here, or the weight is no matrix with rows of whole blocks.
    """
    refusal = backend.refusal(precision, weight.device)
    if refusal is not None:
        raise FieldError("precision", f"{backend.name}: {refusal}")
    if weight.dim() != 2 or weight.shape[1] % precision.row_multiple:
        shape = tuple(weight.shape)
        raise FieldError("weight", f"{shape} is no matrix with rows of a multiple of {precision.row_multiple}")
