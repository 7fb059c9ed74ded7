"""The real SGLang managers, senders and receivers in one process, with a memory-copying engine between them."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import socket
import struct
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from controld.candidates.profile import Profile, StageTime
from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, Arm, Drawn, sampled_index
from controld.contract.effect import Effect, Half, Verdict
from controld.contract.effect import Path as EffectPath
from controld.contract.fair_queue import Tenancy
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.learner import Feedback, Learner
from dataplanes.agent import Draw
from dataplanes.kvcodec import FrameError, FrameErrorReason, KVCodec
from dataplanes.kvcodec.reconstruction import reconstruction_error
from dataplanes.sglang import cpu_support
from dataplanes.sglang.pd import lane
from dataplanes.sglang.pd import plane as plane_module
from dataplanes.sglang.pd import self_check as self_check_module
from dataplanes.sglang.pd import sender as sender_module
from dataplanes.sglang.pd.faults import Faults
from dataplanes.sglang.pd.plane import PdPlane
from dataplanes.sglang.pd.requests import RequestFacts
from dataplanes.sglang.pd.self_check import SelfCheck
from dataplanes.sglang.pd.staging import LoanBook

pytestmark = pytest.mark.slow  # importing SGLang takes most of it

LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS, PAGES = 19, 2, 32, 16, 256
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2
PAGE_BYTES = PAGE_TOKENS * HEADS * HEAD_DIM * 2
PATIENCE_S = 20.0

LEVELS = Configuration(
    {
        "transform": "none",
        "quantise": "levels",
        "key_levels": 64,
        "key_axis": "channel",
        "key_group": 32,
        "value_levels": 64,
        "value_axis": "token",
        "value_group": 32,
        "code": "bitpack",
    }
)
LOSSLESS = Configuration({"transform": "none", "quantise": "none", "code": "zstd"})


@pytest.fixture(scope="module")
def sglang() -> Iterator[None]:
    """SGLang importable on a CPU, with a published configuration."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    if cpu_support.needed() and str(cpu_support.STAND_INS) not in sys.path:
        sys.path.insert(0, str(cpu_support.STAND_INS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.disaggregation.mooncake.conn
        import sglang.srt.disaggregation.prefill  # noqa: F401
    yield


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What identifies a model: a config and one safetensors header."""
    folder = tmp_path_factory.mktemp("model")
    config = {
        "num_attention_heads": HEADS,
        "hidden_size": HEADS * HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    return folder


class ServerArguments:
    """SGLang's published arguments, some of them different: the published ones name a dummy model."""

    def __init__(self, published: Any, **changes: Any) -> None:
        self._published = published
        self.__dict__ |= changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._published, name)


class LoopEngine:
    """Mooncake's surface over memory copies, strict about what is registered and how many descriptors a batch has."""

    regions: ClassVar[dict[str, list[tuple[int, int]]]] = {}

    def __init__(self, session: str) -> None:
        self.session = session
        self.batches: list[int] = []
        self.fail_writes = 0
        self.early_return_s = 0.0
        self.regions[session] = []

    def batch_register(self, addresses: Sequence[int], sizes: Sequence[int]) -> int:
        self.regions[self.session] += zip(addresses, sizes, strict=True)
        return 0

    def batch_deregister(self, addresses: Sequence[int]) -> int:
        self.regions[self.session] = [region for region in self.regions[self.session] if region[0] not in addresses]
        return 0

    def get_session_id(self) -> str:
        return self.session

    def _holds(self, session: str, address: int, size: int) -> bool:
        return any(start <= address and address + size <= start + length for start, length in self.regions[session])

    def batch_transfer_sync(
        self, session: str, sources: Sequence[int], targets: Sequence[int], sizes: Sequence[int]
    ) -> int:
        if len(sizes) > 2048 or self.fail_writes:
            self.fail_writes = max(0, self.fail_writes - 1)
            return -1
        self.batches.append(len(sizes))
        for source, target, size in zip(sources, targets, sizes, strict=True):
            assert self._holds(self.session, source, size), "a source that is not registered"
            assert self._holds(session, target, size), "a target that is not registered"
            if self.early_return_s and len(sizes) == 1:
                threading.Timer(self.early_return_s, ctypes.memmove, (target, source, size)).start()
            else:
                ctypes.memmove(target, source, size)
        return 0


class FixedAgent:
    """Draws what it is told and keeps what it hears."""

    def __init__(self) -> None:
        self.attached_event = threading.Event()
        self.reason = ""
        self.forget()

    def forget(self) -> None:
        self.arm = Arm(RAW)
        self.self_check = False
        self.effects: list[Effect] = []
        self.counts: dict[str, int] = {}
        self.wire: list[dict[str, Any]] = []
        self.backlog: list[int] = []
        self.draws: list[dict[str, Any]] = []
        self.shares = Tenancy()

    def use(self, configuration: Configuration | None) -> None:
        self.arm = Arm(RAW) if configuration is None else Arm(configuration.config_id, configuration)

    def start(self) -> None: ...

    def close(self) -> None: ...

    def attached(self) -> None:
        self.attached_event.set()

    def not_attached(self, reason: str) -> None:
        self.reason = reason

    def classify(self, *, extra_key: str | None, priority: int | None) -> str:
        return (extra_key or "class=default").partition("=")[2]

    def tenancy(self) -> Tenancy:
        return self.shares

    def draw(self, **asked: Any) -> Draw:
        self.draws.append(asked)
        return Draw(Drawn(self.arm, False, 0, 7), 1e6, 0.1, self_check=self.self_check)

    def offered(self, *, raw_bytes: int, **_: Any) -> None:
        self.backlog.append(raw_bytes)

    def withdrawn(self, *, raw_bytes: int, **_: Any) -> None:
        self.backlog.remove(raw_bytes)

    def observe_wire(self, **span: Any) -> None:
        self.wire.append(span)

    def report(self, effect: Effect) -> None:
        self.effects.append(effect)
        if effect.half is Half.SENDER:
            self.backlog.pop()

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n


class Side:
    """One server's pool and manager."""

    def __init__(self, rig: Rig, role: str, *, with_plane: bool, **changes: Any) -> None:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
        from sglang.srt.disaggregation.utils import DisaggregationMode

        from dataplanes.sglang.pd.manager import build_manager_class

        shape = (PAGES * PAGE_TOKENS, HEADS, HEAD_DIM)
        self.pool = torch.zeros(2 * LAYERS, *shape, dtype=torch.bfloat16)
        self.agent = FixedAgent()
        self.engine = LoopEngine(f"127.0.0.1:{free_port()}")
        engine = self.engine

        class Stock(MooncakeKVManager):  # type: ignore[misc]
            def init_engine(self) -> None:
                self.engine = engine

        def make_plane(args: Any, mode: Any, server_args: Any, is_mla: bool) -> PdPlane:
            return PdPlane(
                args, role=mode.value, server_args=server_args, is_mla=is_mla, address="unused", agent=self.agent
            )

        self.manager_class = build_manager_class(Stock, make_plane) if with_plane else Stock
        self.manager: Any = self.manager_class(
            self._kv_args(**changes), DisaggregationMode(role), rig.server_args, False
        )
        if with_plane and not self.manager.controld_plane.refusal:
            assert self.agent.attached_event.wait(3 * PATIENCE_S)

    def _kv_args(self, **changes: Any) -> Any:
        from sglang.srt.disaggregation.base.conn import KVArgs

        args = KVArgs()
        self.aux = torch.zeros(64, 64, dtype=torch.uint8)
        values = {
            "engine_rank": 0, "pp_rank": 0, "system_dp_rank": 0, "rust_http_port": None, "ib_device": "", "gpu_id": 0,
            "kv_data_ptrs": [plane.data_ptr() for plane in self.pool],
            "kv_data_lens": [plane.nbytes for plane in self.pool],
            "kv_item_lens": [PAGE_BYTES] * 2 * LAYERS,
            "kv_layer_ids": [], "kv_cache_dtype_str": "bfloat16", "kv_layout": None, "page_size": PAGE_TOKENS,
            "kv_head_num": HEADS, "total_kv_head_num": HEADS, "prefill_start_layer": 0, "prefill_end_layer": LAYERS,
            "aux_data_ptrs": [self.aux.data_ptr()], "aux_data_lens": [self.aux.nbytes], "aux_item_lens": [64],
            "state_types": [], "state_data_ptrs": [], "state_data_lens": [], "state_item_lens": [],
            "state_layer_ids": [], "state_dim_per_tensor": [], "state_slice_outer_counts": [],
            "state_conv_shard_groups": [], "is_hybrid_mla_backend": False, "mla_compression_ratios": None,
            "swa_kv_cache_layout": None,
        }  # fmt: skip
        for name, value in (values | changes).items():
            setattr(args, name, value)
        return args


class Rig:
    """A prefill and a decode manager that know each other."""

    def __init__(self, model_folder: Path) -> None:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVBootstrapServer
        from sglang.srt.runtime_context import get_context, get_parallel

        self.stack = ExitStack()
        self.port = free_port()
        published = self.stack.enter_context(
            get_context().override_server_args(
                host="127.0.0.1",
                disaggregation_bootstrap_port=self.port,
                disaggregation_mode="prefill",
                disaggregation_transfer_backend="mooncake",
            )
        )
        # Without role switching SGLang's threads block for ever and cannot be ended.
        self.server_args = ServerArguments(published, model_path=str(model_folder), enable_pd_role_switch=True)
        ranks = dict.fromkeys(("attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank"), 0)
        sizes = dict.fromkeys(("attn_tp_size", "attn_cp_size", "attn_dp_size"), 1)
        self.stack.enter_context(get_parallel().override(pp_group=None, **ranks, **sizes))
        self.bootstrap = MooncakeKVBootstrapServer("127.0.0.1", self.port)
        self.room = 1000
        self.prefill: Side
        self.decode: Side

    def close(self) -> None:
        for side in (self.prefill, self.decode):
            side.manager.teardown()
        self.bootstrap.close()
        self.stack.close()

    def reset(self) -> None:
        """Undo what a test did."""
        for side in (self.prefill, self.decode):
            side.agent.forget()
            side.engine.batches.clear()
            side.engine.fail_writes = 0
            side.engine.early_return_s = 0.0
        self.prefill.manager.failed_sessions.clear()
        self.prefill.manager.session_failures.clear()
        self.prefill.manager.controld_plane._shelf._ready.clear()
        self.prefill.manager.controld_plane._shelf._asked.clear()
        self.damage(Faults())
        self.fill()

    def damage(self, faults: Faults) -> None:
        """Have the receiver spoil what it receives."""
        self.change_receiver(faults=faults)

    def change_receiver(self, **changes: Any) -> None:
        """Exchange parts of the receiver."""
        receiver = self.decode.manager.controld_plane.receiver
        receiver._parts = dataclasses.replace(receiver._parts, **changes)

    def fill(self, seed: int = 1) -> None:
        """New KV everywhere: random in the prefill pool, sevens in the decode pool."""
        generator = torch.Generator().manual_seed(seed)
        self.prefill.pool.copy_(torch.randn(self.prefill.pool.shape, generator=generator))
        self.decode.pool.fill_(7.0)

    def transfer(
        self,
        source: Sequence[int],
        target: Sequence[int],
        tokens: int,
        *,
        extra_key: str | None = None,
        chunk_pages: int | None = None,
        between: Callable[[], None] | None = None,
        prompt_tokens: int | None = None,
        prefix_tokens: int = 0,
    ) -> Any:
        """Send pages as SGLang's schedulers do; returns the receiver's final status.

        Args:
            prompt_tokens: what the scheduler knows of the whole prompt; by default what is true.
            prefix_tokens: tokens before those of the pages, which the receiver has already.
        """
        from sglang.srt.disaggregation.base.conn import KVPoll
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver, MooncakeKVSender

        self.room += 1
        room, address = self.room, f"127.0.0.1:{self.port}"
        prefill, decode = self.prefill.manager, self.decode.manager
        wait_until(lambda: decode.try_ensure_parallel_info(address), "the bootstrap server answers")
        receiver = MooncakeKVReceiver(mgr=decode, bootstrap_addr=address, bootstrap_room=room)
        receiver.init(prefill_dp_rank=0)
        if hasattr(prefill, "controld_plane"):
            prefill.controld_plane.requests.note(
                room, RequestFacts(f"r{room}", extra_key, None, prompt_tokens or prefix_tokens + tokens)
            )
        sender = MooncakeKVSender(mgr=prefill, bootstrap_addr=address, bootstrap_room=room)
        receiver.send_metadata(np.array(target, np.int32), aux_index=3, decode_prefix_len=prefix_tokens)
        wait_until(lambda: sender.poll() == KVPoll.WaitingForInput, "the receiver's metadata arrives")
        sender.init(len(source), aux_index=3)
        step = chunk_pages or max(1, len(source))
        for start in range(0, max(1, len(source)), step):
            pages = np.array(source[start : start + step], np.int32)
            sender.send(pages, num_kv_tokens=min(tokens - start * PAGE_TOKENS, len(pages) * PAGE_TOKENS))
            if between is not None:
                between()
        wait_until(lambda: receiver.poll() in (KVPoll.Success, KVPoll.Failed), "the transfer ends")
        status = receiver.poll()
        wait_until(lambda: sender.poll() in (KVPoll.Success, KVPoll.Failed), "the sender hears of it")
        receiver.clear()
        sender.clear()
        return status

    def succeeded(self, *args: Any, **kwargs: Any) -> bool:
        from sglang.srt.disaggregation.base.conn import KVPoll

        return bool(self.transfer(*args, **kwargs) == KVPoll.Success)

    def sent(self, pages: Sequence[int], tokens: int) -> torch.Tensor:
        return rows(self.prefill.pool, pages, tokens)

    def got(self, pages: Sequence[int], tokens: int) -> torch.Tensor:
        return rows(self.decode.pool, pages, tokens)

    def effect(self, number: int = 1) -> Effect:
        """The sender's newest effect, once there are so many."""
        agent = self.prefill.agent
        wait_until(lambda: len(agent.effects) >= number, f"{number} effects are reported")
        return agent.effects[number - 1]


def rows(pool: torch.Tensor, pages: Sequence[int], tokens: int) -> torch.Tensor:
    slots = [page * PAGE_TOKENS + offset for page in pages for offset in range(PAGE_TOKENS)][:tokens]
    return pool[:, slots].clone()


def wait_until(condition: Callable[[], Any], what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited in vain until {what}"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def make_rig(sglang: None, model_folder: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(*, decode_plane: bool = True, **changes: Any) -> Rig:
        rig = Rig(model_folder)
        rigs.append(rig)
        rig.prefill = Side(rig, "prefill", with_plane=True, **changes)
        rig.decode = Side(rig, "decode", with_plane=decode_plane, **changes)
        rig.fill()
        return rig

    yield make
    for rig in reversed(rigs):
        rig.close()


@pytest.fixture(scope="module")
def ordinary_rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def rig(ordinary_rig: Rig) -> Iterator[Rig]:
    """A rig as new: raw is drawn, nothing is damaged, nobody has told anything."""
    yield ordinary_rig
    ordinary_rig.reset()


def coded(rig: Rig, configuration: Configuration = LEVELS) -> None:
    """Have the next transfers drawn with a codec that is ready."""
    plane = rig.prefill.manager.controld_plane
    plane._shelf.make_ready(configuration)
    rig.prefill.agent.use(configuration)


def assert_close(got: torch.Tensor, sent: torch.Tensor) -> None:
    """64 levels over a few standard deviations: within a step, and not the same."""
    assert (got.float() - sent.float()).abs().max() < 0.2
    assert not torch.equal(got, sent)


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
    started_s = time.monotonic()
    assert rig.succeeded(source, target, tokens)

    assert time.monotonic() - started_s < 5
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


def test_a_receiver_without_slots_is_served_raw_at_once(rig: Rig) -> None:
    coded(rig)
    assert rig.succeeded([9], [9], 1)
    lent = rig.decode.manager.controld_plane.receiver._parts.loans
    rig.change_receiver(loans=LoanBook(slots=0, lease_s=1))
    peers = rig.prefill.manager.controld_plane._peers
    peers.drop_grant(rig.decode.engine.session)
    started_s = time.monotonic()
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert time.monotonic() - started_s < 2
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
    rig.prefill.engine.early_return_s = 0.1
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert_close(rig.got([3, 4], 32), rig.sent([1, 2], 32))
    effect = rig.effect()
    assert (effect.path, effect.verdict) == (EffectPath.CODED, Verdict.VERIFIED)
    assert 0.09 < effect.wire_s < 0.5
    assert effect.decode_s < 0.09, "waiting for bytes is not decoding"
    assert rig.prefill.agent.counts["pd.engine_returns_early"] == 1

    rig.prefill.engine.early_return_s = 0.0
    rig.prefill.agent.use(None)
    spans = len(rig.prefill.agent.wire)
    assert rig.succeeded([1, 2], [3, 4], 32)
    assert rig.effect(2).wire_s > 0
    assert len(rig.prefill.agent.wire) == spans
    rig.prefill.manager.controld_plane.sender._writes_return_early = False


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


TWO_TENANTS = Tenancy({"greedy": 1.0, "modest": 1.0}, {"bulk": "greedy", "chat": "modest"})


def contended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, classes: Sequence[str], *, pages_each: int = 10, **how: Any
) -> list[str]:
    """Queue one transfer of each class while the worker is held up by the first; the classes as they were finished."""
    gate, write = threading.Event(), rig.prefill.engine.batch_transfer_sync

    def held_up(*args: Any) -> int:
        assert gate.wait(PATIENCE_S)
        return write(*args)

    monkeypatch.setattr(rig.prefill.engine, "batch_transfer_sync", held_up)
    statuses: list[bool] = []
    threads = []
    for number, name in enumerate(classes):
        pages = range(pages_each * number, pages_each * (number + 1))
        run = threading.Thread(
            target=lambda pages=pages, name=name: statuses.append(
                rig.succeeded(
                    pages, [page + 100 for page in pages], len(pages) * PAGE_TOKENS, extra_key=f"class={name}", **how
                )
            )
        )
        threads.append(run)
        run.start()
        wait_until(lambda: len(rig.prefill.agent.backlog) > len(threads) - 1, "the transfer is queued")
    gate.set()
    for run in threads:
        run.join(PATIENCE_S)
    assert statuses == [True] * len(classes)
    rig.effect(len(classes))
    sent = range(pages_each * len(classes))
    tokens = len(sent) * PAGE_TOKENS
    assert torch.equal(rig.got([page + 100 for page in sent], tokens), rig.sent(sent, tokens))
    return [effect.service_class for effect in rig.prefill.agent.effects if effect.half is Half.SENDER]


def test_a_greedy_tenant_does_not_keep_another_waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prefill.agent.shares = TWO_TENANTS
    order = contended(rig, monkeypatch, ["bulk"] * 6 + ["chat"] * 2)
    assert order[0] == "bulk"
    assert order[1:5].count("chat") == 2, order
    assert "pd.fair_order_given_up" not in rig.prefill.agent.counts


def test_without_tenants_the_order_of_arrival_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert contended(rig, monkeypatch, ["bulk"] * 4 + ["chat"] * 2) == ["bulk"] * 4 + ["chat"] * 2


def test_chunks_of_tenants_that_compete_arrive_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prefill.agent.shares = TWO_TENANTS
    coded(rig, LOSSLESS)
    contended(rig, monkeypatch, ["bulk", "bulk", "chat", "bulk", "chat"], chunk_pages=3)
    assert {effect.path for effect in rig.prefill.agent.effects} == {EffectPath.CODED}


@pytest.mark.parametrize("configuration", [None, LOSSLESS])
def test_large_transfers_let_others_through_and_arrive_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, configuration: Configuration | None
) -> None:
    monkeypatch.setattr(sender_module, "PART_BYTES", 1)
    rig.prefill.agent.shares = TWO_TENANTS
    if configuration is not None:
        coded(rig, configuration)
    order = contended(rig, monkeypatch, ["bulk", "bulk", "chat"], pages_each=33)
    assert order == ["chat", "bulk", "bulk"] or order == ["bulk", "chat", "bulk"]
    effects = [effect for effect in rig.prefill.agent.effects if effect.half is Half.SENDER]
    assert all(effect.chunks >= 3 and effect.wait_s > 0 for effect in effects if effect.service_class == "chat")
    assert {effect.raw_bytes for effect in effects} == {33 * PAGE_TOKENS * TOKEN_BYTES}


