"""Which knob decides in which tier, and knobs by the name under which plans keep them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controld.contract.decision import PREFIX_STORE
from controld.contract.errors import FieldError
from controld.controller.knobs.base import Knob
from controld.controller.knobs.kv_load import KvLoad
from controld.controller.knobs.kv_transfer import KvTransfer

_BY_NAME: Mapping[str, type[KvTransfer] | type[KvLoad]] = {"kv_transfer": KvTransfer, "kv_load": KvLoad}


def knob_for_tier(tier: str) -> Knob:
    """The knob of a tier, with its usual parameters."""
    return KvLoad() if tier == PREFIX_STORE else KvTransfer()


def knob_from_document(document: Mapping[str, Any]) -> Knob:
    """The knob that `{"name": knob.name, **knob.to_document()}` described.

    Raises:
        FieldError: a name that no knob has.
        TypeError: other parameters than the knob's.
    """
    parameters = dict(document)
    name = parameters.pop("name", None)
    if name not in _BY_NAME:
        raise FieldError("knob.name", f"{name!r} is no knob")
    return _BY_NAME[name](**parameters)
