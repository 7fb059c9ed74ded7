"""What an engine's worker process and its owner say to each other: framed messages over a socket pair.

A frame is eight bytes of length, then a pickle. The reading side builds only the types that the engine's interface
speaks of: a checkout that somebody else wrote runs in the worker, and its owner must not run what it sends.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from controld.contract import configuration, space, video
from dataplanes.longlive import engine

MAX_FRAME_BYTES: Final = 8 << 30
_LENGTH: Final = struct.Struct(">Q")
_DTYPES: Final = {
    name: getattr(torch, name)
    for name in ("uint8", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64")
}


class ChannelClosedError(Exception):
    """The other side is gone, or sent what is no frame."""


@dataclass(frozen=True, slots=True)
class Request:
    """A call of the engine's method; `number` comes back in its answer."""

    number: int
    method: str
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the method returned."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Failure:
    """The method raised; fields of an `EngineError`."""

    number: int
    message: str
    code: str
    hint: str
    applied: tuple[video.Applied, ...] = ()


def _tensor(data: bytes, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=_DTYPES[dtype])
    # A bytearray, because torch refuses to wrap memory that must not be written.
    return torch.frombuffer(bytearray(data), dtype=_DTYPES[dtype]).reshape(shape)


_TYPES: Final[Mapping[tuple[str, str], Any]] = {
    (one.__module__, one.__qualname__): one
    for one in (
        Request,
        Answer,
        Failure,
        _tensor,
        configuration.Configuration,
        space.StrategySpace,
        space.Parameter,
        space.Condition,
        space.Forbidden,
        video.Transition,
        video.TransitionPlan,
        video.Applied,
        video.MemorySplit,
        video.ChunkReport,
        engine.EngineCapabilities,
        engine.LoadSpec,
        engine.SessionSpec,
        engine.ChunkResult,
    )
}


class _Writer(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            flat = value.detach().cpu().contiguous()
            data = flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return _tensor, (data, str(flat.dtype).removeprefix("torch."), tuple(flat.shape))
        if isinstance(value, video.Transition):
            # Python 3.11.0 to 3.11.3 would have the reader call `getattr`.
            return video.Transition, (int(value),)
        return NotImplemented


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _TYPES.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of the engine's interface")
        return known


def encode(message: object) -> bytes:
    """The pickle of a message; tensors travel as bytes, from whichever device."""
    buffer = io.BytesIO()
    _Writer(buffer, protocol=5).dump(message)
    return buffer.getvalue()


def decode(data: bytes | bytearray) -> Any:
    """Read what `encode` wrote.

    Raises:
        ChannelClosedError: not a pickle, or one that names another type.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    # Broken bytes make the unpickler raise nearly anything.
    except Exception as error:
        raise ChannelClosedError(f"a frame cannot be read: {type(error).__name__}: {error}") from error


class Channel:
    """One end of the socket pair; one thread sends and one receives at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(self, message: object, *, timeout_s: float | None = None) -> None:
        """Send one message.

        Raises:
            ChannelClosedError: the other side is gone.
            TimeoutError: it does not take it in time; the channel is of no use then.
        """
        data = encode(message)
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is longer than a frame may be")
        self._connection.settimeout(timeout_s)
        try:
            self._connection.sendall(_LENGTH.pack(len(data)))
            self._connection.sendall(data)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosedError(f"the other side is gone: {error}") from error

    def receive(self, *, timeout_s: float | None = None) -> Any:
        """Wait for one message.

        Raises:
            ChannelClosedError: the other side is gone, or sent what is no message.
            TimeoutError: nothing whole came in time; the channel is of no use then.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if length > MAX_FRAME_BYTES:
            raise ChannelClosedError(f"a frame of {length} bytes is longer than a frame may be")
        return decode(self._read(length, deadline))

    def close(self) -> None:
        """Close this end; the other one reads an end of file."""
        self._connection.close()

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        while filled < size:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError("nothing whole came in time")
            self._connection.settimeout(remaining)
            try:
                count = self._connection.recv_into(view[filled:])
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosedError(f"the other side is gone: {error}") from error
            if not count:
                raise ChannelClosedError("the other side is gone")
            filled += count
        return data
