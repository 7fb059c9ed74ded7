"""Calibrated artefacts on the daemon's disk: found by id, read once, handed to planes as they are.

The daemon does not know what is in them. Their name, the model and the hash of the bytes are all that it needs; what
they mean, the plane checks that uses them.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Final

from controld.contract.errors import ControldError, FieldError
from controld.contract.snapshot import CalibratedArtefact
from controld.planning.plane import Place

_log = logging.getLogger(__name__)

SUFFIX: Final = ".safetensors"
_MAX_BYTES: Final = 200 * 1024 * 1024
_MAX_HEADER_BYTES: Final = 16 * 1024 * 1024
_METADATA_KEY: Final = "controld"


class ArtefactFolder:
    """The files `<id>.safetensors` of a folder; what was read stays in memory until the file changes.

    Args:
        folder: need not exist, now or ever; None: there is none.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._read: dict[str, tuple[tuple[int, int], CalibratedArtefact]] = {}
        self._refused: dict[str, tuple[int, int]] = {}

    def find(self, ids: Collection[str], place: Place) -> dict[str, CalibratedArtefact]:
        """Those of the ids that are here and of the place's model; one that cannot be read is logged and left out."""
        found: dict[str, CalibratedArtefact] = {}
        for artefact_id in ids:
            artefact = self._one(artefact_id)
            if artefact is not None and artefact.model_fingerprint == place.model_fingerprint:
                found[artefact_id] = artefact
        return found

    def _one(self, artefact_id: str) -> CalibratedArtefact | None:
        # Ids come from profiles: one with a path in it names nothing here.
        if self._folder is None or not artefact_id.isalnum():
            return None
        path = self._folder / f"{artefact_id}{SUFFIX}"
        try:
            status = path.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            known = self._read.get(artefact_id)
            if known is not None and known[0] == stamp:
                return known[1]
            if self._refused.get(artefact_id) == stamp:
                return None
            artefact = read_artefact(path)
        except FileNotFoundError:
            return None
        except (OSError, ControldError) as error:
            _log.error("artefact %s left out: %s", artefact_id, error)
            if isinstance(error, ControldError):
                self._refused[artefact_id] = stamp
            return None
        self._read[artefact_id] = (stamp, artefact)
        return artefact


def read_artefact(path: Path) -> CalibratedArtefact:
    """A file as agents get it.

    Raises:
        OSError: it cannot be read.
        FieldError: it is no safetensors file of ours, or larger than a snapshot may be.
    """
    if path.stat().st_size > _MAX_BYTES:
        raise FieldError("artefact", f"{path} is larger than {_MAX_BYTES} bytes")
    content = path.read_bytes()
    try:
        length = int.from_bytes(content[:8], "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, len(content) - 8):
            raise ValueError("no header")
        metadata = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][_METADATA_KEY])
        fingerprint = metadata["model_fingerprint"]
        if not isinstance(fingerprint, str):
            raise TypeError("no fingerprint")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FieldError("artefact", f"{path} is no calibrated artefact: {error!r}") from error
    return CalibratedArtefact(hashlib.sha256(content).hexdigest(), fingerprint, content)
