"""Which heads matter, and how fast a quantiser's error falls with its bits: what a `HeadProfile` is calibrated from.

An error d of a prompt's KV changes what the model says next by (g d)^2 / 2 on average, g the gradient of the
log-probability of a continuation that the model itself would write (the Fisher information). So a head's share of the
loss at b bits is the sum of g^2 d^2 over its tokens and channels, with the very errors that the quantiser makes.
RateQuant (arXiv 2605.06675) fits amplitude * decay ** -b to it: one decay for the quantiser, an amplitude for each
head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from controld.contract.configuration import Configuration, Value
from dataplanes.kvcodec import HeadProfile, KVCodec, KVLayout, decode_frame
from dataplanes.kvcodec.bit_allocation import fit_decay
from dataplanes.kvcodec.presets import kivi
from dataplanes.sglang.profiler.quality import QualityMeter

BITS: Final = (2, 3, 4, 6)
"""Where the errors are measured."""

SINK_TOKENS: Final = 4
"""First tokens that are left out: they outweigh all others, and codecs that care keep them."""

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class HeadImportance:
    """What was calibrated.

    Args:
        profile: amplitudes of keys and of values, by layer and head.
        decay: by what a bit divides the error: the geometric mean of keys' and values'.
    """

    profile: HeadProfile
    decay: float


def measure_head_importance(
    meter: QualityMeter,
    model: Any,
    windows: Sequence[Tensor],
    layout: KVLayout,
    *,
    prompt_tokens: int,
    group: int = 64,
    seed: int = 0,
) -> HeadImportance:
    """Calibrate on texts that nothing is measured on.

    Args:
        meter: of the model; it prefills.
        model: a causal language model of `transformers`, float32, in evaluation mode.
        windows: rows of token ids, each a prompt and its continuation.
        layout: of the model: keys of all layers, then values.
        prompt_tokens: how many of a window are the prompt.
        group: of KIVI, whose errors are measured.
        seed: of the continuations' sampling.
    """
    planes_count, layers = len(layout.planes), len(layout.planes) // 2
    errors: dict[int, Table] = {bits: np.zeros((planes_count, layout.planes[0].heads)) for bits in BITS}
    generator = torch.Generator().manual_seed(seed)
    for window in windows:
        planes = meter.prefill(window[:prompt_tokens])
        assert isinstance(planes, Tensor)
        weights = _gradients(model, planes, window[prompt_tokens:], generator).square()[:, SINK_TOKENS:]
        for bits in BITS:
            error = (_round_trip(planes, layout, bits, group).float() - planes.float())[:, SINK_TOKENS:]
            errors[bits] += (weights * error.square()).sum((1, 3), dtype=torch.float64).numpy()
    # A head without any error at all has no importance; it keeps a little, so that logarithms exist.
    smallest = min(float(table[table > 0].min()) for table in errors.values())
    tables, decays = [], []
    for part in (slice(0, layers), slice(layers, None)):
        _, decay = fit_decay(BITS, [float(errors[bits][part].sum()) for bits in BITS])
        logs = [np.log(np.maximum(errors[bits][part], smallest)) + bits * math.log(decay) for bits in BITS]
        tables.append(np.exp(np.mean(logs, axis=0)))
        decays.append(decay)
    return HeadImportance(
        HeadProfile(key=tables[0] / tables[0].mean(), value=tables[1] / tables[1].mean()), math.sqrt(math.prod(decays))
    )


def _gradients(model: Any, planes: Tensor, continuation: Tensor, generator: torch.Generator) -> Tensor:
    """Of the log-probability of sampled next tokens, float32 of the planes' shape."""
    from transformers import DynamicCache

    rows = [plane.float().transpose(0, 1).unsqueeze(0).clone().requires_grad_() for plane in planes]
    layers = len(rows) // 2
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(rows[layer], rows[layers + layer], layer)
    log_probs = model(continuation.reshape(1, -1), past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)
    sampled = torch.multinomial(log_probs.detach().exp(), 1, generator=generator)
    gradients = torch.autograd.grad(log_probs.gather(-1, sampled).sum(), rows)
    return torch.stack([gradient[0].transpose(0, 1) for gradient in gradients])


def _round_trip(planes: Tensor, layout: KVLayout, bits: int, group: int) -> Tensor:
    """What a receiver would have after KIVI without a window."""
    values: dict[str, Value] = kivi(layout, levels=1 << bits, group=group, window=0, code="none")
    frame = KVCodec(Configuration(values), layout).encode(planes, first_token=0)
    return torch.as_tensor(decode_frame(frame).planes)
