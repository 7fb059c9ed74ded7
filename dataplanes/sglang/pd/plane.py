"""The plane of one KV manager: what it can code, its parts, its agent."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from controld.contract.clock import Clock, SystemClock
from controld.contract.configuration import CODER_PARAMETER, Configuration
from controld.contract.errors import ControldError
from controld.contract.snapshot import CalibratedArtefact
from dataplanes.agent import Agent, AgentIdentity
from dataplanes.kvcodec import NO_ARTEFACTS, ArtefactShelf, KVCodec, KVDtype, KVLayout
from dataplanes.kvcodec.artefacts import id_of, misfit, read_artefact
from dataplanes.kvcodec.coders import OFFERED_CODERS
from dataplanes.kvcodec.space import kv_strategy_space, validate_configuration
from dataplanes.sglang.hardware import device_name
from dataplanes.sglang.model_identity import ModelFolderError, identify_model
from dataplanes.sglang.pd import messages
from dataplanes.sglang.pd.edge import Guarded
from dataplanes.sglang.pd.faults import Faults
from dataplanes.sglang.pd.lane import AckBook, Lane
from dataplanes.sglang.pd.memory import HostMemory, PagedPool, PoolMemory
from dataplanes.sglang.pd.messages import Capability, Endpoint
from dataplanes.sglang.pd.peers import Messenger, Peers
from dataplanes.sglang.pd.receiver import Receiver, ReceiverParts
from dataplanes.sglang.pd.requests import RequestBook
from dataplanes.sglang.pd.self_check import SelfCheck
from dataplanes.sglang.pd.sender import Sender, SenderParts
from dataplanes.sglang.pd.shelf import CodecShelf
from dataplanes.sglang.pd.staging import LoanBook, StagingArea
from dataplanes.sglang.pd.transfer import TIER

_log = logging.getLogger(__name__)

DEPLOYMENT_VARIABLE: Final = "CONTROLD_DEPLOYMENT"
DEFAULT_DEPLOYMENT: Final = "default"
ARTEFACTS_VARIABLE: Final = "CONTROLD_ARTEFACTS"
"""Names the folder of calibrated codec artefacts; those of other models in it are ignored."""

PIECE_BYTES: Final = 1_500_000
"""Raw bytes of a piece: small enough that three stages overlap in a short prompt, large enough that the work of one
piece outweighs its messages."""

SENDER_SLOTS: Final = 4
RECEIVER_SLOTS: Final = 32
LEASE_S: Final = 120.0
_SLOT_TOKENS: Final = 128
_SLOT_MARGIN: Final = 1.25
_SLOT_ALIGNMENT: Final = 1 << 16


class PlaneRefusedError(ControldError):
    """This server's KV cannot be coded; it serves raw, and the reason is told."""


def layout_of(args: Any, *, server_args: Any, is_mla: bool) -> KVLayout:
    """The layout of SGLang's pool.

    Args:
        args: SGLang's `KVArgs`.

    Raises:
        PlaneRefusedError: it is not the plain pool of keys, then values, in a dtype that codecs know.
    """
    reasons = {
        "mla": is_mla,
        "draft_kv": getattr(args, "num_draft_entries", 0) > 0,
        "layout_variant": args.kv_layout is not None,
        "layer_ids": bool(args.kv_layer_ids),
        "context_parallel": server_args.attn_cp_size > 1,
        "kv_sharding": server_args.enable_kv_cache_sharding,
    }
    for reason, applies in reasons.items():
        if applies:
            raise PlaneRefusedError(f"this kind of KV pool is not coded: {reason}", code=f"pd.{reason}")
    model = identify_model(Path(server_args.model_path))
    name = _dtype_name(args, server_args) or model.kv_dtype
    if name not in {member.value for member in KVDtype}:
        raise PlaneRefusedError(
            f"a KV pool of {name} is already compressed", code="pd.dtype", hint="bfloat16, float16 or float32"
        )
    dtype = KVDtype(name)
    entries, page_bytes = len(args.kv_data_ptrs), set(args.kv_item_lens)
    head_bytes = args.page_size * model.head_dim * dtype.element_bytes
    if not entries or entries % 2 or len(page_bytes) != 1:
        raise PlaneRefusedError("the pool is not one key and one value plane a layer", code="pd.layout")
    heads, rest = divmod(page_bytes.pop(), head_bytes)
    if rest or not heads:
        raise PlaneRefusedError(f"pages are no whole heads of {model.head_dim} in {name}", code="pd.layout")
    return KVLayout.keys_then_values(
        layers=entries // 2, heads=heads, head_dim=model.head_dim, dtype=dtype, page_tokens=args.page_size
    )


