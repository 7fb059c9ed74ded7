"""Who an agent is, and the clockwork it runs by."""

from __future__ import annotations

from dataclasses import dataclass

from controld.contract.errors import FieldError
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import PROTOCOL_VERSION
from controld.contract.rpc.convert_video import engine_facts_to_proto
from controld.contract.snapshot import ResourceKind
from controld.contract.video import EngineFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIdentity:
    """What the agent says of its data plane in its first message.

    Args:
        deployment: the deployment that policies select by.
        agent_id: stable across restarts of this process; one live instance at a time.
        kind: "sglang" or "longlive".
        role: "prefill", "decode", "prefix_store", "engine" or "profiler".
        rank, role_peers: which of how many ranks of the role.
        model_fingerprint: SHA-256 over config.json and the safetensors headers and sizes, hex.
        kv_bytes_per_token: raw bytes of one token over all layers.
        device, torch_version, threads: what codec times depend on.
        config_hash: hash of the data plane's own start-up configuration.
        space_json: the strategy space that it advertises, canonical JSON.
        tiers: "pd", "prefix_store", "video".
        engine: what a video engine says of itself; None for any other plane.

    Raises:
        FieldError: a name that the daemon needs is empty.
    """

    deployment: str
    agent_id: str
    kind: str
    role: str
    rank: int = 0
    role_peers: int = 1
    model_name: str = ""
    model_fingerprint: str = ""
    kv_dtype: str = ""
    kv_bytes_per_token: int = 0
    device: str = ""
    torch_version: str = ""
    threads: int = 0
    config_hash: str = ""
    space_json: str = ""
    tiers: tuple[str, ...] = ()
    engine: EngineFacts | None = None

    def __post_init__(self) -> None:
        for name in ("deployment", "agent_id", "kind", "role"):
            if not getattr(self, name):
                raise FieldError(f"agent_identity.{name}", "is empty", code="agent.identity")

    def hello(self, *, instance_id: str, started_unix_s: float, takes_artefacts: bool = False) -> pb.Hello:
        """The first message of a stream."""
        takes = {
            ResourceKind.CALIBRATED_ARTEFACT: takes_artefacts,
            ResourceKind.ENGINE_SETTING: self.engine is not None,
        }
        kinds = [kind.value for kind in ResourceKind if takes.get(kind, True)]
        return pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            deployment=self.deployment,
            agent_id=self.agent_id,
            instance_id=instance_id,
            kind=self.kind,
            role=self.role,
            rank=self.rank,
            role_peers=self.role_peers,
            model=pb.Model(
                name=self.model_name,
                fingerprint=self.model_fingerprint,
                kv_dtype=self.kv_dtype,
                kv_bytes_per_token=self.kv_bytes_per_token,
            ),
            hardware=pb.Hardware(device=self.device, torch_version=self.torch_version, threads=self.threads),
            config_hash=self.config_hash,
            capabilities=pb.Capabilities(
                space_json=self.space_json,
                tiers=self.tiers,
                resource_kinds=kinds,
                engine=None if self.engine is None else engine_facts_to_proto(self.engine),
            ),
            started_unix_s=started_unix_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTiming:
    """Seconds of real time; the agent's lease and estimates run on its clock instead.

    Args:
        telemetry_interval_s: between two telemetry messages; also how often links are refreshed and the stream watched.
        effect_delay_s: how long an effect may wait for others to share its message.
        backoff_first_s, backoff_max_s: before connecting again; doubles, with jitter.
        steady_session_s: a stream that lived this long starts the backoff afresh.
        welcome_timeout_s: a daemon that has not answered by then is left.
        silence_limit_s: a daemon that says nothing for so long is left, too; it renews the lease every 30 s.
    """

    telemetry_interval_s: float = 1.0
    effect_delay_s: float = 0.05
    backoff_first_s: float = 0.1
    backoff_max_s: float = 5.0
    steady_session_s: float = 5.0
    welcome_timeout_s: float = 5.0
    silence_limit_s: float = 120.0
