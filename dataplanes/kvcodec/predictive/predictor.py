"""Fitting the prediction of a layer: a reduced-rank regression whose numbers are whole ones.

Both sides of a wire must predict alike on whatever processor they run; sums of products of small integers are exact in
any order, and faster than floating point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_LARGEST_SUM: Final = 2**31 - 1
_LARGEST_FACTOR: Final = 2047
_MOST_DEVIATIONS: Final = 20.0
_LEAST_SHARE: Final = 1e-3


@dataclass(frozen=True, slots=True, eq=False)
class IntegerPredictor:
    """Of one layer: N inputs, bottleneck B, W outputs.

    Args:
        narrow: int16 `[N, B]`.
        narrow_scale: float32 `[B]`: sum of products to an integer of the bottleneck.
        widen: int16 `[B, W]`.
        widen_scale: float32 `[W]`: sum of products to the prediction.
        largest: of the integers.
    """

    narrow: Tensor
    narrow_scale: Tensor
    widen: Tensor
    widen_scale: Tensor
    largest: float

    @classmethod
    def none(cls, inputs: int, bottleneck: int, outputs: int) -> IntegerPredictor:
        """Predicts zero."""
        return cls(
            torch.zeros(inputs, bottleneck, dtype=torch.int16),
            torch.zeros(bottleneck),
            torch.zeros(bottleneck, outputs, dtype=torch.int16),
            torch.zeros(outputs),
            0.0,
        )

    def padded(self, outputs: int) -> IntegerPredictor:
        """With outputs that are predicted as zero behind its own."""
        missing = outputs - self.widen.shape[1]
        pad = torch.nn.functional.pad
        return IntegerPredictor(
            self.narrow,
            self.narrow_scale,
            pad(self.widen, (0, missing)),
            pad(self.widen_scale, (0, missing)),
            self.largest,
        )

    def predict(self, inputs: Tensor) -> Tensor:
        """float32 `[tokens, W]` from whole numbers, float32 `[tokens, N]`."""
        bottleneck = to_integers(inputs @ self.narrow.float(), self.narrow_scale, self.largest)
        return (bottleneck @ self.widen.float()) * self.widen_scale


def largest_factor(products: int) -> float:
    """How large two integers may be if the sum of so many of their products is to fit into 32 bits."""
    return float(min(_LARGEST_FACTOR, math.isqrt(_LARGEST_SUM // max(products, 1))))


def to_integers(x: Tensor, scale: Tensor, largest: float) -> Tensor:
    """Whole numbers from -largest to largest, as float32."""
    return (x * scale).clamp(-largest, largest).round()


def integer_gain(x: Tensor, largest: float) -> Tensor:
    """float32 `[columns]`: what brings `x`, `[tokens, columns]`, within `largest`; rare large values are cut off."""
    deviation = x.square().mean(0).sqrt()
    limit = torch.minimum(x.abs().amax(0), _MOST_DEVIATIONS * deviation)
    floor = max(_LEAST_SHARE * float(deviation.mean()), torch.finfo(torch.float32).tiny * 1e6)
    return largest / limit.clamp(min=floor)


def column_units(x: Tensor, largest: float) -> Tensor:
    """What the integer 1 stands for in each column of `[..., rows, columns]`, as `[..., 1, columns]`."""
    unit = x.abs().amax(-2, keepdim=True) / largest
    return torch.where(unit > 0, unit, 1)


def fit_predictor(
    inputs: Tensor,
    units: Tensor,
    outputs: Tensor,
    root: Tensor,
    inverse_root: Tensor,
    *,
    bottleneck: int,
    ridge: float,
    largest: float,
) -> IntegerPredictor:
    """Fit one layer.

    Args:
        inputs: whole numbers as float32 `[tokens, N]`: earlier layers as the receiver will have them.
        units: float32 `[N]`: what their 1 stands for. The ridge is one in these units; among equally large integers, it
            would let in channels that are nearly always zero.
        outputs: float32 `[tokens, W]`.
        root, inverse_root: of the metric in which errors count, `[W, W]`.
        bottleneck: the largest rank.
        ridge: relative to the mean square of the inputs.
        largest: of the integers.
    """
    down, up = reduced_rank_regression(inputs * units, outputs, root, inverse_root, bottleneck, ridge)
    down = down * units[:, None]
    narrow_unit = column_units(down, largest)
    narrow = (down / narrow_unit).round()
    narrow_scale = integer_gain(inputs @ narrow, largest)
    up = up * (narrow_unit.squeeze(0) / narrow_scale)[:, None]
    widen_unit = column_units(up, largest)
    widen = (up / widen_unit).round()
    return IntegerPredictor(narrow.to(torch.int16), narrow_scale, widen.to(torch.int16), widen_unit.squeeze(0), largest)


def reduced_rank_regression(
    inputs: Tensor, outputs: Tensor, root: Tensor, inverse_root: Tensor, rank: int, ridge: float
) -> tuple[Tensor, Tensor]:
    """Ridge regression whose matrix has at most `rank` (Izenman, 1975), errors weighted by the metric.

    Returns:
        `[inputs, rank]` and `[rank, outputs]`; zero beyond what the outputs have.
    """
    gram = (inputs.T @ inputs).double()
    gram.diagonal().add_(ridge * float(gram.diagonal().mean()))
    full = torch.linalg.solve(gram, (inputs.T @ outputs).double())
    weighted = full @ root.double()
    predicted = weighted.mT @ (gram @ weighted)
    _, directions = torch.linalg.eigh((predicted + predicted.mT) / 2)
    kept = directions.flip(1)[:, :rank]
    down, up = weighted @ kept, kept.mT @ inverse_root.double()
    missing = rank - kept.shape[1]
    down = torch.nn.functional.pad(down, (0, missing))
    up = torch.nn.functional.pad(up, (0, 0, 0, missing))
    return down.float(), up.float()
