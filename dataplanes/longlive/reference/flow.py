"""Flow matching: from noise to data along straight lines, in a few steps.

Source: Lipman et al., "Flow Matching for Generative Modeling" (2023, arXiv 2210.02747) in its rectified form. The shift
of noise levels towards noise is that of Esser et al. (2024, arXiv 2403.03206, section 5.3.2), as in Wan and LongLive.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHIFT = 5.0
"""How far levels are shifted, as LongLive ships it; the middle of the way is at SHIFT / (1 + SHIFT)."""


def shifted(level: Tensor) -> Tensor:
    """Levels in [0, 1], moved towards 1."""
    return SHIFT * level / (1 + (SHIFT - 1) * level)


def levels(steps: int) -> list[float]:
    """The noise levels of `steps` steps, from 1 to 0: `steps + 1` of them."""
    return [float(level) for level in shifted(torch.linspace(1.0, 0.0, steps + 1, dtype=torch.float64))]


def mix(data: Tensor, noise: Tensor, level: Tensor) -> Tensor:
    """The point at `level` between data (0) and noise (1)."""
    return data * (1 - level) + noise * level


def denoise_step(x: Tensor, level: float, next_level: float, velocity: Callable[[Tensor, float], Tensor]) -> Tensor:
    """One Euler step of dx/dlevel = velocity."""
    return x + (next_level - level) * velocity(x, level)
