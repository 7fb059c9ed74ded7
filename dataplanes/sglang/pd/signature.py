"""Whether the installed SGLang still has the private methods that this plane was written for.

The overridden methods are private and move between releases. A plane that no longer fits must not hook at all: SGLang
then serves raw, and the reason is told.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Final

WRITTEN_FOR: Final = "0.5.23"
REGISTRATION_FRAMES: Final = 20
"""Frames of `build_receiver_registration_message`; ours is appended after them."""

_MANAGER_METHODS: Final = {
    "__init__": "self, args, disaggregation_mode, server_args, is_mla_backend=",
    "init_engine": "self",
    "register_buffer_to_engine": "self",
    "deregister_buffer_to_engine": "self",
    "teardown": "self",
    "build_receiver_registration_message": "self",
    "send_kvcache": (
        "self, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, executor, dst_layer_ids=, "
        "dst_device_kv_indices=, dst_kv_item_len=, dst_attn_tp_size="
    ),
    "transfer_worker": "self, queue, executor, staging_buffer=, worker_index=",
    "add_transfer_request": (
        "self, bootstrap_room, kv_indices, index_slice, is_last_chunk, aux_index=, state_indices=, num_kv_tokens=, *, "
        "wait_event=, indices_event=, trace_ctx="
    ),
    "send_kvcache_slice": (
        "self, mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, dst_tp_rank, dst_attn_tp_size, "
        "dst_kv_item_len, executor, dst_layer_ids="
    ),
    "_make_worker_recv": "self, socket, timeout_ms=",
    "_transfer_data": "self, mooncake_session_id, transfer_blocks",
    "_send_multipart_locked": "self, endpoint, parts, is_ipv6=",
    "get_session_id": "self",
}
_PREFIXES: Final[dict[object, str]] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_CHUNK_FIELDS: Final = {"room", "prefill_kv_indices", "index_slice", "is_last_chunk", "num_kv_tokens"}
_CREATE_SENDER: Final = "self, req, num_kv_heads"
_TRANSFER_INFO_FIELDS: Final = {"room", "mooncake_session_id", "decode_prefix_len", "is_dummy"}


def describe(function: Any) -> str:
    """Names of the parameters in order, `=` after those with a default."""
    words: list[str] = []
    keyword_only = False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            words.append("*")
            keyword_only = True
        prefix = _PREFIXES.get(parameter.kind, "")
        default = "" if parameter.default is inspect.Parameter.empty else "="
        words.append(f"{prefix}{name}{default}")
    return ", ".join(words)


def manager_drift(manager: type) -> tuple[str, ...]:
    """What differs between `manager` and the one that this plane was written for; empty where it fits."""
    problems = []
    for name, expected in _MANAGER_METHODS.items():
        method = getattr(manager, name, None)
        found = "missing" if method is None else describe(method)
        if found != expected:
            problems.append(f"{manager.__name__}.{name}({found}), written for ({expected})")
    return tuple(problems)


def surroundings_drift(*, chunk: type, transfer_info: type, bootstrap_queue: type) -> tuple[str, ...]:
    """The same for what surrounds the manager: the queued chunk, the receiver's metadata and the bootstrap queue."""
    problems = []
    for holder, needed in ((chunk, _CHUNK_FIELDS), (transfer_info, _TRANSFER_INFO_FIELDS)):
        fields = {field.name for field in dataclasses.fields(holder)} if dataclasses.is_dataclass(holder) else set()
        if missing := sorted(needed - fields):
            problems.append(f"{holder.__name__} has no {', '.join(missing)}")
    # A hook of ours (or another plugin's) may already wrap it; the wrapper tells the original's signature.
    create_sender = getattr(bootstrap_queue, "create_sender", None)
    found = "missing" if create_sender is None else describe(create_sender)
    if found != _CREATE_SENDER:
        problems.append(f"{bootstrap_queue.__name__}.create_sender({found}), written for ({_CREATE_SENDER})")
    return tuple(problems)
