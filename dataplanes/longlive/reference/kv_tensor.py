"""One chunk's keys or values of one layer, in the precision of the cache.

NVFP4 is Transformer Engine's form with the peak of the whole tensor: half a byte a value, a byte a block of 16 and four
bytes a tensor. FP8 is e4m3 with one scale a tensor. Keys may lose their mean over tokens first, which is kept and put
back: the quantiser then spends its levels on what differs, and attention sees no change but less error.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.numerics.fp8 import LARGEST as FP8_LARGEST
from dataplanes.numerics.fp8_rows import FP8Rows
from dataplanes.numerics.nvfp4 import BLOCK, BlockRule
from dataplanes.numerics.nvfp4_tensor import NVFP4Tensor

AgreeOnPeak = Callable[[Tensor], Tensor]
"""The largest of a number over all ranks that hold heads of one tensor."""

_SMALLEST_PEAK = 2.0**-100
_PEAK_BYTES = 4


class KvFormat(enum.Enum):
    """Precision of the KV cache."""

    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRule:
    """How keys and values are stored.

    Args:
        format: precision.
        block_rule: where an NVFP4 block's peak lands.
        smooth: whether keys lose their token mean first.
        plain_dtype: what BF16 really is: a test of exactness stores float64.
    """

    format: KvFormat = KvFormat.BF16
    block_rule: BlockRule = BlockRule.PLAIN
    smooth: bool = False
    plain_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTensor:
    """A stored tensor `[tokens, heads, head_dim]`.

    Args:
        data: bfloat16 (or what a test of exactness stores), e4m3, or NVFP4.
        mean: what was subtracted, bfloat16 `[1, heads, head_dim]`.
    """

    data: Tensor | FP8Rows | NVFP4Tensor
    mean: Tensor | None = None

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        return self.data.nbytes + (0 if self.mean is None else self.mean.nbytes)

    def decode(self, dtype: torch.dtype) -> Tensor:
        """`[tokens, heads, head_dim]` in `dtype`, a tensor of its own."""
        return self.decode_into(torch.empty(self.data.shape, dtype=dtype))

    def decode_into(self, out: Tensor) -> Tensor:
        """Write what `decode` gives into a contiguous `[tokens, heads, head_dim]`, and return it."""
        if isinstance(self.data, Tensor):
            return out.copy_(self.data)
        if self.mean is None:
            return self.data.dequantise_into(out)
        values = out if out.dtype is torch.float32 else torch.empty_like(out, dtype=torch.float32)
        self.data.dequantise_into(values).add_(self.mean)
        return values if values is out else out.copy_(values)


def encode(x: Tensor, rule: KvRule, *, is_key: bool, agree: AgreeOnPeak) -> KvTensor:
    """Store keys or values.

    Args:
        x: `[tokens, heads, head_dim]`, finite; head_dim is a multiple of 16.
        rule: how.
        is_key: whether smoothing is meant for it.
        agree: called once with this rank's peak where a peak is needed.
    """
    if rule.format is KvFormat.BF16:
        return KvTensor(data=x.to(rule.plain_dtype).clone())
    values, mean = x.float(), None
    if rule.smooth and is_key:
        mean = values.mean(0, keepdim=True).bfloat16()
        values = values - mean.float()
    peak = agree(values.abs().amax().view(1)).clamp_min(_SMALLEST_PEAK)
    if rule.format is KvFormat.NVFP4:
        return KvTensor(data=NVFP4Tensor.quantise(values, rule.block_rule, peak=peak), mean=mean)
    return KvTensor(data=FP8Rows.quantise(values, scale=peak / FP8_LARGEST), mean=mean)


def stored_bytes(tokens: int, dim: int, rule: KvRule, *, is_key: bool) -> int:
    """What `encode` of `[tokens, heads, head_dim]` takes, `dim` being heads * head_dim."""
    values = tokens * dim
    mean = 2 * dim if rule.smooth and is_key else 0
    match rule.format:
        case KvFormat.BF16:
            return 2 * values
        case KvFormat.FP8:
            return values + _PEAK_BYTES + mean
        case KvFormat.NVFP4:
            return values // 2 + values // BLOCK + _PEAK_BYTES + mean
