"""The last policies that were accepted, kept on disk so that a restart neither loses nor renumbers them."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controld.policy.loader import SourceFile

_log = logging.getLogger(__name__)
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class LastGood:
    """What was accepted: its generation, the hash of its meaning, and the files as they were."""

    generation: int
    content_hash: str
    sources: tuple[SourceFile, ...]


class LastGoodFile:
    """One file, replaced atomically. A damaged one is set aside, never trusted and never deleted.

    Args:
        path: where it is; its directory is made when first needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem = ""
        """Why nothing could be read at the last `read`; empty where something was, or nothing was ever written."""

    def read(self) -> LastGood | None:
        """What was saved, or None where nothing (or nothing readable) was."""
        self.problem = ""
        try:
            content = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problem = f"the last good policies cannot be read, so generations begin anew: {error}"
            _log.error("last good policy cannot be read: %s", error)
            return None
        try:
            return _decode(content)
        except (ValueError, KeyError, TypeError) as error:
            aside = self._path.with_suffix(".damaged")
            self.problem = (
                f"the last good policies were damaged ({error}): set aside as {aside}, generations begin anew"
            )
            _log.error("last good policy is damaged and set aside", extra={"file": str(aside), "error": str(error)})
            try:
                self._path.replace(aside)
            except OSError as failure:
                _log.error("it could not be set aside: %s", failure)
            return None

    def write(self, last_good: LastGood) -> None:
        """Replace the file; on return it is on the disk. A disk that refuses is logged: serving goes on."""
        files = [{"file": s.file, "content": s.content.decode("utf-8-sig")} for s in last_good.sources]
        text = json.dumps(
            {
                "format": _FORMAT,
                "generation": last_good.generation,
                "content_hash": last_good.content_hash,
                "files": files,
            }
        )
        temporary = self._path.with_suffix(".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("w", encoding="utf-8") as stream:
                stream.write(text)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            _log.error("last good policy cannot be kept: %s", error, extra={"file": str(self._path)})


def _decode(content: bytes) -> LastGood:
    data: dict[str, Any] = json.loads(content)
    if data["format"] != _FORMAT:
        raise ValueError(f"its format is {data['format']!r}, not {_FORMAT}")
    generation, content_hash = data["generation"], data["content_hash"]
    if type(generation) is not int or generation < 1 or not isinstance(content_hash, str):
        raise ValueError("its generation or hash is not one")
    sources = tuple(SourceFile(str(entry["file"]), str(entry["content"]).encode()) for entry in data["files"])
    return LastGood(generation, content_hash, sources)
