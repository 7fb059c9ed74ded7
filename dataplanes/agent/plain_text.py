"""Texts as the protocol takes them: bounded, printable, encodable. Reasons and details often quote foreign errors."""

from __future__ import annotations

MAX_CHARACTERS = 2000


def plain_text(text: object, limit: int = MAX_CHARACTERS) -> str:
    """`text` in one line of at most `limit` characters, with `?` for what cannot be printed or encoded."""
    words = " ".join(str(text).split())[:limit]
    return words if words.isprintable() else "".join(c if c.isprintable() else "?" for c in words)
