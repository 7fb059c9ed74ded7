"""What a snapshot carries: named resources, each of one kind. A decision table is the first kind."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from enum import StrEnum

from controld.contract.decision import ClassRule, DecisionTable
from controld.contract.errors import FieldError
from controld.contract.video import EngineSetting


class ResourceKind(StrEnum):
    """Kinds of resource, as an agent lists those that it understands."""

    DECISION_TABLE = "decision_table"
    CLASS_RULES = "class_rules"
    CALIBRATED_ARTEFACT = "calibrated_artefact"
    ENGINE_SETTING = "engine_setting"


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant's part of the links that it shares.

    Args:
        weight: only its ratio to the other tenants' matters.

    Raises:
        FieldError: the name is empty or the weight not a positive finite number.
    """

    name: str
    weight: float

    def __post_init__(self) -> None:
        if not self.name:
            raise FieldError("tenant_share.name", "is empty")
        if not math.isfinite(self.weight) or self.weight <= 0:
            raise FieldError(f"tenant_share.{self.name}.weight", f"{self.weight} is not a positive finite number")


@dataclass(frozen=True, slots=True)
class ClassRules:
    """How a request finds its service class; the first match wins, none is `default`.

    Args:
        tenants: who shares the links; none: first come, first served.

    Raises:
        FieldError: a tenant comes twice.
    """

    rules: tuple[ClassRule, ...] = ()
    tenants: tuple[TenantShare, ...] = ()

    def __post_init__(self) -> None:
        if len({tenant.name for tenant in self.tenants}) != len(self.tenants):
            raise FieldError("class_rules.tenants", "a tenant comes twice")


@dataclass(frozen=True, slots=True)
class CalibratedArtefact:
    """Bytes that a configuration names by hash: transform bases, step sizes, coder tables.

    Raises:
        FieldError: the content does not have the hash.
    """

    sha256: str
    model_fingerprint: str
    content: bytes

    def __post_init__(self) -> None:
        actual = hashlib.sha256(self.content).hexdigest()
        if actual != self.sha256:
            raise FieldError("calibrated_artefact.sha256", f"{self.sha256!r}, but the content has {actual}")


Payload = DecisionTable | ClassRules | CalibratedArtefact | EngineSetting


@dataclass(frozen=True, slots=True)
class Resource:
    """A payload under a name that is unique in its snapshot."""

    name: str
    payload: Payload

    def __post_init__(self) -> None:
        if not self.name:
            raise FieldError("resource.name", "is empty")

    @property
    def kind(self) -> ResourceKind:
        """The kind of the payload."""
        if isinstance(self.payload, DecisionTable):
            return ResourceKind.DECISION_TABLE
        if isinstance(self.payload, ClassRules):
            return ResourceKind.CLASS_RULES
        if isinstance(self.payload, EngineSetting):
            return ResourceKind.ENGINE_SETTING
        return ResourceKind.CALIBRATED_ARTEFACT
