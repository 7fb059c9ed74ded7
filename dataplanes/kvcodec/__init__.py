"""KV codecs: transform -> quantise -> code, and frames on the wire. See `codec` for the interface."""

from dataplanes.kvcodec.artefacts import ArtefactShelf
from dataplanes.kvcodec.codec import DecodedFrame, KVCodec, decode_frame, peek_header
from dataplanes.kvcodec.errors import CodecError, FrameError, FrameErrorReason
from dataplanes.kvcodec.frame import FrameHeader
from dataplanes.kvcodec.head_profile import NO_ARTEFACTS, HeadProfile
from dataplanes.kvcodec.layout import KVDtype, KVLayout, Plane, PlaneRole
from dataplanes.kvcodec.predictive import PredictiveArtefact

__all__ = [
    "NO_ARTEFACTS",
    "ArtefactShelf",
    "CodecError",
    "DecodedFrame",
    "FrameError",
    "FrameErrorReason",
    "FrameHeader",
    "HeadProfile",
    "KVCodec",
    "KVDtype",
    "KVLayout",
    "Plane",
    "PlaneRole",
    "PredictiveArtefact",
    "decode_frame",
    "peek_header",
]
