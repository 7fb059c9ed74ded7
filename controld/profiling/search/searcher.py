"""What every search engine does: ask and tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from controld.contract.configuration import Configuration
from controld.profiling.search.observation import Observation, Proposal


class Searcher(Protocol):
    """Proposes what to measure next from what it was told."""

    def ask(self, count: int, pending: Sequence[Configuration] = ()) -> list[Proposal]:
        """At most `count` proposals; none where nothing is left.

        Args:
            pending: lossy parts that are being measured now.
        """
        ...

    def tell(self, observation: Observation) -> None:
        """Take what was measured; replaces what was told of the same lossy part."""
        ...
