"""Profiles as they lie in the store: those that can be read, and the rows that cannot, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from controld.candidates.profile import Profile
from controld.candidates.video_exchange import video_key
from controld.candidates.video_profile import VideoProfile, is_video_document
from controld.contract.errors import FieldError
from controld.store.records import ProfileKey, ProfileRecord

LEAST_FINGERPRINT = 8
"""So many characters of a model's fingerprint may stand for all of it: tables show twelve."""

_SHOWN_FINGERPRINT = 12


class ProfileKind(StrEnum):
    """What a profile is of."""

    KV = "kv"
    VIDEO = "video"


def kind_of(record: ProfileRecord) -> ProfileKind:
    """Of a row; one that cannot be read at all is taken to be a KV profile's."""
    return ProfileKind.VIDEO if is_video_document(record.document) else ProfileKind.KV


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileFilter:
    """Which rows; None matches all, what is given must all match.

    Args:
        model: a fingerprint, or at least its first `LEAST_FINGERPRINT` characters.
        hardware: of either side.
    """

    kind: ProfileKind | None = None
    workload: str | None = None
    model: str | None = None
    hardware: str | None = None
    config_id: str | None = None

    def matches(self, record: ProfileRecord) -> bool:
        """Whether it is one of them, readable or not."""
        key = record.key
        return (
            self.workload in (None, key.workload)
            and self.config_id in (None, key.config_id)
            and self.hardware in (None, key.sender_hardware, key.receiver_hardware)
            and self._is_model(key.model_fingerprint)
            and (self.kind is None or self.kind is kind_of(record))
        )

    def _is_model(self, fingerprint: str) -> bool:
        if self.model in (None, fingerprint):
            return True
        return len(self.model or "") >= LEAST_FINGERPRINT and fingerprint.startswith(self.model or "")


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
        return f"left out, it cannot be read: {self.problem}; measure or import it again, or delete it"


_Kept = TypeVar("_Kept")


@dataclass(frozen=True, slots=True)
class StoredProfiles(Generic[_Kept]):
    """What the rows of one kind are."""

    profiles: tuple[_Kept, ...]
    unreadable: tuple[UnreadableProfile, ...]


class ProfileReader(Generic[_Kept]):
    """Reads the rows of one kind, each document once: a row that is as it was at the last reading costs a look-up.

    Args:
        kind: other rows are passed over.
        from_json: a document's profile; may raise `FieldError`.
        key_of: where a profile belongs.
    """

    def __init__(
        self, kind: ProfileKind, from_json: Callable[[str], _Kept], key_of: Callable[[_Kept], ProfileKey]
    ) -> None:
        self._kind = kind
        self._from_json = from_json
        self._key_of = key_of
        self._known: dict[ProfileRecord, _Kept | UnreadableProfile] = {}

    def read(self, records: Iterable[ProfileRecord], wanted: ProfileFilter = ProfileFilter()) -> StoredProfiles[_Kept]:
        """What these rows are.

        Args:
            records: every row of the store; what is not among them is forgotten.
            wanted: only rows that it matches are returned.
        """
        known = self._known
        ours = [record for record in records if kind_of(record) is self._kind]
        # Threads may read at once: each goes by what it read itself.
        self._known = now = {record: known.get(record) or self._read(record) for record in ours}
        found = [one for record, one in now.items() if wanted.matches(record)]
        return StoredProfiles(
            profiles=tuple(one for one in found if not isinstance(one, UnreadableProfile)),
            unreadable=tuple(one for one in found if isinstance(one, UnreadableProfile)),
        )

    def _read(self, record: ProfileRecord) -> _Kept | UnreadableProfile:
        try:
            profile = self._from_json(record.document)
        except FieldError as error:
            return UnreadableProfile(record.key, str(error))
        if self._key_of(profile) != record.key:
            return UnreadableProfile(record.key, "its document is of another configuration or place")
        return profile


class StoredProfileReader(ProfileReader[Profile]):
    """Reads KV profiles."""

    def __init__(self) -> None:
        super().__init__(ProfileKind.KV, Profile.from_json, profile_key)


class StoredVideoReader(ProfileReader[VideoProfile]):
    """Reads video engines' profiles."""

    def __init__(self) -> None:
        super().__init__(ProfileKind.VIDEO, VideoProfile.from_json, video_key)


def profile_key(profile: Profile) -> ProfileKey:
    """Where the store keeps it."""
    return ProfileKey(
        model_fingerprint=profile.model_fingerprint,
        workload=profile.workload,
        config_id=profile.arm_id,
        sender_hardware=profile.sender_hardware,
        receiver_hardware=profile.receiver_hardware,
    )
