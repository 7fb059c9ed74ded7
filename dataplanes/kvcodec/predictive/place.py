"""Where a chunk stands in its request, and what that means for how finely its tokens are coded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

FIRST, SINK, ORDINARY = 0, 1, 2
"""Position classes; those behind them are the bands at a request's end, the outermost first."""

SINK_TOKENS: Final = 4
"""Tokens of the first two classes: attention leans on them, and their values are unlike the rest."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk stands.

    Args:
        first_token: position in the request of its first token.
        request_tokens: length of the request; 0 where the sender does not know it.
    """

    first_token: int
    request_tokens: int = 0


def position_classes(place: Place, tokens: int, bands: Sequence[int]) -> Tensor:
    """int64 `[tokens]`: the position class of each token.

    What follows a request leans on its last tokens more than on any but the first: they are coded with a finer step.
    """
    positions = torch.arange(place.first_token, place.first_token + tokens)
    classes = torch.full((tokens,), ORDINARY)
    if place.request_tokens:
        for band in bands:
            classes += (place.request_tokens - positions <= band).long()
    classes[positions < SINK_TOKENS] = SINK
    classes[positions == 0] = FIRST
    return classes
