"""What one agent should have, said it has, uses, and last refused: four things that are never mixed up.

```
            publish                    send (nonce n)                ACK n
 settled ───────────► wanting ───────────────────────► waiting ───────────────► settled
    ▲                    ▲                                │
    │                    │ after 1, 2, 4 ... 300 s        │ NACK n
    │                    └──────────── refused ◄──────────┘
    └── a new stream starts at wanting, whatever was acknowledged on the old one
```
While the agent keeps refusing, new versions wait for the same backoff, so that a publisher cannot make it hot. A nonce
lives on one stream; an answer that carries another nonce than the last one sent is late, and changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controld.fleet.published import Published

NACK_BACKOFF_FIRST_S = 1.0
NACK_BACKOFF_MAX_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A version that an agent refused, with its words."""

    version: int
    error: str
    resource: str
    at_unix_s: float
    attempts: int


class Answer(StrEnum):
    """What became of an ACK or NACK."""

    TAKEN = "taken"
    LATE = "late"
    WRONG_VERSION = "wrong_version"
    NO_ERROR_DETAIL = "no_error_detail"


class Delivery:
    """State of one agent instance, over all of its streams. Times are monotonic seconds.

    Attributes:
        acked: the last version that it acknowledged; 0: none.
        effective: the version that it says it draws from; 0: none. Nothing is inferred from `acked`.
        last_failed: the last refusal; kept after a later success, for the operator.
    """

    def __init__(self) -> None:
        self._published: Published | None = None
        self._in_flight: tuple[str, Published] | None = None
        self._acked_on_stream: Published | None = None
        self._names_sent: set[str] = set()
        self._refusals = 0
        self._not_before_s = 0.0
        self.acked = 0
        self.effective = 0
        self.last_failed: Failure | None = None

    @property
    def desired(self) -> int:
        """The version that it should have; 0: none was published for it."""
        return self._published.version if self._published is not None else 0

    @property
    def degraded(self) -> bool:
        """Whether it refuses what it should have."""
        return self._refusals > 0

    @property
    def artefacts_held(self) -> dict[str, str]:
        """SHA-256 by name of the artefacts acknowledged on this stream."""
        if self._acked_on_stream is None:
            return {}
        return {
            resource.name: resource.artefact_sha256
            for resource in self._acked_on_stream.resources
            if resource.artefact_sha256 is not None
        }

    @property
    def names_sent(self) -> frozenset[str]:
        """All resource names sent on this stream."""
        return frozenset(self._names_sent)

    def new_stream(self) -> None:
        """Forget nonces and what was sent; the first snapshot of a stream says everything."""
        self._in_flight = None
        self._acked_on_stream = None
        self._names_sent.clear()

    def want(self, published: Published) -> None:
        """A version was published for this agent."""
        self._published = published

    def due(self, now_s: float) -> Published | None:
        """What should be sent now."""
        published = self._published
        if published is None or now_s < self._not_before_s:
            return None
        if published is self._acked_on_stream:
            return None
        if self._in_flight is not None and self._in_flight[1] is published:
            return None
        return published

    def wait_s(self, now_s: float) -> float | None:
        """How long until the backoff is over; None where there is none."""
        return self._not_before_s - now_s if now_s < self._not_before_s else None

    def sent(self, nonce: str, published: Published) -> None:
        """All pages of a snapshot are about to be written under this nonce."""
        self._in_flight = (nonce, published)
        self._names_sent |= published.names

    def ack(self, nonce: str, version: int) -> Answer:
        """The agent applied a snapshot."""
        if self._in_flight is None or self._in_flight[0] != nonce:
            return Answer.LATE
        published = self._in_flight[1]
        if published.version != version:
            return Answer.WRONG_VERSION
        self._in_flight = None
        self._acked_on_stream = published
        self.acked = version
        self._refusals = 0
        self._not_before_s = 0.0
        return Answer.TAKEN

    def nack(
        self, nonce: str, version: int, error_detail: str, resource: str, *, now_s: float, now_unix_s: float
    ) -> Answer:
        """The agent refused a snapshot and keeps what it had."""
        if not error_detail:
            return Answer.NO_ERROR_DETAIL
        if self._in_flight is None or self._in_flight[0] != nonce:
            return Answer.LATE
        if self._in_flight[1].version != version:
            return Answer.WRONG_VERSION
        self._in_flight = None
        self._refusals += 1
        # The exponent is bounded: a float overflows at 2^1024.
        backoff_s = min(NACK_BACKOFF_FIRST_S * 2.0 ** min(self._refusals - 1, 30), NACK_BACKOFF_MAX_S)
        self._not_before_s = now_s + backoff_s
        self.last_failed = Failure(
            version=version,
            error=error_detail,
            resource=resource,
            at_unix_s=now_unix_s,
            attempts=self._refusals,
        )
        return Answer.TAKEN
