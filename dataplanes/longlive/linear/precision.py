"""At which precision a linear layer runs."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from controld.contract.configuration import Value
from controld.contract.errors import FieldError
from dataplanes.longlive import settings
from dataplanes.numerics.nvfp4 import BLOCK, BlockRule


class Precision(enum.Enum):
    """A number format of weights or inputs."""

    BF16 = "bf16"
    FP8 = "fp8"
    """e4m3 with a scale per token (inputs) or output channel (weights)."""
    NVFP4 = "nvfp4"


_PAIRS = frozenset(
    {
        (Precision.BF16, Precision.BF16),
        (Precision.FP8, Precision.BF16),
        (Precision.FP8, Precision.FP8),
        (Precision.NVFP4, Precision.BF16),
        (Precision.NVFP4, Precision.NVFP4),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPrecision:
    """Formats of a linear layer's weights and inputs; sums and outputs are bf16's or wider.

    Args:
        weights: of the weight matrix.
        activations: of the inputs; bf16 or as the weights.
        block_rule: where the peak of a block lands; of NVFP4 weights and inputs.

    Raises:
        FieldError: the pair is none that any back end runs, or the rule is for blocks that there are not.
    """

    weights: Precision = Precision.BF16
    activations: Precision = Precision.BF16
    block_rule: BlockRule = BlockRule.PLAIN

    def __post_init__(self) -> None:
        if (self.weights, self.activations) not in _PAIRS:
            raise FieldError(
                settings.ACTIVATIONS,
                f"{self.activations.value} does not go with {self.weights.value} weights",
                hint="bf16, or the weights' own precision",
            )
        if self.block_rule is not BlockRule.PLAIN and self.weights is not Precision.NVFP4:
            raise FieldError(settings.BLOCK_RULE, f"{self.block_rule.value} is for nvfp4, not {self.weights.value}")

    @classmethod
    def of_setting(cls, setting: Mapping[str, Value]) -> LinearPrecision:
        """The precision in an engine's setting; what it does not name is bf16 and plain.

        Raises:
            FieldError: no such precision or rule, or they do not go together.
        """
        return cls(
            weights=_member(Precision, settings.WEIGHTS, setting.get(settings.WEIGHTS, "bf16")),
            activations=_member(Precision, settings.ACTIVATIONS, setting.get(settings.ACTIVATIONS, "bf16")),
            block_rule=_member(BlockRule, settings.BLOCK_RULE, setting.get(settings.BLOCK_RULE, "plain")),
        )

    @property
    def is_full(self) -> bool:
        """Nothing is quantised."""
        return self.weights is Precision.BF16

    @property
    def setting_values(self) -> dict[str, str]:
        """Of the parameters that `of_setting` reads, those that an engine's setting has then."""
        values = {settings.WEIGHTS: self.weights.value, settings.ACTIVATIONS: self.activations.value}
        if self.weights is Precision.NVFP4:
            values[settings.BLOCK_RULE] = self.block_rule.value
        return values

    @property
    def row_multiple(self) -> int:
        """What a weight matrix's rows must be a multiple of in length."""
        return BLOCK if self.weights is Precision.NVFP4 else 1

    def __str__(self) -> str:
        """`nvfp4/bf16`, `nvfp4/nvfp4 4over6`: weights first."""
        rule = "" if self.block_rule is BlockRule.PLAIN else f" {self.block_rule.value}"
        return f"{self.weights.value}/{self.activations.value}{rule}"


BF16 = LinearPrecision()

_Member = TypeVar("_Member", bound=enum.Enum)


def _member(kind: type[_Member], field: str, value: Value) -> _Member:
    for member in kind:
        if member.value == value:
            return member
    raise FieldError(field, f"{value!r} is not offered", hint=", ".join(str(member.value) for member in kind))
