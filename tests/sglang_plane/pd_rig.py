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
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, Arm, Drawn
from controld.contract.effect import Effect, Half
from controld.contract.fair_queue import Tenancy
from dataplanes.agent import Draw
from dataplanes.sglang import cpu_support
from dataplanes.sglang.pd.faults import Faults
from dataplanes.sglang.pd.plane import PdPlane
from dataplanes.sglang.pd.requests import RequestFacts

LAYERS, HEADS, HEAD_DIM, PAGE_TOKENS, PAGES = 19, 2, 32, 16, 256
TOKEN_BYTES = 2 * LAYERS * HEADS * HEAD_DIM * 2
PAGE_BYTES = PAGE_TOKENS * HEADS * HEAD_DIM * 2
PATIENCE_S = 60.0
"""How long a condition is waited for; a machine that is busy with something else needs some of it."""

GIVEN_UP_S = 600.0
"""When a sender goes raw for want of an answer: both sides are one process, which a busy machine may leave without any
time for a while, so only a test of that very case shall see it."""

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
TWO_TENANTS = Tenancy({"greedy": 1.0, "modest": 1.0}, {"bulk": "greedy", "chat": "modest"})


def import_sglang() -> None:
    """Make SGLang importable on a CPU, with a published configuration, and import it."""
    os.environ |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1"}
    if cpu_support.needed() and str(cpu_support.STAND_INS) not in sys.path:
        sys.path.insert(0, str(cpu_support.STAND_INS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.disaggregation.mooncake.conn
        import sglang.srt.disaggregation.prefill  # noqa: F401


def write_model(folder: Path) -> None:
    """Write what identifies a model: a config and one safetensors header."""
    config = {
        "num_attention_heads": HEADS,
        "hidden_size": HEADS * HEAD_DIM,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": HEADS,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerArguments:
    """SGLang's published arguments, some of them different: the published ones name a dummy model."""

    def __init__(self, published: Any, **changes: Any) -> None:
        self._published = published
        self.__dict__ |= changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._published, name)


class LoopEngine:
    """Mooncake's surface over memory copies, strict about what is registered and how many descriptors a batch has.

    Nothing is raised here: it would end a thread of SGLang's, and every later test would wait for that in vain.

    Attributes:
        strays: writes from or to what is not registered; refused, and for the tests to find.
    """

    regions: ClassVar[dict[str, list[tuple[int, int]]]] = {}

    def __init__(self, session: str) -> None:
        self.session = session
        self.regions[session] = []
        self.strays: list[str] = []
        self._late: list[threading.Timer] = []
        self.forget()

    def forget(self) -> None:
        """Undo what a test did; bytes that are still under way arrive first."""
        for timer in self._late:
            timer.join()
        self._late.clear()
        self.batches: list[int] = []
        self.fail_writes = 0
        self.early_return_s = 0.0

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
            if not (self._holds(self.session, source, size) and self._holds(session, target, size)):
                self.strays.append(f"{size} bytes from {source:#x} to {target:#x} of {session}")
                return -1
            if self.early_return_s and len(sizes) == 1:
                self._late.append(threading.Timer(self.early_return_s, ctypes.memmove, (target, source, size)))
                self._late[-1].start()
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
            side.engine.forget()
            side.manager.teardown()
        self.bootstrap.close()
        self.stack.close()

    def rest(self) -> None:
        """Return when the workers are done with what tests sent.

        A transfer succeeds before its worker has told of it: an effect that came later would count for the next test.
        """
        sender = self.prefill.manager.controld_plane.sender
        wait_until(lambda: not (sender._offers or sender._transfers), "the workers rest")
        for side in (self.prefill, self.decode):
            assert all(thread.is_alive() for thread in side.manager._worker_threads), "a thread of SGLang's has ended"
            assert side.engine.strays == []

    def reset(self) -> None:
        """Undo what a test did."""
        self.rest()
        for side in (self.prefill, self.decode):
            side.agent.forget()
            side.engine.forget()
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


def coded(rig: Rig, configuration: Configuration = LEVELS) -> None:
    """Have the next transfers drawn with a codec that is ready."""
    plane = rig.prefill.manager.controld_plane
    plane._shelf.make_ready(configuration)
    rig.prefill.agent.use(configuration)


def assert_close(got: torch.Tensor, sent: torch.Tensor) -> None:
    """64 levels over a few standard deviations: within a step, and not the same."""
    assert (got.float() - sent.float()).abs().max() < 0.2
    assert not torch.equal(got, sent)
