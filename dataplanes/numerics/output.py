"""What may be written by kernels, which see no more of a tensor than its address."""

from __future__ import annotations

import torch
from torch import Tensor


def require_output(out: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Refuse an output that is not what was quantised.

    Raises:
        ValueError: `out` is not contiguous, or of another shape or device.
    """
    if tuple(out.shape) != shape or out.device != device or not out.is_contiguous():
        layout = "contiguous" if out.is_contiguous() else "strided"
        raise ValueError(f"out: {layout} {list(out.shape)} on {out.device}, not contiguous {list(shape)} on {device}")
