"""What SGLang has queued: each request counts as offered load from its first chunk until it is drawn or given up."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from controld.contract.clock import Clock
from controld.contract.decision import DEFAULT_CLASS
from dataplanes.sglang.pd.page_sizes import PageSizes
from dataplanes.sglang.pd.ports import PlaneAgent
from dataplanes.sglang.pd.requests import RequestBook
from dataplanes.sglang.pd.transfer import LINK_GROUP, TIER

MAX_OPEN: Final = 10_000


@dataclass(slots=True)
class Offer:
    """One queued request.

    Args:
        tokens: of its whole prompt.
        raw_bytes: of the pages that hold them.
        offered_s: when SGLang queued its first chunk; monotonic.
        is_begun: whether a transfer was drawn for it; from then on its effects take it off the offered load.
    """

    service_class: str
    tokens: int
    raw_bytes: int
    offered_s: float
    is_begun: bool = False


class OfferBook:
    """The queued requests by room, and their class. Used by the scheduler's thread and by all workers."""

    def __init__(self, *, agent: PlaneAgent, clock: Clock, requests: RequestBook, sizes: PageSizes) -> None:
        self._agent = agent
        self._clock = clock
        self._requests = requests
        self._sizes = sizes
        self._offers: OrderedDict[int, Offer] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._offers)

    def add(self, room: int, pages: int) -> None:
        """SGLang queued a chunk of so many pages; the first one counts for the whole request."""
        with self._lock:
            if room in self._offers:
                return
        facts = self._requests.find(room)
        if facts is None:
            self._agent.count("pd.request_unknown")
        service_class = self._agent.classify(
            extra_key=facts.extra_key if facts else None, priority=facts.priority if facts else None
        )
        tokens = facts.prompt_tokens if facts else pages * self._sizes.page_tokens
        raw_bytes = self._sizes.raw_bytes(tokens)
        forgotten = None
        with self._lock:
            self._offers[room] = Offer(service_class, tokens, raw_bytes, self._clock.monotonic_s())
            if len(self._offers) > MAX_OPEN:
                _, forgotten = self._offers.popitem(last=False)
        self._agent.offered(tier=TIER, link_group=LINK_GROUP, raw_bytes=raw_bytes, service_class=service_class)
        if forgotten is not None:
            self._withdraw(forgotten)

    def class_of(self, room: int) -> str:
        """The service class of a queued request, the default one's of any other."""
        with self._lock:
            offer = self._offers.get(room)
        return DEFAULT_CLASS if offer is None else offer.service_class

    def begin(self, room: int) -> Offer | None:
        """A transfer is drawn for a request; None for one that was never offered."""
        with self._lock:
            offer = self._offers.get(room)
            if offer is not None:
                offer.is_begun = True
        return offer

    def close(self, room: int) -> None:
        """SGLang is done with a request; one that was never begun is withdrawn from the offered load."""
        with self._lock:
            offer = self._offers.pop(room, None)
        if offer is not None:
            self._withdraw(offer)

    def older_than(self, age_s: float, now_s: float) -> list[int]:
        """Rooms of the requests that were queued longer ago."""
        with self._lock:
            return [room for room, offer in self._offers.items() if now_s - offer.offered_s > age_s]

    def _withdraw(self, offer: Offer) -> None:
        if not offer.is_begun:
            self._agent.withdrawn(
                tier=TIER, link_group=LINK_GROUP, raw_bytes=offer.raw_bytes, service_class=offer.service_class
            )