def _dtype_name(args: Any, server_args: Any) -> str:
    """The pool's dtype as SGLang names it; empty where it says "auto", which is the model's."""
    for said in (args.kv_cache_dtype_str, server_args.dtype):
        name = str(said).removeprefix("torch.")
        if name != "auto":
            return {"bf16": "bfloat16", "half": "float16", "float": "float32"}.get(name, name)
    return ""


def artefacts_of(server_args: Any, environment: Mapping[str, str]) -> ArtefactShelf:
    """The calibrated artefacts of the served model in this server's own folder; none, logged, where it is unreadable.

    Whatever is missing there, controld sends.
    """
    folder = environment.get(ARTEFACTS_VARIABLE, "")
    if not folder:
        return ArtefactShelf()
    try:
        return ArtefactShelf.of_folder(Path(folder), identify_model(Path(server_args.model_path)).fingerprint)
    except ControldError as error:
        _log.error("the folder of calibrated artefacts is left out: %s", error)
        return ArtefactShelf()


def layout_digest(layout: KVLayout) -> bytes:
    """8 bytes that two pools share exactly if pages of one fit the other."""
    text = repr((layout.run_lengths(), layout.dtype.value, layout.page_tokens))
    return hashlib.sha256(text.encode()).digest()[:8]


def slot_bytes_for(layout: KVLayout) -> int:
    """Size of a staging slot: a piece, or the coarsest group of tokens that codecs form, and its side data."""
    tokens = max(_SLOT_TOKENS, layout.page_tokens)
    needed = int(max(PIECE_BYTES, layout.raw_bytes(tokens)) * _SLOT_MARGIN)
    return -(-needed // _SLOT_ALIGNMENT) * _SLOT_ALIGNMENT


@dataclass(frozen=True, slots=True)
class EngineAccess:
    """What the plane needs of SGLang's manager, once that is up.

    Args:
        register: registers memory with the engine: `(address, size)`.
        write: one engine write; returns when the bytes are there.
        message: sends on SGLang's own sockets.
        room_is_alive: whether SGLang still has a room and has not given it up.
        reply_to: where the manager listens.
    """

    register: Any
    write: Any
    message: Messenger
    room_is_alive: Any
    reply_to: Endpoint


class PdPlane:
    """All of this plane in one KV manager, which lives in one scheduler process.

    Args:
        args: SGLang's `KVArgs`.
        role: "prefill" or "decode".
        server_args: SGLang's.
        is_mla: whether the model's attention is MLA.
        address: controld's.
        environment: for the deployment's name and for faults.
        agent: instead of one that connects to `address`; for tests.
        memory: how addresses become tensors.

    Attributes:
        refusal: why nothing is coded here; empty where it is.
        sender, receiver: after `build`, the one of the role; None where refused.
    """

    def __init__(
        self,
        args: Any,
        *,
        role: str,
        server_args: Any,
        is_mla: bool,
        address: str,
        environment: Mapping[str, str] = os.environ,
        agent: Agent | None = None,
        memory: PoolMemory | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.role = role
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        self.requests = RequestBook()
        self.refusal = ""
        self._args = args
        self._memory = memory or HostMemory()
        self._clock = clock or SystemClock()
        self._faults = Faults()
        self._layout: KVLayout | None = None
        self._artefacts = ArtefactShelf()
        self._lanes: list[Lane] = []
        self._areas: list[StagingArea] = []
        self._peers: Peers | None = None
        self._shelf: CodecShelf | None = None
        try:
            self._faults = Faults.from_environment(environment)
            self._layout = layout_of(args, server_args=server_args, is_mla=is_mla)
            self._artefacts = artefacts_of(server_args, environment)
            if server_args.disaggregation_enable_kv_checksum:
                raise PlaneRefusedError("SGLang's KV checksums are on; coded KV would fail them", code="pd.checksum")
            if server_args.enable_unified_memory:
                raise PlaneRefusedError("the unified memory pool is not coded", code="pd.unified_memory")
        except (ControldError, AttributeError, TypeError, ValueError) as error:
            # Whatever SGLang's arguments look like, a server that cannot be coded must still serve.
            self.refuse(str(error) if isinstance(error, ControldError) else repr(error))
        self.agent = agent or Agent(
            identity_of(
                args,
                role=role,
                server_args=server_args,
                layout=self._layout,
                artefacts=self._artefacts,
                environment=environment,
            ),
            address,
            clock=self._clock,
            validate_configuration=self._validate,
            hold_artefact=self._hold,
        )

    def refuse(self, reason: str) -> None:
        """Code nothing here; the reason is told."""
        self.refusal = reason
        self.sender = self.receiver = None
        _log.error("the PD plane does not attach, KV goes raw: %s", reason)

    def _hold(self, artefact: CalibratedArtefact) -> None:
        """Takes over what controld sends, before any table names it."""
        fresh, fingerprint = read_artefact(artefact.content, "what controld sent")
        name = id_of(fresh)
        if fingerprint != self.agent.identity.model_fingerprint:
            raise PlaneRefusedError(f"artefact {name} is of another model", code="pd.foreign_artefact")
        why = misfit(fresh, self._layout) if self._layout is not None else self.refusal
        if why:
            raise PlaneRefusedError(f"artefact {name} does not fit: {why}", code="pd.foreign_artefact")
        if name not in self._artefacts:
            self._artefacts.add(fresh)
            _log.info("holds the calibrated artefact %s from controld", name)

    def _validate(self, configuration: Configuration) -> None:
        """Refuses what this pool cannot carry; what it can is made ready before the first transfer draws it."""
        if self._layout is None:
            raise PlaneRefusedError(self.refusal, code="pd.refused")
        validate_configuration(configuration, self._layout, self._artefacts)
        if self._shelf is not None:
            self._shelf.want([configuration])

    def build(self, access: EngineAccess) -> None:
        """Make the parts; called when the engine and the sockets are there and SGLang's threads are not yet."""
        if self.refusal or self._layout is None:
            return
        layout = self._layout
        pool = PagedPool(
            self._memory, addresses=self._args.kv_data_ptrs, sizes_bytes=self._args.kv_data_lens, layout=layout
        )
        warm_tokens = max(layout.page_tokens, PIECE_BYTES // layout.token_bytes)
        self._shelf = CodecShelf(layout, warm_tokens, self.agent, self._artefacts)
        if self.role == "prefill":
            acks = AckBook(self._clock)
            self._peers = Peers(self._clock, access.message, access.reply_to, SENDER_SLOTS)
            self.sender = Sender(
                SenderParts(
                    agent=self.agent,
                    clock=self._clock,
                    layout=layout,
                    layout_digest=layout_digest(layout),
                    shelf=self._shelf,
                    requests=self.requests,
                    peers=self._peers,
                    acks=acks,
                    message=access.message,
                    new_lane=lambda: self._new_lane(access, pool, acks),
                    piece_bytes=PIECE_BYTES,
                    room_is_open=access.room_is_alive,
                    faults=self._faults,
                )
            )
        else:
            area = self._new_area(access, RECEIVER_SLOTS)
            self.receiver = Receiver(
                ReceiverParts(
                    agent=self.agent,
                    clock=self._clock,
                    layout=layout,
                    pool=pool,
                    area=area,
                    loans=LoanBook(RECEIVER_SLOTS, LEASE_S),
                    message=access.message,
                    room_is_alive=access.room_is_alive,
                    faults=self._faults,
                    artefacts=self._artefacts,
                )
            )

    def start(self) -> None:
        """Start our threads and the agent; called from inside the hooked class once SGLang's own are up."""
        self.agent.start()
        if self.refusal or self._shelf is None:
            self.agent.not_attached(self.refusal)
            return
        self._shelf.start()
        if self.receiver is not None:
            self.receiver.start()
        threading.Thread(target=self._attach, name="controld-attach", daemon=True).start()

    def end_threads(self) -> None:
        """Before SGLang tears its manager down: once this returns, nothing of ours writes to the pool or sends.

        What is under way on a sender is still written; what its workers encode from here on goes raw.
        """
        if self.receiver is not None:
            self.receiver.stop()
        if self._shelf is not None:
            self._shelf.stop()
        for lane in self._lanes:
            lane.stop()

    def staging_addresses(self) -> list[int]:
        """What is registered with the engine on our behalf."""
        return [area.address for area in self._areas]

    def capability(self) -> Capability | None:
        """What a receiver announces."""
        if self.receiver is None or self._layout is None:
            return None
        return Capability(layout_digest=layout_digest(self._layout), slot_bytes=slot_bytes_for(self._layout))

    def announce_peer(self, session: str, endpoint: Endpoint, capability: Capability | None) -> None:
        """A receiver registered with this sender."""
        if self._peers is not None:
            self._peers.announce(session, endpoint, capability)

    def handle(self, frames: Sequence[bytes]) -> None:
        """One of our messages arrived on SGLang's socket; nothing is raised into its thread."""
        with Guarded(self.agent, "dropped a message"):
            try:
                message = messages.parse(frames)
            except messages.MessageError as error:
                _log.warning("dropped a message: %s", error)
                self.agent.count("pd.message_malformed")
                return
            self._dispatch(message)

    def _dispatch(self, message: messages.Message) -> None:
        sender, receiver = self.sender, self.receiver
        match message:
            case messages.Ack() if sender:
                sender.on_ack(message)
            case messages.Grant() if sender:
                sender.on_grant(message)
            case messages.Chunk() if receiver:
                receiver.on_chunk(message)
            case messages.Open() if receiver:
                receiver.on_open(message)
            case messages.Cancel() if receiver:
                receiver.on_cancel(message)
            case messages.Finish() if receiver:
                receiver.on_finish(message)
            case _:
                self.agent.count("pd.message_misplaced")

    def _attach(self) -> None:
        assert self._shelf is not None and self._layout is not None
        with Guarded(self.agent, "codecs do not run here; KV goes raw") as warming:
            if not KVCodec.compile():
                self.agent.count("pd.codec_without_kernels")
            space = kv_strategy_space(self._layout, self._artefacts)
            for coder in OFFERED_CODERS:
                # The first that has it, from one lazy enumeration: the space is far too large to walk.
                self._shelf.make_ready(next(c for c in space.enumerate() if c[CODER_PARAMETER] == coder))
        if warming.error is None:
            self.agent.attached()
        else:
            self.agent.not_attached(f"codecs do not run: {warming.error!r}")

    def _new_area(self, access: EngineAccess, slots: int) -> StagingArea:
        assert self._layout is not None
        area = StagingArea(self._memory, slots=slots, slot_bytes=slot_bytes_for(self._layout))
        access.register(area.address, area.size_bytes)
        self._areas.append(area)
        return area

    def _new_lane(self, access: EngineAccess, pool: PagedPool, acks: AckBook) -> Lane:
        area = self._new_area(access, SENDER_SLOTS)
        lane = Lane(
            area=area,
            pool=pool,
            write=access.write,
            message=access.message,
            acks=acks,
            reply_to=access.reply_to,
            clock=self._clock,
            counting=self.agent,
            self_check=SelfCheck(pool, self._artefacts, self.agent),
        )
        self._lanes.append(lane)
        lane.start()
        return lane


def identity_of(
    args: Any,
    *,
    role: str,
    server_args: Any,
    layout: KVLayout | None,
    artefacts: Mapping[str, object] = NO_ARTEFACTS,
    environment: Mapping[str, str],
) -> AgentIdentity:
    """Who this scheduler is to controld."""
    try:
        model = identify_model(Path(server_args.model_path))
        name, fingerprint = model.name, model.fingerprint
    except ModelFolderError as error:
        _log.warning("no fingerprint, so no measured quality applies: %s", error)
        name, fingerprint = str(server_args.model_path), ""
    host = environment.get("SGLANG_HOST_IP") or socket.gethostname()
    return AgentIdentity(
        deployment=environment.get(DEPLOYMENT_VARIABLE) or DEFAULT_DEPLOYMENT,
        agent_id=f"{role}-{host}-{server_args.port}-r{args.engine_rank}",
        kind="sglang",
        role=role,
        rank=args.engine_rank,
        role_peers=server_args.tp_size,
        model_name=name,
        model_fingerprint=fingerprint,
        kv_dtype=layout.dtype.value if layout else "",
        kv_bytes_per_token=layout.token_bytes if layout else 0,
        device=device_name(str(server_args.device)),
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        config_hash=layout_digest(layout).hex() if layout else "",
        space_json=kv_strategy_space(layout, artefacts).to_json() if layout else "",
        tiers=(TIER,),
    )
