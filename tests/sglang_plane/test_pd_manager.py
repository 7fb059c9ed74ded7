"""What arrives, and what is told of it, when real SGLang managers send KV through this plane; see `pd_rig`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.decision import RAW
from controld.contract.effect import Half, Verdict
from controld.contract.effect import Path as EffectPath
from dataplanes.kvcodec import KVCodec
from dataplanes.sglang.pd import lane
from dataplanes.sglang.pd import peers as peers_module
from dataplanes.sglang.pd import plane as plane_module
from dataplanes.sglang.pd import sender as sender_module
from dataplanes.sglang.pd.faults import Faults
from dataplanes.sglang.pd.plane import PdPlane
from dataplanes.sglang.pd.staging import LoanBook
from tests.sglang_plane.pd_rig import (
    LAYERS,
    LEVELS,
    LOSSLESS,
    PAGE_BYTES,
    PAGE_TOKENS,
    PATIENCE_S,
    TOKEN_BYTES,
    Rig,
    assert_close,
    coded,
    wait_until,
)

pytestmark = pytest.mark.slow  # importing SGLang takes most of it


def test_a_coded_transfer_arrives_within_the_codec_s_error(rig: Rig) -> None:
    coded(rig)
    source, target, tokens = list(range(3, 63)), list(range(100, 160)), 60 * PAGE_TOKENS - 5

    assert rig.succeeded(source, target, tokens, extra_key="class=chat")

    assert_close(rig.got(target, tokens), rig.sent(source, tokens))
    assert torch.all(rig.got(target, 60 * PAGE_TOKENS)[:, tokens:] == 7), "tokens beyond the prompt were written"
    assert torch.all(rig.got([99, 160], 2 * PAGE_TOKENS) == 7), "pages of others were written"
    effect = rig.effect()
    assert (effect.path, effect.verdict, effect.reason) == (EffectPath.CODED, Verdict.VERIFIED, "")
    assert (effect.arm_id, effect.table_version, effect.service_class) == (LEVELS.config_id, 7, "chat")
    assert effect.tokens == tokens
    assert effect.chunks >= 3, "a transfer of this size is cut, so that its stages overlap"
    assert effect.raw_bytes == 60 * PAGE_TOKENS * TOKEN_BYTES == effect.expected_bytes
    assert 0.3 < effect.wire_bytes / effect.raw_bytes < 0.6
    assert min(effect.encode_s, effect.wire_s, effect.decode_s, effect.total_s) > 0
    assert rig.prefill.agent.backlog == []


def test_the_receiver_reports_its_half_under_the_same_id(rig: Rig) -> None:
    coded(rig)
    assert rig.succeeded([1, 2], [3, 4], 20)

    theirs = rig.effect()
    wait_until(lambda: rig.decode.agent.effects, "the receiver reports")
    (ours,) = rig.decode.agent.effects
    assert (ours.half, theirs.half) == (Half.RECEIVER, Half.SENDER)
    for name in (
        "transfer_id",
        "arm_id",
        "table_version",
        "service_class",
        "tokens",
        "chunks",
        "raw_bytes",
        "wire_bytes",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.decode_s == pytest.approx(theirs.decode_s)


def test_one_chunk_and_seven_chunks_decode_to_equal_bytes(rig: Rig) -> None:
    coded(rig)
    source, tokens = list(range(10, 24)), 14 * PAGE_TOKENS
    assert rig.succeeded(source, list(range(50, 64)), tokens)
    assert rig.succeeded(source, list(range(150, 164)), tokens, chunk_pages=2)

    assert torch.equal(rig.got(range(50, 64), tokens), rig.got(range(150, 164), tokens))
    assert rig.effect(2).chunks == 7


def test_a_lossless_codec_is_bit_exact(rig: Rig) -> None:
    coded(rig, LOSSLESS)
    assert rig.succeeded([5, 9, 7], [1, 3, 2], 3 * PAGE_TOKENS)
    assert torch.equal(rig.got([1, 3, 2], 3 * PAGE_TOKENS), rig.sent([5, 9, 7], 3 * PAGE_TOKENS))
    assert rig.effect().path is EffectPath.CODED


@pytest.mark.parametrize("arm", [None, LEVELS], ids=["raw", "coded"])
def test_fully_fragmented_pages(rig: Rig, arm: Configuration | None) -> None:
    """60 scattered pages are 2,280 descriptors, more than Mooncake takes at once."""
    if arm is not None:
        coded(rig, arm)
    source, target = list(range(0, 120, 2)), list(range(241, 120, -2))[:60]
    tokens = 60 * PAGE_TOKENS

    assert len(source) * 2 * LAYERS == 2280
    assert rig.succeeded(source, target, tokens)

    difference = (rig.got(target, tokens).float() - rig.sent(source, tokens).float()).abs().max()
    assert difference == 0 if arm is None else 0 < difference < 0.2
    assert max(rig.prefill.engine.batches) <= 1000


@pytest.mark.parametrize("arm", [None, LEVELS], ids=["raw", "coded"])
def test_one_token(rig: Rig, arm: Configuration | None) -> None:
    if arm is not None:
        coded(rig, arm)
    assert rig.succeeded([4], [8], 1)
    assert (rig.got([8], 1).float() - rig.sent([4], 1).float()).abs().max() < 0.2
    assert rig.effect().tokens == 1


def test_garbage_behind_the_last_token_does_not_spoil_the_scales(rig: Rig) -> None:
    coded(rig)
    rig.prefill.pool[:, 6 * PAGE_TOKENS + 3 : 7 * PAGE_TOKENS] = float("inf")
    assert rig.succeeded([5, 6], [1, 2], PAGE_TOKENS + 3)
    assert_close(rig.got([1, 2], PAGE_TOKENS + 3), rig.sent([5, 6], PAGE_TOKENS + 3))
    assert rig.effect().wire_bytes < 0.6 * rig.effect().raw_bytes


def test_no_pages_at_all(rig: Rig) -> None:
    """The receiver has the whole prefix: only SGLang's metadata is sent, and nothing is drawn."""
    coded(rig)
    assert rig.succeeded([], [], 0)
    wait_until(lambda: rig.prefill.agent.backlog == [], "the offer is withdrawn")
    assert rig.prefill.agent.effects == []


