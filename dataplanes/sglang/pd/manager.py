"""SGLang's Mooncake manager with this plane in it: thin overrides that pass everything else through."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from controld.contract.fair_queue import Tenancy
from dataplanes.sglang.pd import messages
from dataplanes.sglang.pd.edge import Guarded
from dataplanes.sglang.pd.engine import BoundedEngine
from dataplanes.sglang.pd.fair_order import FairOrder, OrderParts, Waiting, split_chunk
from dataplanes.sglang.pd.memory import Pages
from dataplanes.sglang.pd.messages import Capability, Endpoint
from dataplanes.sglang.pd.plane import EngineAccess, PdPlane
from dataplanes.sglang.pd.sender import QueuedChunk
from dataplanes.sglang.pd.signature import REGISTRATION_FRAMES
from dataplanes.sglang.pd.transfer import RawReason

_log = logging.getLogger(__name__)

_KEPT_TIMES: Final = 20_000
_REGISTRATION_TAG: Final = b"None"

MakePlane = Callable[[Any, Any, Any, bool], PdPlane]
"""`(KVArgs, DisaggregationMode, ServerArgs, is MLA) -> the plane of a manager`."""


class _LogOnly:
    def count(self, name: str, n: int = 1) -> None:
        return


def build_manager_class(base: type[Any], make_plane: MakePlane) -> type[Any]:
    """A subclass of SGLang's `MooncakeKVManager`.

    Args:
        base: the real class; its signatures were checked.
        make_plane: called in each manager's `__init__`, which runs in scheduler processes only.
    """

    class ControldKVManager(base):  # type: ignore[misc]
        """SGLang's manager, with KV coded on its way where controld says so."""

        controld_plane: PdPlane

        def __init__(
            self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
        ) -> None:
            with Guarded(_LogOnly(), "the PD plane cannot be made; this server is SGLang's own") as making:
                self.controld_plane = make_plane(args, disaggregation_mode, server_args, bool(is_mla_backend))
            if making.error is not None:
                self.__class__ = base
                base.__init__(self, args, disaggregation_mode, server_args, is_mla_backend)
                return
            self._enqueued_s: OrderedDict[tuple[int, int], float] = OrderedDict()
            super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
            with Guarded(self.controld_plane.agent, "the PD plane did not start; KV goes raw"):
                self.controld_plane.start()

        def init_engine(self) -> None:
            super().init_engine()
            self.engine: Any = BoundedEngine(self.engine, self._on_engine_write)

        def _on_engine_write(self, start_s: float, end_s: float, size_bytes: int) -> None:
            if self.controld_plane.sender is not None:
                self.controld_plane.sender.note_engine_write(start_s, end_s, size_bytes)

        def register_buffer_to_engine(self) -> None:
            super().register_buffer_to_engine()
            # The engine and the sockets are there, and no thread of SGLang's runs yet.
            access = EngineAccess(
                register=lambda address, size: self.engine.batch_register([address], [size]),
                write=lambda session, source, target, size: self.engine.batch_transfer_sync(
                    session, [source], [target], [size]
                ),
                message=self._send_controld_message,
                room_is_alive=self._awaits_kv,
                reply_to=Endpoint(self.local_ip, self.rank_port),
            )
            with Guarded(self.controld_plane.agent, "the PD plane cannot be built; KV goes raw") as building:
                self.controld_plane.build(access)
            if building.error is not None:
                self.controld_plane.refuse(f"it could not be built: {building.error!r}")

        def deregister_buffer_to_engine(self) -> None:
            addresses = self.controld_plane.staging_addresses()
            if addresses:
                self.engine.batch_deregister(addresses)
            super().deregister_buffer_to_engine()

        def teardown(self) -> None:
            # SGLang closes the sockets that our threads send on, and its pool may go to somebody else afterwards.
            with Guarded(self.controld_plane.agent, "the PD plane did not end in order"):
                self.controld_plane.end_threads()
            super().teardown()
            self.controld_plane.agent.close()

        def _send_controld_message(self, endpoint: Endpoint, frames: list[bytes]) -> None:
            from sglang.srt.utils.network import NetworkAddress

            address = NetworkAddress(endpoint.host, endpoint.port)
            self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)

        def _awaits_kv(self, room: int) -> bool:
            from sglang.srt.disaggregation.base.conn import KVPoll

            status = self.request_status.get(room)
            return status is not None and status != KVPoll.Failed

        def build_receiver_registration_message(self) -> list[bytes]:
            frames: list[bytes] = super().build_receiver_registration_message()
            capability = self.controld_plane.capability()
            if capability is None:
                return frames
            if len(frames) != REGISTRATION_FRAMES:
                _log.error("registration has %d frames, not %d: KV goes raw", len(frames), REGISTRATION_FRAMES)
                self.controld_plane.agent.not_attached(f"registration has {len(frames)} frames")
                return frames
            return [*frames, capability.to_frame()]

        def _make_worker_recv(self, socket: Any, timeout_ms: int = 500) -> Callable[[], Any]:
            receive = super()._make_worker_recv(socket, timeout_ms)

            def receive_theirs() -> Any:
                frames = receive()
                if not frames:
                    return frames
                if messages.is_ours(frames):
                    self.controld_plane.handle(frames)
                    return None
                if frames[0] == _REGISTRATION_TAG:
                    return self._note_registration(frames)
                return frames

            return receive_theirs

        def _note_registration(self, frames: list[bytes]) -> list[bytes]:
            capability = Capability.from_frame(frames[-1])
            if capability is not None and capability.version != messages.PROTOCOL_VERSION:
                self.controld_plane.agent.count("pd.peer_version")
            speaks_ours = capability is not None and capability.version == messages.PROTOCOL_VERSION
            with Guarded(self.controld_plane.agent, "could not note a receiver, which is served raw"):
                endpoint = Endpoint(frames[1].decode(), int(frames[2]))
                self.controld_plane.announce_peer(frames[3].decode(), endpoint, capability if speaks_ours else None)
            return frames if capability is None else frames[:-1]

        def add_transfer_request(
            self,
            bootstrap_room: int,
            kv_indices: Any,
            index_slice: slice,
            is_last_chunk: bool,
            aux_index: int | None = None,
            state_indices: Any = None,
            num_kv_tokens: int | None = None,
            *,
            wait_event: Any = None,
            indices_event: Any = None,
            trace_ctx: Any = None,
        ) -> None:
            plane = self.controld_plane
            if plane.sender is not None and bootstrap_room in self.transfer_infos:
                with Guarded(plane.agent, "could not note a queued chunk"):
                    self._enqueued_s[bootstrap_room, index_slice.start or 0] = time.monotonic()
                    if len(self._enqueued_s) > _KEPT_TIMES:
                        self._enqueued_s.popitem(last=False)
                    plane.sender.offered(bootstrap_room, len(kv_indices))
            super().add_transfer_request(
                bootstrap_room,
                kv_indices,
                index_slice,
                is_last_chunk,
                aux_index,
                state_indices,
                num_kv_tokens,
                wait_event=wait_event,
                indices_event=indices_event,
                trace_ctx=trace_ctx,
            )

        def transfer_worker(self, queue: Any, executor: Any, staging_buffer: Any = None, worker_index: int = 0) -> None:
            agent = self.controld_plane.agent
            order = FairOrder(
                queue,
                OrderParts(
                    describe=self._describe_waiting,
                    split=self._split_waiting,
                    # The receiver frees SGLang's own staging (unequal tensor parallelism) in the order of its asking.
                    tenancy=Tenancy if getattr(self, "enable_staging", False) else agent.tenancy,
                    wire_bytes=self._wire_bytes_of_chunk,
                    on_take=self._on_take,
                    counting=agent,
                ),
            )
            super().transfer_worker(order, executor, staging_buffer, worker_index)

        def _describe_waiting(self, chunk: Any) -> Waiting:
            sender = self.controld_plane.sender
            if sender is None:
                return Waiting(room=chunk.room, service_class="", raw_bytes=0)
            return Waiting(
                room=chunk.room,
                service_class=sender.class_of(chunk.room),
                raw_bytes=sender.raw_bytes(len(chunk.prefill_kv_indices)),
            )

        def _split_waiting(self, chunk: Any) -> Sequence[Any]:
            sender = self.controld_plane.sender
            if sender is None or getattr(self, "enable_trace", False):
                return (chunk,)
            first_page = chunk.index_slice.start or 0
            first_token = self._prefix_tokens(chunk.room) + first_page * sender.page_tokens
            parts = split_chunk(
                chunk, first_token=first_token, page_tokens=sender.page_tokens, part_tokens=sender.part_tokens
            )
            enqueued_s = self._enqueued_s.get((chunk.room, first_page))
            if enqueued_s is not None:
                for part in parts[1:]:
                    self._enqueued_s[chunk.room, part.index_slice.start] = enqueued_s
            return parts

        def _prefix_tokens(self, room: int) -> int:
            """Tokens of a request that the receiver already has."""
            prefixes = (info.decode_prefix_len for info in list(self.transfer_infos.get(room, {}).values()))
            return next((prefix for prefix in prefixes if prefix is not None), 0)

        def _wire_bytes_of_chunk(self) -> int:
            sender = self.controld_plane.sender
            return 0 if sender is None else sender.wire_bytes_of_chunk

        def _on_take(self, chunk: Any) -> None:
            sender = self.controld_plane.sender
            if sender is None:
                return
            with Guarded(self.controld_plane.agent, "could not note a taken chunk, which goes raw"):
                sender.begin_chunk(None if chunk is None else self._describe(chunk))

        def _describe(self, chunk: Any) -> QueuedChunk:
            first_page = chunk.index_slice.start or 0
            return QueuedChunk(
                room=chunk.room,
                first_page=first_page,
                tokens=chunk.num_kv_tokens,
                is_last=chunk.is_last_chunk,
                prefix_tokens=self._prefix_tokens(chunk.room),
                enqueued_s=self._enqueued_s.pop((chunk.room, first_page), time.monotonic()),
            )

        def send_kvcache(
            self,
            mooncake_session_id: str,
            prefill_kv_indices: Pages,
            dst_kv_ptrs: list[int],
            dst_kv_indices: Pages,
            executor: Any,
            dst_layer_ids: list[int] | None = None,
            dst_device_kv_indices: Pages | None = None,
            dst_kv_item_len: int | None = None,
            dst_attn_tp_size: int | None = None,
        ) -> int:
            send_stock = super().send_kvcache

            def send_raw(source: Pages, target: Pages) -> int:
                return int(
                    send_stock(
                        mooncake_session_id,
                        source,
                        dst_kv_ptrs,
                        target,
                        executor,
                        dst_layer_ids=dst_layer_ids,
                        dst_device_kv_indices=dst_device_kv_indices,
                        dst_kv_item_len=dst_kv_item_len,
                        dst_attn_tp_size=dst_attn_tp_size,
                    )
                )

            sender = self.controld_plane.sender
            if sender is None:
                return send_raw(prefill_kv_indices, dst_kv_indices)
            refusal = ""
            if dst_device_kv_indices is not None:
                refusal = RawReason.UNSUPPORTED_PATH
            elif len(dst_kv_ptrs) != len(self.kv_args.kv_data_ptrs) or dst_layer_ids:
                refusal = RawReason.LAYOUT
            return sender.send(
                mooncake_session_id,
                np.asarray(prefill_kv_indices),
                np.asarray(dst_kv_indices),
                refusal=refusal,
                send_raw=send_raw,
            )

        def send_kvcache_slice(
            self,
            mooncake_session_id: str,
            prefill_kv_indices: Pages,
            dst_kv_ptrs: list[int],
            dst_kv_indices: Pages,
            dst_tp_rank: int,
            dst_attn_tp_size: int,
            dst_kv_item_len: int,
            executor: Any,
            dst_layer_ids: list[int] | None = None,
        ) -> int:
            send_stock = super().send_kvcache_slice

            def send_raw(source: Pages, target: Pages) -> int:
                return int(
                    send_stock(
                        mooncake_session_id,
                        source,
                        dst_kv_ptrs,
                        target,
                        dst_tp_rank,
                        dst_attn_tp_size,
                        dst_kv_item_len,
                        executor,
                        dst_layer_ids,
                    )
                )

            sender = self.controld_plane.sender
            if sender is None:
                return send_raw(prefill_kv_indices, dst_kv_indices)
            return sender.send(
                mooncake_session_id,
                np.asarray(prefill_kv_indices),
                np.asarray(dst_kv_indices),
                refusal=RawReason.UNSUPPORTED_PATH,
                send_raw=send_raw,
            )

        def send_kvcache_dcp(self, *args: Any, **kwargs: Any) -> int:
            self.controld_plane.agent.count("pd.uncoded_path.dcp")
            return int(super().send_kvcache_dcp(*args, **kwargs))

        def send_kvcache_staged(self, *args: Any, **kwargs: Any) -> int:
            self.controld_plane.agent.count("pd.uncoded_path.staged")
            return int(super().send_kvcache_staged(*args, **kwargs))

    return ControldKVManager


def build_unhooked_class(base: type[Any], make_plane: MakePlane, reason: str) -> type[Any]:
    """SGLang's class as it is, except that each manager tells controld why it is not hooked."""

    class UnhookedKVManager(base):  # type: ignore[misc]
        """SGLang's manager, untouched."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            with Guarded(_LogOnly(), "could not tell controld that this server is not hooked"):
                plane = make_plane(args[0], args[1], args[2], False)
                plane.refusal = reason
                plane.start()
                self.controld_plane = plane

    return UnhookedKVManager
