"""How ranks share one chunk: each has some of its tokens, and in attention some of the heads of all of them.

Source: DeepSpeed Ulysses (Jacobs et al. 2023, arXiv 2309.14509).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Exchange(Protocol):
    """What one rank needs of the others. Every rank calls the same functions in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def sent_bytes(self) -> int:
        """To other ranks, since the start."""
        ...

    def to_heads(self, x: Tensor) -> Tensor:
        """`[batch, tokens / ranks, heads, head_dim]` to `[batch, tokens, heads / ranks, head_dim]`."""
        ...

    def to_tokens(self, x: Tensor) -> Tensor:
        """Undo `to_heads`."""
        ...

    def gather_tokens(self, x: Tensor) -> Tensor:
        """`[tokens / ranks, values]` of each rank to `[tokens, values]` on all."""
        ...

    def largest(self, x: Tensor) -> Tensor:
        """The largest over ranks, element by element."""
        ...


class NoExchange:
    """One rank that has everything."""

    rank = 0
    ranks = 1
    sent_bytes = 0

    def to_heads(self, x: Tensor) -> Tensor:
        return x

    def to_tokens(self, x: Tensor) -> Tensor:
        return x

    def gather_tokens(self, x: Tensor) -> Tensor:
        return x

    def largest(self, x: Tensor) -> Tensor:
        return x
