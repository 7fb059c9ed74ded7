"""KV codecs: transform -> quantise -> code, and frames on the wire. See `codec` for the interface."""

from dataplanes.kvcodec.codec import DecodedFrame, KVCodec, decode_frame, peek_header
from dataplanes.kvcodec.errors import CodecError, FrameError, FrameErrorReason
from dataplanes.kvcodec.frame import FrameHeader
from dataplanes.kvcodec.head_profile import HeadProfile
from dataplanes.kvcodec.layout import KVDtype, KVLayout, Plane, PlaneRole

__all__ = [
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
    "decode_frame",
    "peek_header",
]
