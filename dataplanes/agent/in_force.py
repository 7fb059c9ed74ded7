"""Which snapshot is in force, and until when."""

from __future__ import annotations

import logging

from controld.contract.clock import Clock
from controld.contract.errors import FieldError
from dataplanes.agent.applied import (
    Applied,
    Assembled,
    HoldArtefact,
    ValidateConfiguration,
    apply_snapshot,
    checked_ttl_s,
)
from dataplanes.agent.counters import Counters

_log = logging.getLogger(__name__)


class InForce:
    """The applied state and its lease; written by the stream's thread, read by any thread without a lock.

    `applied` is exchanged by one assignment, so a reader that took it once works on one consistent version. The state
    outlives the stream, and the lease ends on the agent's clock whether the daemon is there or not.
    """

    __slots__ = (
        "_clock",
        "_counters",
        "_hold_artefact",
        "_setting_name",
        "_validate_configuration",
        "applied",
        "lease_ends_s",
    )

    def __init__(
        self,
        clock: Clock,
        counters: Counters,
        validate_configuration: ValidateConfiguration,
        hold_artefact: HoldArtefact = lambda artefact: None,
        setting_name: str = "",
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._validate_configuration = validate_configuration
        self._hold_artefact = hold_artefact
        self._setting_name = setting_name
        self.applied = Applied()
        self.lease_ends_s = float("-inf")

    def accept(self, snapshot: Assembled, *, whole: bool) -> None:
        """Apply a snapshot, all of it or nothing.

        Args:
            whole: whether it says everything (the first of a stream) rather than changes.

        Raises:
            SnapshotRefusedError: the last known good stays in force, and its lease runs on.
        """
        received_s = self._clock.monotonic_s()
        onto = Applied() if whole else self.applied
        applied, unknown = apply_snapshot(
            snapshot,
            onto=onto,
            validate_configuration=self._validate_configuration,
            hold_artefact=self._hold_artefact,
            setting_name=self._setting_name,
        )
        self.applied = applied
        self.lease_ends_s = received_s + snapshot.ttl_s
        self._counters.count("snapshots_applied")
        if unknown:
            self._counters.count("resource_kind_unknown", unknown)
        _log.info("applied snapshot %d with %d resources", applied.version, len(applied.resources))

    def renew(self, version: int, ttl_s: float) -> None:
        """Lengthen the lease of the version in force; a renewal of another version says nothing about it.

        Raises:
            FieldError: the time is not positive and finite.
        """
        checked_ttl_s(ttl_s, "lease_renewal.ttl_s")
        if version != self.applied.version or version == 0:
            raise FieldError(
                "lease_renewal.version",
                f"{version} is not in force, {self.applied.version} is",
                code="lease.version",
            )
        self.lease_ends_s = self._clock.monotonic_s() + ttl_s

    def lease_left_s(self) -> float:
        """Seconds for which draws may use the applied state; 0 where there is none."""
        if self.applied.version == 0:
            return 0.0
        return max(0.0, self.lease_ends_s - self._clock.monotonic_s())
