"""Counters by bounded names."""

from __future__ import annotations

import re
from collections import Counter

_INDEX = re.compile(r"\[.*\]", re.DOTALL)


class Tally:
    """Counts by (name, label). A label is a field or a code; indices are cut, so that there are only so many.

    Args:
        parent: counts everything, too.
    """

    def __init__(self, parent: Tally | None = None) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._parent = parent

    def add(self, name: str, label: str = "", count: int = 1) -> None:
        """Count something."""
        self._counts[name, _INDEX.sub("[]", label)] += count
        if self._parent is not None:
            self._parent.add(name, label, count)

    def labelled(self) -> dict[tuple[str, str], int]:
        """A copy, by (name, label)."""
        return dict(self._counts)

    def flat(self) -> dict[str, int]:
        """A copy, by `name` or `name.label`."""
        return {f"{name}.{label}" if label else name: count for (name, label), count in self._counts.items()}
