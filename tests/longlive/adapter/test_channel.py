"""Frames between a worker and its owner, and what a reader refuses."""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Iterator

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.video import Applied, Transition
from dataplanes.longlive.adapter.channel import Answer, Channel, ChannelClosedError, Request, decode, encode
from dataplanes.longlive.engine import LoadSpec


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(24, dtype=torch.uint8).reshape(2, 2, 2, 3),
        torch.randn(3, 5).bfloat16().t(),
        torch.empty((0, 7, 3), dtype=torch.uint8),
        torch.tensor(2.5, dtype=torch.float64),
    ],
)
def test_tensors_arrive_as_they_were_whatever_their_strides(value: torch.Tensor) -> None:
    back = decode(encode(Answer(1, value))).value
    assert back.dtype == value.dtype
    assert back.shape == value.shape
    assert torch.equal(back, value)


def test_the_interface_s_own_types_arrive_equal() -> None:
    setting = Configuration({"weights": "nvfp4", "steps": 4})
    applied = Applied(
        version=1,
        setting_id=setting.config_id,
        chunk=0,
        transition=Transition.KV_REBUILD,
        seconds=0.5,
        keeps_kv=False,
        refused={"kv": "no"},
    )
    message = Request(3, "load", (LoadSpec(checkpoint="x", setting=setting), applied), {"at_chunk": None})
    back = decode(encode(message))
    assert back == message
    assert back.arguments[0].setting.config_id == setting.config_id


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return __import__("os").system, ("true",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps(print),
        b"",
        b"\x80\x05garbage",
        encode(Answer(1, [1, 2]))[:-4],
    ],
)
def test_what_is_no_message_is_refused_and_nothing_of_it_is_run(data: bytes) -> None:
    with pytest.raises(ChannelClosedError, match="cannot be read"):
        decode(data)


def test_a_type_that_is_not_the_interface_s_is_named() -> None:
    with pytest.raises(ChannelClosedError, match=r"system is not part of the engine's interface"):
        decode(pickle.dumps(Evil()))


def test_an_absurd_length_is_refused_before_memory_is_asked_for(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(struct.pack(">Q", 1 << 60))
    with pytest.raises(ChannelClosedError, match="longer than a frame may be"):
        channel.receive(timeout_s=5)


def test_an_end_in_the_middle_of_a_frame_is_an_end(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(struct.pack(">Q", 100) + b"half")
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosedError, match="gone"):
        channel.receive(timeout_s=5)


def test_silence_ends_at_the_deadline(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(struct.pack(">Q", 100) + b"half")
    with pytest.raises(TimeoutError):
        channel.receive(timeout_s=0.05)
