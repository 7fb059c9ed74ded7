"""Loads the native kernels: a few C files beside this one.

Why C beside torch: see `dataplanes.native_build`. Without a compiler the reference in `dataplanes.numerics` does the
same work, bit for bit, more slowly.
"""

from __future__ import annotations

import ctypes
import enum
from functools import lru_cache
from pathlib import Path

from dataplanes.native_build import FUSED as _FUSED
from dataplanes.native_build import SAME_AS_REFERENCE as _SAME_AS_REFERENCE
from dataplanes.native_build import load_compiled


class Status(enum.IntEnum):
    """What a kernel returns."""

    DONE = 0
    NOT_EXPRESSIBLE = 1
    NO_MEMORY = 2
    DAMAGED = 3


class PlanesStruct(ctypes.Structure):
    """`kv_planes` of planes.h."""

    _fields_ = (
        ("addresses", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("planes", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class RotationStruct(ctypes.Structure):
    """`kv_rotation` of planes.h."""

    _fields_ = (("block", ctypes.c_int64), ("signs", ctypes.c_void_p), ("norm", ctypes.c_float))


class LevelsStruct(ctypes.Structure):
    """`kv_levels` of kernels.c."""

    _fields_ = (
        ("rotation", RotationStruct),
        ("first_token", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("channel_axis", ctypes.c_int64),
        ("levels", ctypes.c_int64),
        ("per_byte", ctypes.c_int64),
        ("inverse_cells", ctypes.c_float),
        ("smallest_step", ctypes.c_float),
        ("inverse_largest_offset", ctypes.c_float),
    )


class FloatFormatStruct(ctypes.Structure):
    """`kv_float_format` of kernels.c."""

    _fields_ = (
        ("rotation", RotationStruct),
        ("is_nvfp4", ctypes.c_int64),
        ("is_four_over_six", ctypes.c_int64),
        ("per_byte", ctypes.c_int64),
        ("e4m3_values", ctypes.c_void_p),
        ("e2m1_values", ctypes.c_void_p),
        ("scale_per_peak", ctypes.c_float),
        ("smallest_scale", ctypes.c_float),
    )


class LayersStruct(ctypes.Structure):
    """`kv_layers` of predictive.c."""

    _fields_ = (
        ("key_addresses", ctypes.c_void_p),
        ("value_addresses", ctypes.c_void_p),
        ("key_strides", ctypes.c_void_p),
        ("value_strides", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


class PredictorStruct(ctypes.Structure):
    """`kv_predictor` of predictive.c."""

    _fields_ = (
        ("layers", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("max_rank", ctypes.c_int64),
        ("depth", ctypes.c_int64),
        ("bottleneck", ctypes.c_int64),
        ("largest", ctypes.c_float),
        ("gain", ctypes.c_void_p),
        ("narrow", ctypes.c_void_p),
        ("narrow_scale", ctypes.c_void_p),
        ("widen", ctypes.c_void_p),
        ("widen_scale", ctypes.c_void_p),
        ("largest_input", ctypes.c_float),
        ("weight", ctypes.c_void_p),
        ("analysis", ctypes.c_void_p),
        ("analysis_scale", ctypes.c_void_p),
        ("synthesis", ctypes.c_void_p),
        ("mean", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("rotary_dim", ctypes.c_int64),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("first_token", ctypes.c_int64),
        ("request_tokens", ctypes.c_int64),
        ("band_count", ctypes.c_int64),
        ("bands", ctypes.c_void_p),
        ("refinements", ctypes.c_void_p),
        ("step", ctypes.c_float),
        ("dead_zone", ctypes.c_float),
        ("shrink", ctypes.c_float),
    )


class CodedRowsStruct(ctypes.Structure):
    """`kv_coded_rows` of rans.c."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("kinds", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("longest", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("escapes", ctypes.c_void_p),
        ("decoding", ctypes.c_void_p),
        ("encoding", ctypes.c_void_p),
    )


class CodebookStruct(ctypes.Structure):
    """`kv_codebook` of codebooks.c."""

    _fields_ = (
        ("rotation", RotationStruct),
        ("is_absmax", ctypes.c_int64),
        ("alphabet", ctypes.c_int64),
        ("per_byte", ctypes.c_int64),
        ("entries", ctypes.c_void_p),
        ("edges", ctypes.c_void_p),
        ("inverse_last", ctypes.c_float),
        ("inverse_dim", ctypes.c_float),
        ("smallest_scale", ctypes.c_float),
        ("smallest_peak", ctypes.c_float),
    )


@lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """The kernels of number formats, or None (logged once, with the reason) where they cannot be built or loaded."""
    library = _loaded("kernels.c", _SAME_AS_REFERENCE)
    if library is None:
        return None
    planes, pointer = ctypes.POINTER(PlanesStruct), ctypes.c_void_p
    levels, float_format = ctypes.POINTER(LevelsStruct), ctypes.POINTER(FloatFormatStruct)
    library.kv_levels_encode.argtypes = (planes, levels, *(pointer,) * 5)
    library.kv_levels_decode.argtypes = (planes, levels, *(pointer,) * 5)
    library.kv_float_encode.argtypes = (planes, float_format, *(pointer,) * 4)
    library.kv_float_decode.argtypes = (planes, float_format, *(pointer,) * 4)
    library.kv_split_bfloat16.argtypes = (planes, pointer, pointer)
    library.kv_join_bfloat16.argtypes = (planes, pointer, pointer)
    library.kv_split_bfloat16.restype = None
    library.kv_join_bfloat16.restype = None
    return library


@lru_cache(maxsize=1)
def load_predictive_library() -> ctypes.CDLL | None:
    """The kernels of the layer-predictive transform codec, or None as above."""
    library = _loaded("predictive.c", _FUSED)
    if library is None:
        return None
    layers, predictor = ctypes.POINTER(LayersStruct), ctypes.POINTER(PredictorStruct)
    library.kv_predictive_encode.argtypes = (layers, predictor, ctypes.c_void_p)
    library.kv_predictive_decode.argtypes = (layers, predictor, ctypes.c_void_p)
    return library


@lru_cache(maxsize=1)
def load_rans_library() -> ctypes.CDLL | None:
    """The entropy coder of the layer-predictive transform codec, or None as above."""
    library = _loaded("rans.c", _SAME_AS_REFERENCE)
    if library is None:
        return None
    rows, pointer, integer = ctypes.POINTER(CodedRowsStruct), ctypes.c_void_p, ctypes.c_int64
    library.kv_rans_encode.argtypes = (rows, pointer, integer, pointer, integer)
    library.kv_rans_encode.restype = integer
    library.kv_rans_decode.argtypes = (rows, pointer, integer, pointer)
    return library


def has_calibrated_codec() -> bool:
    """Whether the layer-predictive transform codec can run here: it has no other fast path than its kernels."""
    return load_predictive_library() is not None and load_rans_library() is not None


@lru_cache(maxsize=1)
def load_codebook_library() -> ctypes.CDLL | None:
    """The kernels of symmetric levels and the Gaussian codebook, or None as above."""
    library = _loaded("codebooks.c", _SAME_AS_REFERENCE)
    if library is None:
        return None
    planes, codebook = ctypes.POINTER(PlanesStruct), ctypes.POINTER(CodebookStruct)
    library.kv_codebook_encode.argtypes = (planes, codebook, *(ctypes.c_void_p,) * 3)
    library.kv_codebook_decode.argtypes = (planes, codebook, *(ctypes.c_void_p,) * 3)
    return library


@lru_cache(maxsize=1)
def load_splitzip_library() -> ctypes.CDLL | None:
    """The kernels of `dataplanes.kvcodec.splitzip`, or None as above."""
    library = _loaded("splitzip.c", _SAME_AS_REFERENCE)
    if library is None:
        return None
    library.kv_splitzip_encode.argtypes = (ctypes.c_int64, *(ctypes.c_void_p,) * 4)
    library.kv_splitzip_encode.restype = None
    library.kv_splitzip_decode.argtypes = (ctypes.c_int64, *(ctypes.c_void_p,) * 4)
    return library


def _loaded(source: str, contraction: str) -> ctypes.CDLL | None:
    return load_compiled(Path(__file__).with_name(source), contraction)
