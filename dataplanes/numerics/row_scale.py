"""One number of a whole tensor or one a row, as kernels read it: they see no more of it than its address."""

from __future__ import annotations

import torch
from torch import Tensor


def require_row_scale(name: str, scale: Tensor, rows: Tensor) -> None:
    """Refuse what kernels would read as other numbers than torch does.

    Args:
        name: of the argument.
        scale: float32 `[1]`, or `[rows, 1]`.
        rows: what it is of, `[rows, n]`.

    Raises:
        ValueError: `scale` is of another shape, type or device, or not contiguous.
    """
    shapes = (1,), (rows.shape[0], 1)
    fits = tuple(scale.shape) in shapes and scale.dtype is torch.float32 and scale.device == rows.device
    if fits and scale.is_contiguous():
        return
    layout, dtype = "contiguous" if scale.is_contiguous() else "strided", str(scale.dtype).removeprefix("torch.")
    raise ValueError(
        f"{name}: {layout} {dtype} {list(scale.shape)} on {scale.device},"
        f" not contiguous float32 [1] or [{rows.shape[0]}, 1] on {rows.device}"
    )
