"""What is known of a request when only its bootstrap room is at hand."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

_KEPT: Final = 20_000
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_ID_CHARACTERS: Final = 48


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """A request as the scheduler saw it.

    Args:
        request_id: SGLang's `rid`, which a client may choose.
        extra_key: the client's, or None.
        priority: the client's, or None.
        prompt_tokens: length of the whole prompt.
    """

    request_id: str
    extra_key: str | None
    priority: int | None
    prompt_tokens: int


class RequestBook:
    """Facts by room, the newest 20,000; written by the scheduler's thread, read by the transfer workers."""

    def __init__(self) -> None:
        self._facts: OrderedDict[int, RequestFacts] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, room: int, facts: RequestFacts) -> None:
        """A request got its room; a room used again belongs to the newer request."""
        with self._lock:
            self._facts[room] = facts
            self._facts.move_to_end(room)
            while len(self._facts) > _KEPT:
                self._facts.popitem(last=False)

    def find(self, room: int) -> RequestFacts | None:
        """The facts of a room, or None where nothing was noted."""
        with self._lock:
            return self._facts.get(room)

    def forget(self, room: int) -> None:
        """The request's transfer is over."""
        with self._lock:
            self._facts.pop(room, None)


def transfer_id_of(facts: RequestFacts | None, *, room: int, receiver: str) -> str:
    """A name for a transfer that is safe in a URL: request, room and receiver.

    Args:
        receiver: the receiver's engine session, `host:port`; told apart by its port.
    """
    request = _UNSAFE.sub("_", facts.request_id)[:_ID_CHARACTERS] if facts else "room"
    return f"{request}-{room & 0xFFFFFFFF:08x}-{receiver.rsplit(':', 1)[-1]}"