def test_a_fault_of_ours_leaves_the_order_of_arrival(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prefill.agent.shares = Tenancy({"greedy": 1.0, "modest": 0.0}, TWO_TENANTS.tenant_of_class)
    assert contended(rig, monkeypatch, ["bulk"] * 3 + ["chat"] * 2) == ["bulk"] * 3 + ["chat"] * 2
    assert rig.prefill.agent.counts["pd.fair_order_given_up"] >= 1


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


def test_a_sampled_transfer_tells_how_far_off_its_frames_are(rig: Rig) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    source, target, tokens = list(range(3, 63)), list(range(100, 160)), 60 * PAGE_TOKENS - 5
    before = rig.prefill.pool.clone()
    assert rig.succeeded(source, target, tokens)

    effect = rig.effect()
    sent, got = rig.sent(source, tokens), rig.got(target, tokens)
    whole = reconstruction_error([[(sent[:LAYERS], got[:LAYERS])], [(sent[LAYERS:], got[LAYERS:])]])
    assert effect.reconstruction_error == pytest.approx(whole, rel=0.02)
    assert 0.01 < whole < 0.05
    assert (effect.path, effect.verdict, effect.reason) == (EffectPath.CODED, Verdict.VERIFIED, "")
    assert torch.equal(rig.prefill.pool, before), "the look writes nothing into the pool"
    rig.prefill.agent.self_check = False
    assert rig.succeeded(source, target, tokens)
    assert rig.effect(2).reconstruction_error is None


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The first source page of every frame that is looked at, as it goes on."""
    first_pages: list[int] = []
    real = SelfCheck.look

    def note(self: SelfCheck, frame: torch.Tensor, pages: Any, tokens: int) -> Any:
        first_pages.append(int(pages[0]))
        return real(self, frame, pages, tokens)

    monkeypatch.setattr(SelfCheck, "look", note)
    return first_pages


@pytest.mark.parametrize(("pages", "chunk_pages"), [(8, 2), (64, None)], ids=["chunked prefill", "fair parts"])
def test_every_part_of_a_prompt_is_looked_at_as_often(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, looked_at: list[int], pages: int, chunk_pages: int | None
) -> None:
    monkeypatch.setattr(sender_module, "PART_BYTES", 1)
    rig.prefill.agent.shares = TWO_TENANTS if chunk_pages is None else Tenancy()
    coded(rig)
    rig.prefill.agent.self_check = True
    transfers, source, target = 80, range(3, 3 + pages), range(100, 100 + pages)
    for number in range(1, transfers + 1):
        assert rig.succeeded(source, target, pages * PAGE_TOKENS, chunk_pages=chunk_pages)
        assert rig.effect(number).chunks >= 4
        assert rig.effect(number).reconstruction_error is not None
    assert len(looked_at) == transfers, "one frame of each"
    quarters = Counter((page - 3) // (pages // 4) for page in looked_at)
    assert sorted(quarters) == [0, 1, 2, 3]
    # By chance some quarter has fewer than 4 of 80 once in 700,000 runs.
    assert min(quarters.values()) >= 4


def test_the_token_that_is_looked_at_is_counted_behind_the_prefix(rig: Rig, looked_at: list[int]) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    tokens = 6 * PAGE_TOKENS
    assert rig.succeeded(range(3, 9), range(100, 106), tokens, chunk_pages=2, prefix_tokens=64 * PAGE_TOKENS)
    expected = sampled_index(rig.effect().transfer_id, tokens) // (2 * PAGE_TOKENS)
    assert looked_at == [3 + 2 * expected]


def test_a_transfer_that_turns_out_shorter_is_not_looked_at(rig: Rig, looked_at: list[int]) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    assert rig.succeeded([1, 2], [3, 4], 32, prompt_tokens=10**15)
    assert (rig.effect().path, rig.effect().reconstruction_error, looked_at) == (EffectPath.CODED, None, [])


def test_an_arm_is_drawn_for_all_parts_of_an_unknown_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "PART_BYTES", 1)
    monkeypatch.setattr(rig.prefill.manager.controld_plane.requests, "note", lambda *_: None)
    rig.prefill.agent.shares = TWO_TENANTS
    assert rig.succeeded(range(40), range(100, 140), 40 * PAGE_TOKENS)
    effect = rig.effect()
    assert effect.chunks == 3, "it came in parts"
    (draw,) = rig.prefill.agent.draws
    assert draw["raw_bytes"] == effect.expected_bytes == effect.raw_bytes == 40 * PAGE_TOKENS * TOKEN_BYTES
    assert rig.prefill.agent.counts["pd.request_unknown"] == 1


def test_a_lossless_codec_is_exact_to_the_last_bit_of_the_look(rig: Rig) -> None:
    coded(rig, LOSSLESS)
    rig.prefill.agent.self_check = True
    rig.prefill.pool[3, 5 * PAGE_TOKENS] = float("inf")
    rig.prefill.pool[4, 5 * PAGE_TOKENS + 1] = float("nan")
    assert rig.succeeded([5, 9, 7], [1, 3, 2], 3 * PAGE_TOKENS)
    assert rig.effect().reconstruction_error == 0.0


def raising(error: Exception) -> Callable[..., Any]:
    """Something that fails when it is called."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_sender_that_cannot_decode_its_own_frame_says_so_and_goes_on_raw(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    in_the_second_chunk = 2 * PAGE_TOKENS
    monkeypatch.setattr(sender_module, "sampled_index", lambda *_: in_the_second_chunk)
    refusal = FrameError(FrameErrorReason.CHECKSUM, "not ours")
    monkeypatch.setattr(self_check_module, "decode_frame", raising(refusal))
    assert rig.succeeded(list(range(8)), list(range(8, 16)), 8 * PAGE_TOKENS, chunk_pages=2)
    effect = rig.effect()
    assert (effect.path, effect.reason) == (EffectPath.RAW_FALLBACK, "self_check:checksum")
    assert effect.reconstruction_error is None
    assert_close(rig.got(range(8, 12), 4 * PAGE_TOKENS), rig.sent(range(4), 4 * PAGE_TOKENS))
    assert torch.equal(rig.got(range(12, 16), 4 * PAGE_TOKENS), rig.sent(range(4, 8), 4 * PAGE_TOKENS))
    assert rig.prefill.agent.counts["pd.raw.self_check:checksum"] == 1
    assert "pd.self_check_skipped" not in rig.prefill.agent.counts


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("can't allocate memory")])
def test_a_look_that_fails_says_nothing_about_the_codec(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    coded(rig)
    rig.prefill.agent.self_check = True
    monkeypatch.setattr(self_check_module, "decode_frame", raising(error))
    assert rig.succeeded(list(range(8)), list(range(8, 16)), 8 * PAGE_TOKENS, chunk_pages=2)
    effect = rig.effect()
    assert (effect.path, effect.verdict, effect.reason) == (EffectPath.CODED, Verdict.VERIFIED, "")
    assert effect.reconstruction_error is None
    assert_close(rig.got(range(8, 16), 8 * PAGE_TOKENS), rig.sent(range(8), 8 * PAGE_TOKENS))
    counts = rig.prefill.agent.counts
    assert (counts["pd.self_check_skipped"], counts["pd.exception"]) == (1, 1)
    assert sum("tells nothing" in record.getMessage() for record in caplog.records) == 1


def test_a_codec_made_worse_behind_its_back_is_pinned_off(rig: Rig) -> None:
    """The hidden switch: under the arm's name half the levels, as a wrong scale would have it."""
    coded(rig)
    rig.prefill.agent.self_check = True
    source, target, tokens = list(range(12)), list(range(60, 72)), 12 * PAGE_TOKENS

    def error(number: int) -> Effect:
        rig.fill(number)
        assert rig.succeeded(source, target, tokens)
        return rig.effect(number)

    healthy = [error(number) for number in range(1, 6)]
    errors = [effect.reconstruction_error or 0.0 for effect in healthy]
    learner = Learner("pd", "default", KvTransfer())
    measured = Profile(
        configuration=LEVELS, workload="general", model_fingerprint="m", loss_mean_nats=0.01, loss_se_nats=0.001,
        loss_samples=5, worst_prompt_tokens=256, ratio=2.0, encode=StageTime(1e-3, 5e-9),
        decode=StageTime(1e-3, 5e-9), median_transfer_bytes=1e6, error_mean=float(np.exp(np.mean(np.log(errors)))),
        error_log_sd=float(np.std(np.log(errors), ddof=1)), error_samples=len(errors),
    )  # fmt: skip
    learner.set_candidates([measured], workloads={"default": "general"})

    def observe(effect: Effect) -> None:
        # The agent's bandwidth is invented; of an effect with times that cannot be, nothing is believed.
        true = dataclasses.replace(effect, bandwidth_bytes_per_s=effect.wire_bytes / effect.wire_s)
        assert learner.observe(true, true.finished_unix_s) is Feedback.LEARNED

    for number in range(6, 12):
        effect = error(number)
        observe(effect)
    assert learner.pins(time.time()).pins == ()

    sender = rig.prefill.manager.controld_plane.sender
    sender._parts = dataclasses.replace(sender._parts, faults=Faults(coarse_codec_from=1))
    bad = 0
    while not learner.pins(time.time()).pins:
        bad += 1
        assert bad <= 4, "it should be out by now"
        effect = error(11 + bad)
        assert (effect.arm_id, effect.verdict) == (LEVELS.config_id, Verdict.VERIFIED), "nobody else has seen anything"
        observe(effect)
    assert bad == 3
    (pin,) = learner.pins(time.time()).pins
    assert (pin.arm_id, pin.service_class) == (LEVELS.config_id, "default")
    assert "2 times the profiled" in pin.reason
    sender._parts = dataclasses.replace(sender._parts, faults=Faults())
