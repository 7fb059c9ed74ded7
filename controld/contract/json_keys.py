"""Keys of JSON objects that were parsed from outside."""

from __future__ import annotations

from collections.abc import Iterable


def repeated_key(pairs: Iterable[tuple[str, object]]) -> str | None:
    """The first key that was there before, None where each is there once; one pass, as a document may be hostile."""
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            return name
        seen.add(name)
    return None
