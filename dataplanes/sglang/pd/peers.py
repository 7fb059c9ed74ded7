"""Receivers that announced this plane, and the staging slots that they lend."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from controld.contract.clock import Clock
from dataplanes.sglang.pd.messages import Capability, Endpoint, Grant, Open

Messenger = Callable[[Endpoint, list[bytes]], None]
"""Sends one of our messages to a peer's manager."""

GRANT_PATIENCE_S: Final = 2.0
_LEASE_MARGIN: Final = 0.5
_REFUSAL_S: Final = 5.0
"""A receiver without slots to lend, or without an answer, is not asked again for so long."""


@dataclass(slots=True)
class _Peer:
    endpoint: Endpoint
    capability: Capability
    grant: Grant | None = None
    grant_used_s: float = 0.0
    asked_nonce: int | None = None
    refused_until_s: float = float("-inf")
    changed: threading.Condition = field(default_factory=threading.Condition)


class Peers:
    """Receivers by engine session. Any thread.

    Args:
        message: sends to a peer.
        reply_to: where their answers go.
        wanted_slots: how many to ask for.
    """

    def __init__(self, clock: Clock, message: Messenger, reply_to: Endpoint, wanted_slots: int) -> None:
        self._clock = clock
        self._message = message
        self._reply_to = reply_to
        self._wanted_slots = wanted_slots
        self._peers: dict[str, _Peer] = {}

    def announce(self, session: str, endpoint: Endpoint, capability: Capability | None) -> None:
        """A receiver registered, with or without this plane; slots are asked for at once, so that none waits later."""
        if capability is None:
            self._peers.pop(session, None)
            return
        peer = self._peers[session] = _Peer(endpoint, capability)
        with peer.changed:
            self._ask(peer)

    def find(self, session: str) -> tuple[Endpoint, Capability] | None:
        """Where a receiver listens and what it announced; None for one without this plane."""
        peer = self._peers.get(session)
        return (peer.endpoint, peer.capability) if peer else None

    def take_grant(self, grant: Grant) -> None:
        """A receiver answered."""
        for peer in list(self._peers.values()):
            with peer.changed:
                if peer.asked_nonce == grant.nonce:
                    now_s = self._clock.monotonic_s()
                    peer.asked_nonce = None
                    peer.grant = grant
                    peer.grant_used_s = now_s
                    if not grant.addresses:
                        peer.refused_until_s = now_s + _REFUSAL_S
                    peer.changed.notify_all()
                    return

    def grant(self, session: str) -> Grant | None:
        """The slots held at a receiver, asking and waiting briefly where none are; None where it lends none."""
        peer = self._peers.get(session)
        if peer is None:
            return None
        with peer.changed:
            if not self._is_usable(peer):
                if self._clock.monotonic_s() < peer.refused_until_s:
                    return None
                if peer.asked_nonce is None:
                    self._ask(peer)
                if not peer.changed.wait_for(lambda: peer.asked_nonce is None, GRANT_PATIENCE_S):
                    # The answer may be lost; the next transfer after a while asks again.
                    peer.asked_nonce = None
                    peer.refused_until_s = self._clock.monotonic_s() + _REFUSAL_S
            if peer.grant is None or not self._is_usable(peer):
                return None
            peer.grant_used_s = self._clock.monotonic_s()
            return peer.grant

    def drop_grant(self, session: str) -> None:
        """Use these slots no more: a chunk in them was given up and may still be read."""
        peer = self._peers.get(session)
        if peer is not None:
            with peer.changed:
                peer.grant = None

    def _ask(self, peer: _Peer) -> None:
        peer.grant = None
        peer.asked_nonce = secrets.randbits(64)
        request = Open(nonce=peer.asked_nonce, wanted_slots=self._wanted_slots, reply_to=self._reply_to)
        self._message(peer.endpoint, request.to_frames())

    def _is_usable(self, peer: _Peer) -> bool:
        if peer.grant is None or not peer.grant.addresses:
            return False
        return self._clock.monotonic_s() - peer.grant_used_s < peer.grant.lease_s * _LEASE_MARGIN