def test_a_raw_arm_is_sglang_s_own_path(rig: Rig) -> None:
    assert rig.succeeded([1, 2, 3], [7, 8, 9], 40)
    assert torch.equal(rig.got([7, 8, 9], 40), rig.sent([1, 2, 3], 40))
    effect = rig.effect()
    assert (effect.path, effect.verdict, effect.reason, effect.arm_id) == (EffectPath.RAW, Verdict.UNVERIFIED, "", RAW)
    assert effect.wire_bytes == effect.raw_bytes == 3 * PAGE_BYTES * 2 * LAYERS
    assert effect.wire_s > 0
    assert sum(span["wire_bytes"] for span in rig.prefill.agent.wire) == effect.wire_bytes


def test_a_peer_without_the_plane_is_served_raw(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(decode_plane=False)
    coded(rig)
    assert rig.succeeded([1, 2], [3, 4], 30)
    assert torch.equal(rig.got([3, 4], 30), rig.sent([1, 2], 30))
    effect = rig.effect()
    assert (effect.path, effect.reason) == (EffectPath.RAW_FALLBACK, "peer_without_plane")
    assert rig.prefill.agent.counts["pd.raw.peer_without_plane"] == 1


def test_a_flipped_byte_is_refused_and_sent_raw_once(rig: Rig) -> None:
    rig.damage(Faults(flip_byte_in_frame=2))
    coded(rig)
    source, target, tokens = list(range(60)), list(range(60, 120)), 60 * PAGE_TOKENS
    assert rig.succeeded(source, target, tokens)

    got, sent = rig.got(target, tokens), rig.sent(source, tokens)
    assert (got.float() - sent.float()).abs().max() < 0.2
    # The refused piece (the second one) is exact, the first is as the codec left it.
    exact = (got == sent).flatten(2).all(dim=2).all(dim=0)
    assert exact.any()
    assert not exact.all()
    effect = rig.effect()
    assert (effect.path, effect.verdict, effect.reason) == (EffectPath.RAW_FALLBACK, Verdict.NACK, "nack:checksum")
    assert effect.raw_bytes == 60 * PAGE_TOKENS * TOKEN_BYTES
    assert rig.decode.agent.counts["pd.nack.checksum"] == 1
    # One transfer's damage does not condemn the next.
    assert rig.succeeded(source, target, tokens)
    assert rig.effect(2).path is EffectPath.CODED


def test_a_decoder_that_returns_zeros_is_seen(rig: Rig) -> None:
    """What the end-to-end checks above would say of a broken decoder."""
    rig.damage(Faults(zero_decode_from_frame=1))
    coded(rig)
    assert rig.succeeded([1, 2], [3, 4], 30)
    with pytest.raises(AssertionError):
        assert_close(rig.got([3, 4], 30), rig.sent([1, 2], 30))


def test_an_exception_in_the_encoder_goes_raw(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    coded(rig)
    real, calls = KVCodec.encode_into, []

    def fail_on_the_second_piece(self: KVCodec, *args: Any, **kwargs: Any) -> int:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("a codec's bug")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(KVCodec, "encode_into", fail_on_the_second_piece)
    source, target, tokens = list(range(60)), list(range(60, 120)), 60 * PAGE_TOKENS
    assert rig.succeeded(source, target, tokens)
    assert (rig.got(target, tokens).float() - rig.sent(source, tokens).float()).abs().max() < 0.2
    effect = rig.effect()
    assert (effect.path, effect.reason) == (EffectPath.RAW_FALLBACK, "exception:ZeroDivisionError")
    assert rig.prefill.agent.counts["pd.exception"] == 1


def test_a_failed_engine_write_goes_raw(rig: Rig) -> None:
    coded(rig)
    rig.prefill.engine.fail_writes = 1
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert torch.equal(rig.got([3, 4], 32), rig.sent([1, 2], 32))
    assert rig.effect().reason == "engine_write"
    assert not rig.prefill.manager.failed_sessions, "SGLang must not hear of a fault that raw overcame"


def test_the_request_fails_only_if_raw_fails_too(rig: Rig) -> None:
    coded(rig)
    rig.prefill.engine.fail_writes = 1000
    assert not rig.succeeded([1, 2], [3, 4], 32)
    assert (rig.effect().path, rig.effect().verdict) == (EffectPath.FAILED, Verdict.ERROR)


def test_a_table_change_does_not_touch_a_begun_transfer(rig: Rig) -> None:
    coded(rig)
    rig.succeeded([0], [0], 1)

    def change() -> None:
        wait_until(lambda: len(rig.prefill.agent.draws) == 2, "the first chunk is drawn for")
        rig.prefill.agent.use(None)

    assert rig.succeeded(list(range(8)), list(range(8, 16)), 8 * PAGE_TOKENS, chunk_pages=2, between=change)
    effect = rig.effect(2)
    assert (effect.arm_id, effect.path, effect.tokens) == (LEVELS.config_id, EffectPath.CODED, 8 * PAGE_TOKENS)
    assert len(rig.prefill.agent.draws) == 2, "one draw a transfer"
    assert rig.prefill.agent.draws[1]["raw_bytes"] == 8 * PAGE_TOKENS * TOKEN_BYTES


def test_a_codec_that_is_not_ready_is_made_ready_beside_a_raw_transfer(rig: Rig) -> None:
    rig.prefill.agent.use(LEVELS)
    assert rig.succeeded([1], [2], 16)
    assert rig.effect().reason == "codec_not_ready"
    shelf = rig.prefill.manager.controld_plane._shelf
    wait_until(lambda: shelf.find(LEVELS) is not None, "the codec is ready")
    assert rig.succeeded([1], [2], 16)
    assert rig.effect(2).path is EffectPath.CODED


def test_infinities_are_carried_unchanged(rig: Rig) -> None:
    coded(rig)
    rig.prefill.pool[3, 5 * PAGE_TOKENS + 1, 0, 0] = float("inf")
    assert rig.succeeded([5, 6], [1, 2], 32)
    assert torch.equal(rig.got([1, 2], 32), rig.sent([5, 6], 32))
    assert rig.effect().path is EffectPath.CODED


def test_a_pool_that_is_compressed_already_is_left_alone(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(kv_cache_dtype_str="fp8_e4m3")
    assert "fp8_e4m3" in rig.prefill.agent.reason
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert torch.equal(rig.got([3, 4], 32), rig.sent([1, 2], 32))


def test_a_receiver_that_gave_the_room_up_gets_nothing_written(rig: Rig) -> None:
    coded(rig)
    awaited = rig.decode.manager.controld_plane.receiver._parts.room_is_alive
    rig.change_receiver(room_is_alive=lambda room: False)
    rig.transfer([1, 2], [3, 4], 32)
    assert torch.all(rig.got([3, 4], 32) == 7)
    assert (rig.effect().path, rig.effect().reason) == (EffectPath.FAILED, "nack:room_gone")
    rig.change_receiver(room_is_alive=awaited)


def test_a_receiver_without_slots_is_served_raw_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "GRANT_PATIENCE_S", PATIENCE_S)
    coded(rig)
    assert rig.succeeded([9], [9], 1)
    lent = rig.decode.manager.controld_plane.receiver._parts.loans
    rig.change_receiver(loans=LoanBook(slots=0, lease_s=1))
    peers = rig.prefill.manager.controld_plane._peers
    peers.drop_grant(rig.decode.engine.session)
    started_s = time.monotonic()
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert time.monotonic() - started_s < PATIENCE_S, "an answer came"
    assert [rig.effect(number).reason for number in (1, 2, 3)] == ["", "no_staging_slots", "no_staging_slots"]
    rig.change_receiver(loans=lent)
    peers._peers[rig.decode.engine.session].refused_until_s = float("-inf")
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert rig.effect(4).path is EffectPath.CODED


def test_a_chunk_that_was_given_up_is_never_scattered(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver stalls; the sender gives up, sends raw, and the late frame changes nothing."""
    coded(rig)
    monkeypatch.setattr(lane, "ACK_PATIENCE_S", 0.5)
    receiver = rig.decode.manager.controld_plane.receiver
    going_on = threading.Event()
    real = receiver._await_frame

    def stall(*args: Any) -> None:
        real(*args)
        assert going_on.wait(PATIENCE_S)

    monkeypatch.setattr(receiver, "_await_frame", stall)
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert rig.effect().reason == "ack_timeout"
    assert torch.equal(rig.got([3, 4], 32), rig.sent([1, 2], 32))
    # SGLang has heard of success and may have given the pages to somebody else.
    rig.decode.pool.fill_(5.0)
    going_on.set()
    wait_until(lambda: rig.decode.agent.counts.get("pd.nack.room_gone"), "the late chunk is refused")
    assert torch.all(rig.decode.pool == 5)


def test_an_aborted_request_leaves_nothing_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    coded(rig)
    monkeypatch.setattr(sender_module, "_SWEEP_AGE_S", -1.0)
    monkeypatch.setattr(sender_module, "_SWEEP_INTERVAL_S", -1.0)

    def abort() -> None:
        wait_until(lambda: rig.prefill.agent.draws, "the first chunk is drawn for")
        rig.prefill.manager.update_status(rig.room, KVPoll.Failed)
        rig.decode.manager.update_status(rig.room, KVPoll.Failed)

    assert not rig.succeeded(list(range(8)), list(range(8, 16)), 8 * PAGE_TOKENS, chunk_pages=4, between=abort)
    assert rig.succeeded([1, 2], [3, 4], 32)
    wait_until(lambda: len(rig.prefill.agent.effects) == 2, "both transfers are reported")
    assert sorted(effect.reason for effect in rig.prefill.agent.effects) in (["", "aborted"], ["", "nack:room_gone"])
    assert rig.prefill.agent.backlog == []
    assert rig.prefill.manager.controld_plane.sender._transfers == {}


def test_a_frame_that_comes_after_its_message_is_awaited_and_told(rig: Rig) -> None:
    """An engine whose writes return before the bytes are there: nothing is refused, and raw spans are not believed."""
    coded(rig)
    rig.prefill.engine.early_return_s = 0.5
    started_s = time.monotonic()
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert_close(rig.got([3, 4], 32), rig.sent([1, 2], 32))
    effect = rig.effect()
    assert (effect.path, effect.verdict) == (EffectPath.CODED, Verdict.VERIFIED)
    assert effect.wire_s >= 0.45, "the timer and the sender read different clocks"
    assert effect.wire_s + effect.decode_s <= time.monotonic() - started_s, "waiting for bytes is not decoding"
    assert rig.prefill.agent.counts["pd.engine_returns_early"] == 1

    rig.prefill.engine.early_return_s = 0.0
    rig.prefill.agent.use(None)
    spans = len(rig.prefill.agent.wire)
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert rig.effect(2).wire_s > 0
    assert len(rig.prefill.agent.wire) == spans
    rig.prefill.manager.controld_plane.sender._writes_return_early = False


def test_after_a_teardown_nothing_is_written(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang may give the pool to somebody else while a frame is still awaited."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    rig = make_rig()
    coded(rig)
    receiver = rig.decode.manager.controld_plane.receiver
    awaited, real = threading.Event(), receiver._await_frame

    def tell(*args: Any) -> None:
        awaited.set()
        real(*args)

    monkeypatch.setattr(receiver, "_await_frame", tell)
    rig.prefill.engine.early_return_s = 1.0
    sending = threading.Thread(target=rig.transfer, args=([1, 2], [3, 4], 32))
    sending.start()
    assert awaited.wait(PATIENCE_S)
    rig.prefill.engine.fail_writes = 1000
    rig.decode.manager.teardown()
    receiver._thread.join(PATIENCE_S)
    assert not receiver._thread.is_alive()
    rig.decode.pool.fill_(5.0)
    rig.decode.manager.update_status(rig.room, KVPoll.Failed)
    rig.prefill.engine.forget()
    sending.join()
    assert torch.all(rig.decode.pool == 5)


def test_another_tensor_parallel_width_takes_sglang_s_own_path(rig: Rig) -> None:
    """A receiver of another width gets slices of heads, which are not coded."""
    coded(rig)
    prefill = rig.prefill.manager
    assert rig.succeeded([9], [9], 1)
    (session,) = prefill.decode_kv_args_table
    prefill.decode_kv_args_table[session].dst_attn_tp_size = 2
    prefill.decode_kv_args_table[session].dst_kv_item_len = PAGE_BYTES
    rig.prefill.engine.batches.clear()
    rig.transfer([1], [3], 16)
    effect = rig.effect(2)
    assert effect.reason == "unsupported_path"
    assert effect.arm_id == LEVELS.config_id
    assert rig.prefill.agent.counts["pd.raw.unsupported_path"] == 1
    prefill.decode_kv_args_table[session].dst_attn_tp_size = 1


def test_a_plane_that_cannot_be_made_leaves_sglang_s_manager(rig: Rig) -> None:
    from sglang.srt.disaggregation.utils import DisaggregationMode

    from dataplanes.sglang.pd.manager import build_manager_class

    def broken(*_: Any) -> PdPlane:
        raise OSError("no processor has a name here")

    stock = type(rig.decode.manager).__mro__[1]
    engine = rig.decode.engine
    registered = list(engine.regions[engine.session])
    manager = build_manager_class(stock, broken)(
        rig.decode._kv_args(), DisaggregationMode("decode"), rig.server_args, False
    )
    assert type(manager) is stock
    assert len(manager.build_receiver_registration_message()) == 20
    manager.teardown()
    # It took the pool of the rig's own manager back, for both have one engine.
    engine.regions[engine.session] = registered


def test_a_plane_that_cannot_be_built_tells_why_and_goes_raw(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise MemoryError("no staging")

    monkeypatch.setattr(plane_module, "PagedPool", broken)
    rig = make_rig()
    assert "no staging" in rig.prefill.agent.reason
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert torch.equal(rig.got([3, 4], 32), rig.sent([1, 2], 32))
