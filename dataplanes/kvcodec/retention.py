"""Which tokens each head keeps: budgets by head importance, and tokens by how unlike the others their keys are.

Source: Tangram (arXiv 2606.06302). The order of heads by how much they need is a property of the model, so that budgets
can be set before a request is seen; within its budget a head keeps the first tokens, the last ones, and those that a
score prefers. The score is KeyDiff's: how far a key points away from the mean direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dataplanes.kvcodec.errors import CodecError

Budgets = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What is kept.

    Args:
        share: of all tokens of all heads of a layer, in (0, 1].
        sink_tokens: first tokens that every head keeps.
        recent_tokens: last tokens that every head keeps.

    Raises:
        CodecError: an argument is out of range.
    """

    share: float
    sink_tokens: int = 4
    recent_tokens: int = 32

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 or self.sink_tokens < 0 or self.recent_tokens < 0:
            raise CodecError(f"no such retention: {self}", code="codec.retention")


def head_budgets(importance: NDArray[np.float64], tokens: int, retention: Retention) -> Budgets:
    """Tokens that each head keeps.

    Args:
        importance: positive, `[layers, heads]`.
        tokens: of the request.
        retention: how much in all.

    Returns:
        int64 `[layers, heads]`: every layer keeps as many in all (which keeps planes of all layers equally long), a
        head at least its first and last tokens and at most all; what one cannot take, the others share.

    Raises:
        CodecError: importance is no table of positive numbers.
    """
    if importance.ndim != 2 or not (np.isfinite(importance).all() and (importance > 0).all()):
        raise CodecError("importance is positive and finite, by layer and head", code="codec.retention")
    layers, heads = importance.shape
    least = min(tokens, retention.sink_tokens + retention.recent_tokens)
    total = max(round(retention.share * tokens * heads), least * heads)
    budgets = np.empty((layers, heads), np.int64)
    for layer, weights in enumerate(importance):
        # Scaled shares, clipped, by bisection on the scale; then whole tokens, the largest remainders first.
        low, high = 0.0, tokens / float(weights.min())
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if np.clip(weights * middle, least, tokens).sum() < total else (low, middle)
        exact = np.clip(weights * high, least, tokens)
        whole = np.floor(exact).astype(np.int64)
        missing = total - int(whole.sum())
        order = np.argsort(-(exact - whole), kind="stable")
        for head in [head for head in order if whole[head] < tokens][:missing]:
            whole[head] += 1
        budgets[layer] = whole
    return budgets


def key_difference(keys: Tensor) -> Tensor:
    """KeyDiff's score, float32 `[tokens, heads]`, of keys `[tokens, heads, dim]`: minus the cosine to their mean."""
    directions = torch.nn.functional.normalize(keys.float(), dim=-1)
    mean = torch.nn.functional.normalize(directions.mean(0, keepdim=True), dim=-1)
    return -(directions * mean).sum(-1)


def kept_tokens(keys: Tensor, budgets: Budgets, retention: Retention) -> Tensor:
    """Which tokens each head keeps.

    Args:
        keys: `[layers, tokens, heads, dim]`.
        budgets: as `head_budgets` gives them.
        retention: the same.

    Returns:
        bool `[layers, heads, tokens]`; every head keeps exactly its budget.
    """
    layers, tokens, heads, _ = keys.shape
    kept = torch.zeros(layers, heads, tokens, dtype=torch.bool)
    for layer in range(layers):
        score = key_difference(keys[layer]).T.contiguous()
        score[:, : retention.sink_tokens] = torch.inf
        score[:, max(tokens - retention.recent_tokens, 0) :] = torch.inf
        order = score.argsort(dim=1, descending=True, stable=True)
        for head in range(heads):
            kept[layer, head, order[head, : int(budgets[layer, head])]] = True
    return kept
