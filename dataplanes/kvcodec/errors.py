"""What can go wrong with a codec or a frame, as stable codes."""

from __future__ import annotations

import enum

from controld.contract.errors import ControldError


class CodecError(ControldError):
    """A configuration, layout, tensor or buffer that this codec cannot work with: the caller's fault."""


class FrameErrorReason(enum.Enum):
    """Why a receiver refuses a frame; the value travels in its NACK."""

    MAGIC = "magic"
    VERSION = "version"
    TRUNCATED = "truncated"
    CHECKSUM = "checksum"
    METADATA = "metadata"
    CONFIGURATION = "configuration"
    SHAPE = "shape"
    PAYLOAD = "payload"
    TOO_LARGE = "too_large"
    ARTEFACT = "artefact"


class FrameError(ControldError):
    """A frame that must not be used. Nothing of it was written anywhere that a reader would trust.

    Args:
        reason: which check failed.
        message: what was found.
    """

    def __init__(self, reason: FrameErrorReason, message: str) -> None:
        super().__init__(message, code=f"frame.{reason.value}")
        self.reason = reason
