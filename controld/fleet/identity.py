"""Who an agent says it is, checked field by field."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controld.contract.errors import FieldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.checks import checked_count, checked_text
from controld.contract.rpc.convert import PROTOCOL_VERSION
from controld.contract.rpc.convert_video import engine_facts_from_proto
from controld.contract.video import EngineFacts
from controld.fleet.errors import RejectError
from controld.fleet.published import Selector

MAX_SPACE_CHARACTERS = 1024 * 1024
CLOCK_SKEW_S = 3600.0
"""How far ahead of ours an agent's clock may be; its start time decides which of two instances is the newer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """The fields of `Hello`.

    Args:
        started_unix_s: when the process began; of two instances of one agent the later one is the real one.
        resource_kinds: kinds of resource that it understands; empty means: all.
        engine: what a video engine says of itself; None of any other plane.
    """

    deployment: str
    agent_id: str
    instance_id: str
    kind: str
    role: str
    rank: int
    role_peers: int
    model_name: str
    model_fingerprint: str
    kv_dtype: str
    kv_bytes_per_token: int
    device: str
    torch_version: str
    threads: int
    config_hash: str
    space_json: str
    tiers: tuple[str, ...]
    resource_kinds: frozenset[str]
    started_unix_s: float
    engine: EngineFacts | None = None

    @property
    def selector(self) -> Selector:
        """Which published versions are for it."""
        return Selector(self.kind, self.deployment)

    @property
    def hardware(self) -> str:
        """What codec times depend on, as one key."""
        return f"{self.device}/{self.torch_version}/{self.threads}"


def identity_from_hello(message: pb.Hello, *, now_unix_s: float) -> AgentIdentity:
    """Check a `Hello`.

    Raises:
        RejectError: another protocol version, or a field that is not as it must be (it is named in the message).
    """
    if message.protocol_version != PROTOCOL_VERSION:
        raise RejectError(
            f"hello.protocol_version: {message.protocol_version}, but this controld speaks {PROTOCOL_VERSION}",
            code="hello.protocol",
            hint="run the same release on both sides",
        )
    try:
        return _identity(message, now_unix_s)
    except FieldError as error:
        raise RejectError(error.message, code="hello.field", hint=error.hint) from error


def _identity(message: pb.Hello, now_unix_s: float) -> AgentIdentity:
    required = ("deployment", "agent_id", "instance_id", "kind", "role")
    for name in required:
        if not checked_text(getattr(message, name), f"hello.{name}"):
            raise FieldError(f"hello.{name}", "is empty")
    checked_text(message.config_hash, "hello.config_hash")
    for group in ("model", "hardware"):
        part = getattr(message, group)
        for descriptor in part.DESCRIPTOR.fields:
            value = getattr(part, descriptor.name)
            field = f"hello.{group}.{descriptor.name}"
            if isinstance(value, str):
                checked_text(value, field)
            else:
                checked_count(value, field)
    for index, name in enumerate(message.capabilities.tiers):
        checked_text(name, f"hello.capabilities.tiers[{index}]")
    for index, name in enumerate(message.capabilities.resource_kinds):
        checked_text(name, f"hello.capabilities.resource_kinds[{index}]")
    started = message.started_unix_s
    if not math.isfinite(started) or started < 0:
        raise FieldError("hello.started_unix_s", f"{started} is not a finite non-negative number")
    if started > now_unix_s + CLOCK_SKEW_S:
        raise FieldError(
            "hello.started_unix_s",
            f"is {started - now_unix_s:.0f} s in the future",
            hint="set the clock of that machine",
        )
    return AgentIdentity(
        deployment=message.deployment,
        agent_id=message.agent_id,
        instance_id=message.instance_id,
        kind=message.kind,
        role=message.role,
        rank=message.rank,
        role_peers=message.role_peers,
        model_name=message.model.name,
        model_fingerprint=message.model.fingerprint,
        kv_dtype=message.model.kv_dtype,
        kv_bytes_per_token=message.model.kv_bytes_per_token,
        device=message.hardware.device,
        torch_version=message.hardware.torch_version,
        threads=message.hardware.threads,
        config_hash=message.config_hash,
        space_json=checked_text(message.capabilities.space_json, "hello.capabilities.space_json", MAX_SPACE_CHARACTERS),
        tiers=tuple(message.capabilities.tiers),
        resource_kinds=frozenset(message.capabilities.resource_kinds),
        started_unix_s=started,
        engine=engine_facts_from_proto(message.capabilities.engine)
        if message.capabilities.HasField("engine")
        else None,
    )
