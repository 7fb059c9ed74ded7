"""Profiles of video settings as one JSON document: what a plane's profiler writes and an import reads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from controld.candidates.document import placed, read_json_object, read_profiles, require_format, require_keys
from controld.candidates.video_profile import Source, VideoProfile
from controld.contract.errors import FieldError
from controld.store.records import ProfileKey, ProfileRecord

FORMAT = "controld-video-profiles"
VERSION = 1


def is_video_export(text: str) -> bool:
    """Whether a document says that it is of this format. Raises: FieldError: not a JSON object."""
    return read_json_object(text).get("format") == FORMAT


def export_video_document(profiles: Iterable[VideoProfile]) -> dict[str, Any]:
    """Every profile, as `read_video_profiles` takes it."""
    return {"format": FORMAT, "version": VERSION, "profiles": [profile.to_document() for profile in profiles]}


def read_video_profiles(text: str, *, latest_unix_s: float = math.inf) -> list[VideoProfile]:
    """The profiles of a document.

    Args:
        text: JSON: `format`, `version` and `profiles`, each as `VideoProfile.to_json` writes it.
        latest_unix_s: nothing may be measured after this.

    Raises:
        FieldError: anything in it is not as it must be; the field is named by its path.
    """
    document = read_json_object(text)
    require_keys(document, "", ("format", "version", "profiles"))
    require_format(document, FORMAT, VERSION)
    return read_profiles(document["profiles"], _read_profile, video_key, latest_unix_s=latest_unix_s)


def _read_profile(entry: dict[str, Any], path: str) -> VideoProfile:
    with placed(path):
        profile = VideoProfile.from_document(entry)
    if profile.source is not Source.MEASURED:
        raise FieldError(f"{path}.source", "others' figures are not planned with", hint="measure it here")
    for name in ("workload", "model_fingerprint"):
        if not getattr(profile, name):
            raise FieldError(f"{path}.{name}", "is empty")
    return profile


def video_key(profile: VideoProfile) -> ProfileKey:
    """Where the store keeps it."""
    return ProfileKey(
        model_fingerprint=profile.model_fingerprint,
        workload=profile.workload,
        config_id=profile.setting_id,
        sender_hardware=profile.hardware,
        receiver_hardware=profile.hardware,
    )


def video_records(profiles: Sequence[VideoProfile]) -> list[ProfileRecord]:
    """The rows of profiles."""
    return [
        ProfileRecord(key=video_key(one), document=one.to_json(), updated_unix_s=one.measured_unix_s)
        for one in profiles
    ]
