"""The edge between our code and threads that are SGLang's or must go on: nothing of ours is raised across it."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import Final, Protocol, Self

_log = logging.getLogger(__name__)

END_PATIENCE_S: Final = 3.0
"""How long a thread of ours may take to end; SGLang gives its own as much."""


class Counting(Protocol):
    """Takes counts."""

    def count(self, name: str, n: int = 1) -> None: ...


class Guarded:
    """A block at the edge: an error is logged whole, counted as `pd.exception`, and kept in `error`.

    Args:
        counting: takes the count.
        what: what failed and what happens instead.
    """

    def __init__(self, counting: Counting, what: str) -> None:
        self._counting = counting
        self._what = what
        self.error: Exception | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.error = error
        _log.error("%s", self._what, exc_info=error)
        self._counting.count("pd.exception")
        return True
