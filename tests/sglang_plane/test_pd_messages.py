"""Messages between the two halves: what is written is read, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplanes.sglang.pd.messages import (
    TAG,
    Ack,
    Cancel,
    Capability,
    Chunk,
    Endpoint,
    Finish,
    Grant,
    Message,
    MessageError,
    Open,
    is_ours,
    parse,
)

U64 = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e6, allow_nan=False)
TEXT = st.text(max_size=60)
ENDPOINT = st.builds(Endpoint, host=TEXT, port=st.integers(0, 65535))

MESSAGES = st.one_of(
    st.builds(Open, nonce=U64, wanted_slots=st.integers(1, 1024), reply_to=ENDPOINT),
    st.builds(
        Grant,
        nonce=U64,
        grant_id=U64,
        lease_s=st.floats(0.1, 1e6),
        slot_bytes=U64,
        addresses=st.lists(U64, max_size=8).map(tuple),
    ),
    st.builds(
        Ack,
        sequence=U64,
        refusal=TEXT,
        verify_s=SECONDS,
        decode_s=SECONDS,
        held_s=SECONDS,
        late_s=SECONDS,
    ),
    st.builds(Cancel, sequences=st.lists(U64, max_size=8).map(tuple)),
    st.builds(
        Finish,
        transfer_id=TEXT,
        arm_id=TEXT,
        service_class=TEXT,
        link_group=TEXT,
        path=TEXT,
        reason=TEXT,
        table_version=U64,
        explored=st.booleans(),
    ),
)


def chunk(pages: int = 3, tokens: int = 40) -> Chunk:
    return Chunk(
        sequence=7,
        grant_id=2,
        slot=1,
        frame_bytes=1000,
        room=-5,
        tokens=tokens,
        pages=np.arange(pages, dtype=np.int32),
        transfer_id="r1-2-3",
        reply_to=Endpoint("127.0.0.1", 40000),
    )


@given(MESSAGES)
def test_what_is_written_is_read(message: Message) -> None:
    frames = message.to_frames()
    assert is_ours(frames)
    assert parse(frames) == message


def test_a_chunk_is_read_back() -> None:
    sent = chunk()
    got = parse(sent.to_frames())
    assert isinstance(got, Chunk)
    assert got.pages.tolist() == sent.pages.tolist()
    assert all(
        getattr(got, name) == getattr(sent, name)
        for name in ("sequence", "grant_id", "slot", "frame_bytes", "room", "tokens", "transfer_id", "reply_to")
    )


@given(MESSAGES | st.builds(chunk, pages=st.integers(1, 5)), st.data())
def test_a_message_that_is_not_exactly_right_is_refused(message: Message, data: st.DataObject) -> None:
    frames = message.to_frames()
    at = data.draw(st.integers(1, 2))
    broken = data.draw(
        st.sampled_from([frames[:-1], [*frames, b""], [*frames[:at], frames[at][:-1], *frames[at + 1 :]]])
    )
    if broken[1:] == [b"cancel", b""]:
        return  # an empty cancel stays one
    with pytest.raises(MessageError):
        parse(broken)


@pytest.mark.parametrize(
    "frames",
    [[], [TAG], [TAG, b"open"], [TAG, b"party", b""], [b"None", b"open", b""], [TAG, b"ack", b"x" * 48, b"\xff"]],
)
def test_foreign_and_malformed_messages_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MessageError):
        parse(frames)


def test_a_nan_in_an_answer_is_refused() -> None:
    ack = Ack(sequence=1, refusal="", verify_s=float("nan"), decode_s=0, held_s=0, late_s=0)
    with pytest.raises(MessageError, match="seconds"):
        parse(ack.to_frames())


def test_sglang_s_own_messages_are_not_ours() -> None:
    assert not is_ours([b"None", b"127.0.0.1"])
    assert not is_ours([b"12345", b"4", b"0"])


@given(st.binary(min_size=8, max_size=8), U64)
def test_the_capability_survives_the_wire(digest: bytes, slot_bytes: int) -> None:
    capability = Capability(layout_digest=digest, slot_bytes=slot_bytes)
    assert Capability.from_frame(capability.to_frame()) == capability
    assert Capability.from_frame(capability.to_frame()[:-1]) is None


@given(st.binary(max_size=40))
def test_any_other_last_frame_of_a_registration_is_no_capability(frame: bytes) -> None:
    if not frame.startswith(b"CTRLDKV"):
        assert Capability.from_frame(frame) is None
