"""Published figures of LongLive-2.0 as profiles: priors for a person who has measured nothing, never measurements."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

from controld.candidates.video_profile import Source, VideoMemory, VideoProfile
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError

_FILE = "controller/data/longlive_published.json"


def published_document() -> dict[str, Any]:
    """The file: what is published and what is modelled, in fields of their own."""
    document: dict[str, Any] = json.loads(files("controld").joinpath(_FILE).read_text(encoding="utf-8"))
    return document


def published_profiles(device: str) -> tuple[VideoProfile, ...]:
    """The settings that somebody published figures of on this device.

    The loss is the relative drop of the VBench total, another unit than a measured profile's: the two must not be
    compared. Rates are worked out from the published rate of the denoising loop.

    Raises:
        FieldError: nobody did.
    """
    document = published_document()
    if device not in document["devices"]:
        raise FieldError("device", f"{device!r} has no published figures", hint=f"one of {list(document['devices'])}")
    found = document["devices"][device]
    return tuple(_profile(row, device, document["frames_per_chunk"], found["source"]) for row in found["settings"])


def _profile(row: dict[str, Any], device: str, frames: int, source: str) -> VideoProfile:
    published, modelled = row["published"], row["modelled"]
    sizes = {name: modelled[name] for name in ("weights_bytes", "kv_bytes", "activation_bytes")}
    return VideoProfile(
        configuration=Configuration(row["setting"]),
        source=Source.PUBLISHED,
        forward_s=modelled["forward_s"],
        vae_s=modelled["vae_s"],
        frames_per_chunk=frames,
        hardware=device,
        loss_mean=modelled["loss"],
        memory=None if published["memory_bytes"] is None else VideoMemory(**sizes),
        motion=published["dynamic_degree"],
        provenance=f"{row['name']}: {source}; loss: relative drop of the VBench total",
    )
