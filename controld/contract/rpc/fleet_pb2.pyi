from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class AgentMessage(_message.Message):
    __slots__ = ("hello", "ack", "nack", "effects", "telemetry", "trial_result", "setting_applied", "chunk_reports")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    TRIAL_RESULT_FIELD_NUMBER: _ClassVar[int]
    SETTING_APPLIED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_REPORTS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ack: Ack
    nack: Nack
    effects: EffectReport
    telemetry: Telemetry
    trial_result: TrialResult
    setting_applied: SettingApplied
    chunk_reports: ChunkReports
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ack: _Optional[_Union[Ack, _Mapping]] = ..., nack: _Optional[_Union[Nack, _Mapping]] = ..., effects: _Optional[_Union[EffectReport, _Mapping]] = ..., telemetry: _Optional[_Union[Telemetry, _Mapping]] = ..., trial_result: _Optional[_Union[TrialResult, _Mapping]] = ..., setting_applied: _Optional[_Union[SettingApplied, _Mapping]] = ..., chunk_reports: _Optional[_Union[ChunkReports, _Mapping]] = ...) -> None: ...

class ControlMessage(_message.Message):
    __slots__ = ("welcome", "reject", "snapshot", "lease_renewal", "effect_ack", "trial_request", "trial_cancel", "drain")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REJECT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    LEASE_RENEWAL_FIELD_NUMBER: _ClassVar[int]
    EFFECT_ACK_FIELD_NUMBER: _ClassVar[int]
    TRIAL_REQUEST_FIELD_NUMBER: _ClassVar[int]
    TRIAL_CANCEL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    reject: Reject
    snapshot: Snapshot
    lease_renewal: LeaseRenewal
    effect_ack: EffectAck
    trial_request: TrialRequest
    trial_cancel: TrialCancel
    drain: Drain
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., reject: _Optional[_Union[Reject, _Mapping]] = ..., snapshot: _Optional[_Union[Snapshot, _Mapping]] = ..., lease_renewal: _Optional[_Union[LeaseRenewal, _Mapping]] = ..., effect_ack: _Optional[_Union[EffectAck, _Mapping]] = ..., trial_request: _Optional[_Union[TrialRequest, _Mapping]] = ..., trial_cancel: _Optional[_Union[TrialCancel, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "deployment", "agent_id", "instance_id", "kind", "role", "rank", "role_peers", "model", "hardware", "config_hash", "capabilities", "started_unix_s")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEPLOYMENT_FIELD_NUMBER: _ClassVar[int]
    AGENT_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    ROLE_PEERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    CONFIG_HASH_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    STARTED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    deployment: str
    agent_id: str
    instance_id: str
    kind: str
    role: str
    rank: int
    role_peers: int
    model: Model
    hardware: Hardware
    config_hash: str
    capabilities: Capabilities
    started_unix_s: float
    def __init__(self, protocol_version: _Optional[int] = ..., deployment: _Optional[str] = ..., agent_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., kind: _Optional[str] = ..., role: _Optional[str] = ..., rank: _Optional[int] = ..., role_peers: _Optional[int] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., hardware: _Optional[_Union[Hardware, _Mapping]] = ..., config_hash: _Optional[str] = ..., capabilities: _Optional[_Union[Capabilities, _Mapping]] = ..., started_unix_s: _Optional[float] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "fingerprint", "kv_dtype", "kv_bytes_per_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    kv_dtype: str
    kv_bytes_per_token: int
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_bytes_per_token: _Optional[int] = ...) -> None: ...

class Hardware(_message.Message):
    __slots__ = ("device", "torch_version", "threads")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TORCH_VERSION_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    device: str
    torch_version: str
    threads: int
    def __init__(self, device: _Optional[str] = ..., torch_version: _Optional[str] = ..., threads: _Optional[int] = ...) -> None: ...

class Capabilities(_message.Message):
    __slots__ = ("space_json", "tiers", "resource_kinds", "engine")
    SPACE_JSON_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_KINDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    space_json: str
    tiers: _containers.RepeatedScalarFieldContainer[str]
    resource_kinds: _containers.RepeatedScalarFieldContainer[str]
    engine: EngineFacts
    def __init__(self, space_json: _Optional[str] = ..., tiers: _Optional[_Iterable[str]] = ..., resource_kinds: _Optional[_Iterable[str]] = ..., engine: _Optional[_Union[EngineFacts, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol_version", "server_id", "policy_generation", "effects_acked_up_to")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    EFFECTS_ACKED_UP_TO_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    server_id: str
    policy_generation: int
    effects_acked_up_to: int
    def __init__(self, protocol_version: _Optional[int] = ..., server_id: _Optional[str] = ..., policy_generation: _Optional[int] = ..., effects_acked_up_to: _Optional[int] = ...) -> None: ...

class Reject(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: str
    reason: str
    def __init__(self, code: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("reason", "reconnect_after_s")
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECONNECT_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    reason: str
    reconnect_after_s: float
    def __init__(self, reason: _Optional[str] = ..., reconnect_after_s: _Optional[float] = ...) -> None: ...

class Snapshot(_message.Message):
    __slots__ = ("version", "nonce", "ttl_s", "resources", "removed", "page_index", "page_count", "policy_generation")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    RESOURCES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    POLICY_GENERATION_FIELD_NUMBER: _ClassVar[int]
    version: int
    nonce: str
    ttl_s: float
    resources: _containers.RepeatedCompositeFieldContainer[Resource]
    removed: _containers.RepeatedScalarFieldContainer[str]
    page_index: int
    page_count: int
    policy_generation: int
    def __init__(self, version: _Optional[int] = ..., nonce: _Optional[str] = ..., ttl_s: _Optional[float] = ..., resources: _Optional[_Iterable[_Union[Resource, _Mapping]]] = ..., removed: _Optional[_Iterable[str]] = ..., page_index: _Optional[int] = ..., page_count: _Optional[int] = ..., policy_generation: _Optional[int] = ...) -> None: ...

class Resource(_message.Message):
    __slots__ = ("name", "decision_table", "class_rules", "calibrated_artefact", "engine_setting")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DECISION_TABLE_FIELD_NUMBER: _ClassVar[int]
    CLASS_RULES_FIELD_NUMBER: _ClassVar[int]
    CALIBRATED_ARTEFACT_FIELD_NUMBER: _ClassVar[int]
    ENGINE_SETTING_FIELD_NUMBER: _ClassVar[int]
    name: str
    decision_table: DecisionTable
    class_rules: ClassRules
    calibrated_artefact: CalibratedArtefact
    engine_setting: EngineSetting
    def __init__(self, name: _Optional[str] = ..., decision_table: _Optional[_Union[DecisionTable, _Mapping]] = ..., class_rules: _Optional[_Union[ClassRules, _Mapping]] = ..., calibrated_artefact: _Optional[_Union[CalibratedArtefact, _Mapping]] = ..., engine_setting: _Optional[_Union[EngineSetting, _Mapping]] = ...) -> None: ...

class DecisionTable(_message.Message):
    __slots__ = ("tier", "link_group", "classes", "size_edges_bytes", "bandwidth_edges_bytes_per_s", "load_edges", "arms", "mixtures", "cells", "prior_bandwidth_bytes_per_s", "guard_sample")
    TIER_FIELD_NUMBER: _ClassVar[int]
    LINK_GROUP_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    SIZE_EDGES_BYTES_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_EDGES_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_EDGES_FIELD_NUMBER: _ClassVar[int]
    ARMS_FIELD_NUMBER: _ClassVar[int]
    MIXTURES_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    PRIOR_BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    GUARD_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    tier: str
    link_group: str
    classes: _containers.RepeatedScalarFieldContainer[str]
    size_edges_bytes: _containers.RepeatedScalarFieldContainer[float]
    bandwidth_edges_bytes_per_s: _containers.RepeatedScalarFieldContainer[float]
    load_edges: _containers.RepeatedScalarFieldContainer[float]
    arms: _containers.RepeatedCompositeFieldContainer[Arm]
    mixtures: _containers.RepeatedCompositeFieldContainer[Mixture]
    cells: _containers.RepeatedScalarFieldContainer[int]
    prior_bandwidth_bytes_per_s: float
    guard_sample: float
    def __init__(self, tier: _Optional[str] = ..., link_group: _Optional[str] = ..., classes: _Optional[_Iterable[str]] = ..., size_edges_bytes: _Optional[_Iterable[float]] = ..., bandwidth_edges_bytes_per_s: _Optional[_Iterable[float]] = ..., load_edges: _Optional[_Iterable[float]] = ..., arms: _Optional[_Iterable[_Union[Arm, _Mapping]]] = ..., mixtures: _Optional[_Iterable[_Union[Mixture, _Mapping]]] = ..., cells: _Optional[_Iterable[int]] = ..., prior_bandwidth_bytes_per_s: _Optional[float] = ..., guard_sample: _Optional[float] = ...) -> None: ...

class Arm(_message.Message):
    __slots__ = ("arm_id", "configuration_json")
    ARM_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_JSON_FIELD_NUMBER: _ClassVar[int]
    arm_id: str
    configuration_json: str
    def __init__(self, arm_id: _Optional[str] = ..., configuration_json: _Optional[str] = ...) -> None: ...

class Mixture(_message.Message):
    __slots__ = ("arms", "weights", "raw_below_s", "raw_below_s_per_byte")
    ARMS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    RAW_BELOW_S_FIELD_NUMBER: _ClassVar[int]
    RAW_BELOW_S_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    arms: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    raw_below_s: float
    raw_below_s_per_byte: float
    def __init__(self, arms: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., raw_below_s: _Optional[float] = ..., raw_below_s_per_byte: _Optional[float] = ...) -> None: ...

class ClassRules(_message.Message):
    __slots__ = ("rules", "tenants")
    RULES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    rules: _containers.RepeatedCompositeFieldContainer[ClassRule]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantShare]
    def __init__(self, rules: _Optional[_Iterable[_Union[ClassRule, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantShare, _Mapping]]] = ...) -> None: ...

class TenantShare(_message.Message):
    __slots__ = ("name", "weight")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    name: str
    weight: float
    def __init__(self, name: _Optional[str] = ..., weight: _Optional[float] = ...) -> None: ...

class ClassRule(_message.Message):
    __slots__ = ("service_class", "extra_key", "priority", "unlearned", "tenant")
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    EXTRA_KEY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    UNLEARNED_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    service_class: str
    extra_key: str
    priority: int
    unlearned: bool
    tenant: str
    def __init__(self, service_class: _Optional[str] = ..., extra_key: _Optional[str] = ..., priority: _Optional[int] = ..., unlearned: _Optional[bool] = ..., tenant: _Optional[str] = ...) -> None: ...

class CalibratedArtefact(_message.Message):
    __slots__ = ("sha256", "model_fingerprint", "content", "part_index", "part_count")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PART_INDEX_FIELD_NUMBER: _ClassVar[int]
    PART_COUNT_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    model_fingerprint: str
    content: bytes
    part_index: int
    part_count: int
    def __init__(self, sha256: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., content: _Optional[bytes] = ..., part_index: _Optional[int] = ..., part_count: _Optional[int] = ...) -> None: ...

class LeaseRenewal(_message.Message):
    __slots__ = ("version", "ttl_s")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    version: int
    ttl_s: float
    def __init__(self, version: _Optional[int] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class Ack(_message.Message):
    __slots__ = ("nonce", "version")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    nonce: str
    version: int
    def __init__(self, nonce: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Nack(_message.Message):
    __slots__ = ("nonce", "version", "error_detail", "resource")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_DETAIL_FIELD_NUMBER: _ClassVar[int]
    RESOURCE_FIELD_NUMBER: _ClassVar[int]
    nonce: str
    version: int
    error_detail: str
    resource: str
    def __init__(self, nonce: _Optional[str] = ..., version: _Optional[int] = ..., error_detail: _Optional[str] = ..., resource: _Optional[str] = ...) -> None: ...

class EffectReport(_message.Message):
    __slots__ = ("effects",)
    EFFECTS_FIELD_NUMBER: _ClassVar[int]
    effects: _containers.RepeatedCompositeFieldContainer[Effect]
    def __init__(self, effects: _Optional[_Iterable[_Union[Effect, _Mapping]]] = ...) -> None: ...

class EffectAck(_message.Message):
    __slots__ = ("up_to_seq",)
    UP_TO_SEQ_FIELD_NUMBER: _ClassVar[int]
    up_to_seq: int
    def __init__(self, up_to_seq: _Optional[int] = ...) -> None: ...

class Effect(_message.Message):
    __slots__ = ("seq", "transfer_id", "half", "arm_id", "table_version", "service_class", "tier", "link_group", "tokens", "chunks", "raw_bytes", "wire_bytes", "encode_s", "wire_s", "decode_s", "wait_s", "total_s", "path", "verdict", "reason", "expected_bytes", "bandwidth_bytes_per_s", "load", "explored", "finished_unix_s", "reconstruction_error")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    HALF_FIELD_NUMBER: _ClassVar[int]
    ARM_ID_FIELD_NUMBER: _ClassVar[int]
    TABLE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LINK_GROUP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    EXPLORED_FIELD_NUMBER: _ClassVar[int]
    FINISHED_UNIX_S_FIELD_NUMBER: _ClassVar[int]
    RECONSTRUCTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    seq: int
    transfer_id: str
    half: str
    arm_id: str
    table_version: int
    service_class: str
    tier: str
    link_group: str
    tokens: int
    chunks: int
    raw_bytes: int
    wire_bytes: int
    encode_s: float
    wire_s: float
    decode_s: float
    wait_s: float
    total_s: float
    path: str
    verdict: str
    reason: str
    expected_bytes: float
    bandwidth_bytes_per_s: float
    load: float
    explored: bool
    finished_unix_s: float
    reconstruction_error: float
    def __init__(self, seq: _Optional[int] = ..., transfer_id: _Optional[str] = ..., half: _Optional[str] = ..., arm_id: _Optional[str] = ..., table_version: _Optional[int] = ..., service_class: _Optional[str] = ..., tier: _Optional[str] = ..., link_group: _Optional[str] = ..., tokens: _Optional[int] = ..., chunks: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., encode_s: _Optional[float] = ..., wire_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., wait_s: _Optional[float] = ..., total_s: _Optional[float] = ..., path: _Optional[str] = ..., verdict: _Optional[str] = ..., reason: _Optional[str] = ..., expected_bytes: _Optional[float] = ..., bandwidth_bytes_per_s: _Optional[float] = ..., load: _Optional[float] = ..., explored: _Optional[bool] = ..., finished_unix_s: _Optional[float] = ..., reconstruction_error: _Optional[float] = ...) -> None: ...

class Telemetry(_message.Message):
    __slots__ = ("attached", "attach_reason", "applied_version", "links", "counters", "lease_left_s", "engine")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    ATTACH_REASON_FIELD_NUMBER: _ClassVar[int]
    APPLIED_VERSION_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    attached: bool
    attach_reason: str
    applied_version: int
    links: _containers.RepeatedCompositeFieldContainer[LinkEstimate]
    counters: _containers.ScalarMap[str, int]
    lease_left_s: float
    engine: EngineState
    def __init__(self, attached: _Optional[bool] = ..., attach_reason: _Optional[str] = ..., applied_version: _Optional[int] = ..., links: _Optional[_Iterable[_Union[LinkEstimate, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., lease_left_s: _Optional[float] = ..., engine: _Optional[_Union[EngineState, _Mapping]] = ...) -> None: ...

class LinkEstimate(_message.Message):
    __slots__ = ("link_group", "tier", "bandwidth_bytes_per_s", "bandwidth_sd_bytes_per_s", "bandwidth_age_s", "offered_bytes_per_s", "offered_sd_bytes_per_s", "backlog_bytes", "transfers", "offered_by_class_bytes_per_s")
    class OfferedByClassBytesPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LINK_GROUP_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_SD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BANDWIDTH_AGE_S_FIELD_NUMBER: _ClassVar[int]
    OFFERED_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    OFFERED_SD_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFERS_FIELD_NUMBER: _ClassVar[int]
    OFFERED_BY_CLASS_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    link_group: str
    tier: str
    bandwidth_bytes_per_s: float
    bandwidth_sd_bytes_per_s: float
    bandwidth_age_s: float
    offered_bytes_per_s: float
    offered_sd_bytes_per_s: float
    backlog_bytes: int
    transfers: int
    offered_by_class_bytes_per_s: _containers.ScalarMap[str, float]
    def __init__(self, link_group: _Optional[str] = ..., tier: _Optional[str] = ..., bandwidth_bytes_per_s: _Optional[float] = ..., bandwidth_sd_bytes_per_s: _Optional[float] = ..., bandwidth_age_s: _Optional[float] = ..., offered_bytes_per_s: _Optional[float] = ..., offered_sd_bytes_per_s: _Optional[float] = ..., backlog_bytes: _Optional[int] = ..., transfers: _Optional[int] = ..., offered_by_class_bytes_per_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TrialRequest(_message.Message):
    __slots__ = ("study_id", "trial_id", "workload", "lossy_json", "coders", "prompt_tokens", "segments_per_length", "first_segment", "continuation_tokens", "deadline_s", "clip_chunks")
    STUDY_ID_FIELD_NUMBER: _ClassVar[int]
    TRIAL_ID_FIELD_NUMBER: _ClassVar[int]
    WORKLOAD_FIELD_NUMBER: _ClassVar[int]
    LOSSY_JSON_FIELD_NUMBER: _ClassVar[int]
    CODERS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_PER_LENGTH_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CONTINUATION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_S_FIELD_NUMBER: _ClassVar[int]
    CLIP_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    study_id: str
    trial_id: str
    workload: str
    lossy_json: str
    coders: _containers.RepeatedScalarFieldContainer[str]
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    segments_per_length: int
    first_segment: int
    continuation_tokens: int
    deadline_s: float
    clip_chunks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, study_id: _Optional[str] = ..., trial_id: _Optional[str] = ..., workload: _Optional[str] = ..., lossy_json: _Optional[str] = ..., coders: _Optional[_Iterable[str]] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., segments_per_length: _Optional[int] = ..., first_segment: _Optional[int] = ..., continuation_tokens: _Optional[int] = ..., deadline_s: _Optional[float] = ..., clip_chunks: _Optional[_Iterable[int]] = ...) -> None: ...

class TrialCancel(_message.Message):
    __slots__ = ("study_id", "trial_id")
    STUDY_ID_FIELD_NUMBER: _ClassVar[int]
    TRIAL_ID_FIELD_NUMBER: _ClassVar[int]
    study_id: str
    trial_id: str
    def __init__(self, study_id: _Optional[str] = ..., trial_id: _Optional[str] = ...) -> None: ...

class TrialResult(_message.Message):
    __slots__ = ("study_id", "trial_id", "status", "detail", "losses", "coders", "seconds", "corpus", "clips", "engine")
    STUDY_ID_FIELD_NUMBER: _ClassVar[int]
    TRIAL_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    CODERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CORPUS_FIELD_NUMBER: _ClassVar[int]
    CLIPS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    study_id: str
    trial_id: str
    status: str
    detail: str
    losses: _containers.RepeatedCompositeFieldContainer[SegmentLoss]
    coders: _containers.RepeatedCompositeFieldContainer[CoderMeasurement]
    seconds: float
    corpus: str
    clips: _containers.RepeatedCompositeFieldContainer[ClipLoss]
    engine: _containers.RepeatedCompositeFieldContainer[EngineMeasurement]
    def __init__(self, study_id: _Optional[str] = ..., trial_id: _Optional[str] = ..., status: _Optional[str] = ..., detail: _Optional[str] = ..., losses: _Optional[_Iterable[_Union[SegmentLoss, _Mapping]]] = ..., coders: _Optional[_Iterable[_Union[CoderMeasurement, _Mapping]]] = ..., seconds: _Optional[float] = ..., corpus: _Optional[str] = ..., clips: _Optional[_Iterable[_Union[ClipLoss, _Mapping]]] = ..., engine: _Optional[_Iterable[_Union[EngineMeasurement, _Mapping]]] = ...) -> None: ...

class ClipLoss(_message.Message):
    __slots__ = ("chunks", "segment", "loss")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    chunks: int
    segment: int
    loss: float
    def __init__(self, chunks: _Optional[int] = ..., segment: _Optional[int] = ..., loss: _Optional[float] = ...) -> None: ...

class EngineMeasurement(_message.Message):
    __slots__ = ("variant", "forward_s", "vae_s", "frames_per_chunk", "weights_bytes", "kv_bytes", "activation_bytes", "session_bytes", "reference_bytes", "drift", "motion")
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    VAE_S_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    MOTION_FIELD_NUMBER: _ClassVar[int]
    variant: str
    forward_s: float
    vae_s: float
    frames_per_chunk: int
    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    session_bytes: int
    reference_bytes: int
    drift: float
    motion: float
    def __init__(self, variant: _Optional[str] = ..., forward_s: _Optional[float] = ..., vae_s: _Optional[float] = ..., frames_per_chunk: _Optional[int] = ..., weights_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ..., session_bytes: _Optional[int] = ..., reference_bytes: _Optional[int] = ..., drift: _Optional[float] = ..., motion: _Optional[float] = ...) -> None: ...

class SegmentLoss(_message.Message):
    __slots__ = ("prompt_tokens", "segment", "loss_nats", "top1_agreement", "answer_nats", "reconstruction_error")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    LOSS_NATS_FIELD_NUMBER: _ClassVar[int]
    TOP1_AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    ANSWER_NATS_FIELD_NUMBER: _ClassVar[int]
    RECONSTRUCTION_ERROR_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    segment: int
    loss_nats: float
    top1_agreement: float
    answer_nats: float
    reconstruction_error: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., segment: _Optional[int] = ..., loss_nats: _Optional[float] = ..., top1_agreement: _Optional[float] = ..., answer_nats: _Optional[float] = ..., reconstruction_error: _Optional[float] = ...) -> None: ...

class CoderMeasurement(_message.Message):
    __slots__ = ("code", "prompt_tokens", "segment", "raw_bytes", "wire_bytes", "encode_s", "decode_s")
    CODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ENCODE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    code: str
    prompt_tokens: int
    segment: int
    raw_bytes: int
    wire_bytes: int
    encode_s: float
    decode_s: float
    def __init__(self, code: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., segment: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., wire_bytes: _Optional[int] = ..., encode_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class EngineSetting(_message.Message):
    __slots__ = ("setting_id", "configuration_json", "reason")
    SETTING_ID_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_JSON_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    setting_id: str
    configuration_json: str
    reason: str
    def __init__(self, setting_id: _Optional[str] = ..., configuration_json: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class EngineFacts(_message.Message):
    __slots__ = ("engine", "transitions", "chunk_latents", "frames_per_chunk", "sessions", "backends", "left_out")
    class TransitionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class BackendsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LeftOutEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    TRANSITIONS_FIELD_NUMBER: _ClassVar[int]
    CHUNK_LATENTS_FIELD_NUMBER: _ClassVar[int]
    FRAMES_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    BACKENDS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    engine: str
    transitions: _containers.ScalarMap[str, str]
    chunk_latents: int
    frames_per_chunk: int
    sessions: int
    backends: _containers.ScalarMap[str, str]
    left_out: _containers.ScalarMap[str, str]
    def __init__(self, engine: _Optional[str] = ..., transitions: _Optional[_Mapping[str, str]] = ..., chunk_latents: _Optional[int] = ..., frames_per_chunk: _Optional[int] = ..., sessions: _Optional[int] = ..., backends: _Optional[_Mapping[str, str]] = ..., left_out: _Optional[_Mapping[str, str]] = ...) -> None: ...

class EngineState(_message.Message):
    __slots__ = ("setting_id", "setting_version", "chunk", "sessions", "memory_limit_bytes")
    class SessionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SETTING_ID_FIELD_NUMBER: _ClassVar[int]
    SETTING_VERSION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    setting_id: str
    setting_version: int
    chunk: int
    sessions: _containers.ScalarMap[str, int]
    memory_limit_bytes: int
    def __init__(self, setting_id: _Optional[str] = ..., setting_version: _Optional[int] = ..., chunk: _Optional[int] = ..., sessions: _Optional[_Mapping[str, int]] = ..., memory_limit_bytes: _Optional[int] = ...) -> None: ...

class SettingApplied(_message.Message):
    __slots__ = ("version", "setting_id", "chunk", "transition", "seconds", "keeps_kv", "refused")
    class RefusedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SETTING_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    TRANSITION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    KEEPS_KV_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    version: int
    setting_id: str
    chunk: int
    transition: str
    seconds: float
    keeps_kv: bool
    refused: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[int] = ..., setting_id: _Optional[str] = ..., chunk: _Optional[int] = ..., transition: _Optional[str] = ..., seconds: _Optional[float] = ..., keeps_kv: _Optional[bool] = ..., refused: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ChunkReports(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[ChunkReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[ChunkReport, _Mapping]]] = ...) -> None: ...

class ChunkReport(_message.Message):
    __slots__ = ("session_id", "service_class", "setting_id", "chunk", "session_chunk", "frames", "denoise_s", "recache_s", "vae_s", "vae_overlap", "total_s", "first_frame_s", "fps_denoise", "fps_end_to_end", "memory", "communication_bytes", "kv_signal_to_noise_db", "latent_sd", "drift", "flicker", "has_nan", "sessions")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SERVICE_CLASS_FIELD_NUMBER: _ClassVar[int]
    SETTING_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    SESSION_CHUNK_FIELD_NUMBER: _ClassVar[int]
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    DENOISE_S_FIELD_NUMBER: _ClassVar[int]
    RECACHE_S_FIELD_NUMBER: _ClassVar[int]
    VAE_S_FIELD_NUMBER: _ClassVar[int]
    VAE_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_S_FIELD_NUMBER: _ClassVar[int]
    FIRST_FRAME_S_FIELD_NUMBER: _ClassVar[int]
    FPS_DENOISE_FIELD_NUMBER: _ClassVar[int]
    FPS_END_TO_END_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_SIGNAL_TO_NOISE_DB_FIELD_NUMBER: _ClassVar[int]
    LATENT_SD_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    FLICKER_FIELD_NUMBER: _ClassVar[int]
    HAS_NAN_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    service_class: str
    setting_id: str
    chunk: int
    session_chunk: int
    frames: int
    denoise_s: _containers.RepeatedScalarFieldContainer[float]
    recache_s: float
    vae_s: float
    vae_overlap: float
    total_s: float
    first_frame_s: float
    fps_denoise: float
    fps_end_to_end: float
    memory: MemorySplit
    communication_bytes: int
    kv_signal_to_noise_db: float
    latent_sd: float
    drift: float
    flicker: float
    has_nan: bool
    sessions: int
    def __init__(self, session_id: _Optional[str] = ..., service_class: _Optional[str] = ..., setting_id: _Optional[str] = ..., chunk: _Optional[int] = ..., session_chunk: _Optional[int] = ..., frames: _Optional[int] = ..., denoise_s: _Optional[_Iterable[float]] = ..., recache_s: _Optional[float] = ..., vae_s: _Optional[float] = ..., vae_overlap: _Optional[float] = ..., total_s: _Optional[float] = ..., first_frame_s: _Optional[float] = ..., fps_denoise: _Optional[float] = ..., fps_end_to_end: _Optional[float] = ..., memory: _Optional[_Union[MemorySplit, _Mapping]] = ..., communication_bytes: _Optional[int] = ..., kv_signal_to_noise_db: _Optional[float] = ..., latent_sd: _Optional[float] = ..., drift: _Optional[float] = ..., flicker: _Optional[float] = ..., has_nan: _Optional[bool] = ..., sessions: _Optional[int] = ...) -> None: ...

class MemorySplit(_message.Message):
    __slots__ = ("weights_bytes", "kv_bytes", "activation_bytes", "peak_bytes", "reserved_bytes")
    WEIGHTS_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    weights_bytes: int
    kv_bytes: int
    activation_bytes: int
    peak_bytes: int
    reserved_bytes: int
    def __init__(self, weights_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ..., peak_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ...) -> None: ...
