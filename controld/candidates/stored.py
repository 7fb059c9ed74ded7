"""Profiles as they lie in the store: those that can be read, and the rows that cannot, by name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controld.candidates.exchange import profile_identity
from controld.candidates.profile import Profile
from controld.candidates.video_profile import is_video_document
from controld.contract.errors import FieldError
from controld.store.records import ProfileKey, ProfileRecord

_SHOWN_FINGERPRINT = 12


@dataclass(frozen=True, slots=True)
class UnreadableProfile:
    """A row of the store that is no profile."""

    key: ProfileKey
    problem: str

    @property
    def where(self) -> str:
        """The row, as a person looks for it."""
        key = self.key
        places = key.sender_hardware
        if key.sender_hardware != key.receiver_hardware:
            places = f"{key.sender_hardware} -> {key.receiver_hardware}"
        where = (
            f"profile {key.config_id} of workload {key.workload}, model {key.model_fingerprint[:_SHOWN_FINGERPRINT]}"
        )
        return f"{where}, {places}" if places else where

    @property
    def what(self) -> str:
        """What is wrong with it, and the way out."""
        return f"left out, it cannot be read: {self.problem}; measure or import it again"


@dataclass(frozen=True, slots=True)
class StoredProfiles:
    """What the rows of a store are."""

    profiles: tuple[Profile, ...]
    unreadable: tuple[UnreadableProfile, ...]


class StoredProfileReader:
    """Reads rows, each document once: a row that is as it was at the last reading costs a look-up."""

    def __init__(self) -> None:
        self._known: dict[ProfileRecord, Profile | UnreadableProfile] = {}

    def read(self, records: Iterable[ProfileRecord], *, workload: str | None = None) -> StoredProfiles:
        """What these rows are.

        Args:
            records: every row of the store; what is not among them is forgotten.
            workload: only rows of this one are returned.
        """
        known = self._known
        records = [record for record in records if not is_video_document(record.document)]
        self._known = {record: known.get(record) or _read(record) for record in records}
        wanted = [one for record, one in self._known.items() if workload in (None, record.key.workload)]
        return StoredProfiles(
            profiles=tuple(one for one in wanted if isinstance(one, Profile)),
            unreadable=tuple(one for one in wanted if isinstance(one, UnreadableProfile)),
        )


def _read(record: ProfileRecord) -> Profile | UnreadableProfile:
    try:
        profile = Profile.from_json(record.document)
    except FieldError as error:
        return UnreadableProfile(record.key, str(error))
    key = record.key
    if profile_identity(profile) != (
        key.model_fingerprint,
        key.workload,
        key.config_id,
        key.sender_hardware,
        key.receiver_hardware,
    ):
        return UnreadableProfile(key, "its document is of another configuration or place")
    return profile
