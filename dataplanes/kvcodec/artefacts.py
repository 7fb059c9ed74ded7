"""The calibrated artefacts that a process holds, by id, and what they look like as files.

A file is a safetensors file `<id>.safetensors` whose metadata has one entry, `controld`: a JSON object that names at
least the model (`model_fingerprint`). That much is all that controld itself reads of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from dataplanes.kvcodec.errors import CodecError
from dataplanes.kvcodec.head_profile import HeadProfile
from dataplanes.kvcodec.layout import KVLayout
from dataplanes.kvcodec.predictive.artefact import FILE_SUFFIX, METADATA_KEY, ArtefactError, PredictiveArtefact

Artefact = PredictiveArtefact | HeadProfile

_HEAD_PROFILE: Final = "head_profile"


def id_of(artefact: Artefact) -> str:
    """What configurations and frames call it."""
    return artefact.profile_id if isinstance(artefact, HeadProfile) else artefact.artefact_id


def misfit(artefact: Artefact, layout: KVLayout) -> str:
    """Why it is not for this layout; empty where it is."""
    if isinstance(artefact, PredictiveArtefact):
        return artefact.fits(layout)
    try:
        artefact.check_layout(layout)
    except CodecError as error:
        return error.message
    return ""


def save_head_profile(profile: HeadProfile, folder: Path, model_fingerprint: str) -> Path:
    """Write `<folder>/<id>.safetensors`, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{profile.profile_id}{FILE_SUFFIX}"
    unfinished = target.with_suffix(".partial")
    metadata = {METADATA_KEY: json.dumps({"kind": _HEAD_PROFILE, "model_fingerprint": model_fingerprint})}
    tensors = {"key": torch.from_numpy(profile.key.copy()), "value": torch.from_numpy(profile.value.copy())}
    save_file(tensors, unfinished, metadata=metadata)
    unfinished.replace(target)
    return target


def read_artefact(content: bytes, source: str) -> tuple[Artefact, str]:
    """An artefact of either kind, and the fingerprint of its model.

    Args:
        content: of a file.
        source: where it comes from, for messages.

    Raises:
        ArtefactError: damaged, or of another format.
    """
    try:
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata: dict[str, Any] = json.loads(header["__metadata__"][METADATA_KEY])
        if metadata.get("kind") == _HEAD_PROFILE:
            tensors = load(content)
            profile = HeadProfile(key=tensors["key"].numpy(), value=tensors["value"].numpy())
            return profile, str(metadata["model_fingerprint"])
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ArtefactError(f"{source} is no codec artefact: {error!r}", code="codec.artefact_damaged") from error
    except CodecError as error:
        raise ArtefactError(f"{source}: {error.message}", code="codec.artefact_damaged") from error
    artefact = PredictiveArtefact.from_bytes(content, source)
    return artefact, artefact.model_fingerprint


def load_artefact(path: Path) -> tuple[Artefact, str]:
    """The same from a file, which must have the artefact's name.

    Raises:
        ArtefactError: unreadable, damaged, of another format, or its content is not what its name says.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtefactError(f"{path} cannot be read: {error}", code="codec.artefact_damaged") from error
    artefact, fingerprint = read_artefact(content, str(path))
    if id_of(artefact) != path.stem:
        raise ArtefactError(
            f"{path} holds the artefact {id_of(artefact)}",
            code="codec.artefact_damaged",
            hint="calibrate again, or copy the file again",
        )
    return artefact, fingerprint


class ArtefactShelf(Mapping[str, object]):
    """Artefacts by id. Adding is safe beside readers in other threads; nothing is ever changed or taken away."""

    def __init__(self) -> None:
        self._held: dict[str, Artefact] = {}

    @classmethod
    def of_folder(cls, folder: Path, model_fingerprint: str) -> ArtefactShelf:
        """The artefacts of one model in a folder; none where there is no such folder. Other models' are left out.

        Raises:
            ArtefactError: a file is damaged.
        """
        shelf = cls()
        for path in sorted(folder.glob(f"*{FILE_SUFFIX}")):
            artefact, fingerprint = load_artefact(path)
            if fingerprint == model_fingerprint:
                shelf.add(artefact)
        return shelf

    def add(self, artefact: Artefact) -> None:
        """Hold one more."""
        self._held = {**self._held, id_of(artefact): artefact}

    def __getitem__(self, artefact_id: str) -> Artefact:
        return self._held[artefact_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
