"""The SGLang plugin: found by the entry point group `sglang.srt.plugins`, inert unless `CONTROLD_ADDRESS` is set.

`register` runs in several processes, so it starts nothing; the plane and its agent start in the KV manager, which only
scheduler processes have. SGLang logs a plugin that fails and then serves raw, so whether this one is attached is told
to controld from inside the hooked class.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, Final

_log = logging.getLogger(__name__)

# Spelt here so that a server that nobody steers imports nothing of ours.
_ADDRESS_VARIABLE: Final = "CONTROLD_ADDRESS"
_KV_CLASS: Final = "sglang.srt.disaggregation.utils.get_kv_class"
_CREATE_SENDER: Final = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.create_sender"


def register() -> None:
    """Register the hooks; called by SGLang."""
    if not os.environ.get(_ADDRESS_VARIABLE):
        return
    from dataplanes.agent import address_from_environment

    address = address_from_environment(os.environ)
    if address is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_KV_CLASS, _ManagerHook(address), HookType.AROUND)
    HookRegistry.register(_CREATE_SENDER, note_request, HookType.BEFORE)


class _ManagerHook:
    """Hands out our manager class in place of Mooncake's, made once for each class."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._classes: dict[type[Any], type[Any]] = {}
        # SGLang names hooks in its log lines.
        self.__name__ = "controld_kv_manager"

    def __call__(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        wanted = [str(getattr(value, "value", value)) for value in (*args, *kwargs.values())]
        if wanted != ["mooncake", "manager"]:
            return found
        if found not in self._classes:
            self._classes[found] = manager_class_for(found, self._address)
        return self._classes[found]


def manager_class_for(base: type[Any], address: str) -> type[Any]:
    """Our subclass of `base`, or, where SGLang has moved on, one that only tells controld so."""
    from sglang.srt.disaggregation.common.utils import TransferKVChunk
    from sglang.srt.disaggregation.mooncake.conn import TransferInfo
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    from dataplanes.sglang.pd.manager import build_manager_class, build_unhooked_class
    from dataplanes.sglang.pd.plane import PdPlane
    from dataplanes.sglang.pd.signature import WRITTEN_FOR, manager_drift, surroundings_drift

    def make_plane(args: Any, mode: Any, server_args: Any, is_mla: bool) -> PdPlane:
        return PdPlane(args, role=str(mode.value), server_args=server_args, is_mla=is_mla, address=address)

    problems = manager_drift(base) + surroundings_drift(
        chunk=TransferKVChunk, transfer_info=TransferInfo, bootstrap_queue=PrefillBootstrapQueue
    )
    if problems:
        reason = f"this SGLang is not {WRITTEN_FOR}: {'; '.join(problems)}"
        _log.error("controld's PD plane does not attach, KV goes raw: %s", reason)
        return build_unhooked_class(base, make_plane, reason)
    return build_manager_class(base, make_plane)


def note_request(queue: Any, request: Any, *_: Any, **__: Any) -> None:
    """Remember what the scheduler knows of a request, by its room; runs before `create_sender`."""
    plane = getattr(queue.kv_manager, "controld_plane", None)
    if plane is None:
        return
    from dataplanes.sglang.pd.edge import Guarded
    from dataplanes.sglang.pd.requests import RequestFacts

    with Guarded(plane.agent, "could not note a request, which counts as class default"):
        plane.requests.note(
            int(request.bootstrap_room),
            RequestFacts(
                request_id=str(request.rid),
                extra_key=request.extra_key,
                priority=request.priority,
                prompt_tokens=len(request.origin_input_ids),
            ),
        )
