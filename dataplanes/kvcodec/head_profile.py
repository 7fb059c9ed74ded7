"""How much each head's keys and values matter: a calibrated artefact that configurations name by its id."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dataplanes.kvcodec.errors import CodecError
from dataplanes.kvcodec.layout import KVLayout, PlaneRole

Table = NDArray[np.float64]

NO_ARTEFACTS: Final[Mapping[str, object]] = MappingProxyType({})


@dataclass(frozen=True, slots=True, eq=False)
class HeadProfile:
    """Importance of every head that a rank holds.

    Args:
        key: float `[layers, heads]`, positive and finite; latents count as keys. Any scale: only ratios matter.
        value: of the values, likewise; the same array for a method that does not tell them apart.

    Raises:
        CodecError: not such tables.
    """

    key: Table
    value: Table
    profile_id: str = field(init=False)
    """First 16 hexadecimal digits of the SHA-256 of both tables' shapes and values."""

    def __post_init__(self) -> None:
        digest = hashlib.sha256(b"controld head profile 1")
        for name in ("key", "value"):
            table = np.array(getattr(self, name), np.float64)
            if table.ndim != 2 or not table.size or not np.isfinite(table).all() or not (table > 0).all():
                raise CodecError(
                    f"importance of {name} heads is no table of positive numbers [layers, heads]",
                    code="codec.artefact",
                )
            table.setflags(write=False)
            object.__setattr__(self, name, table)
            digest.update(f" {table.shape} ".encode() + table.astype("<f8").tobytes())
        object.__setattr__(self, "profile_id", digest.hexdigest()[:16])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadProfile) and self.profile_id == other.profile_id

    def __hash__(self) -> int:
        return hash(self.profile_id)

    def table_of(self, role: PlaneRole) -> Table:
        """The table that a plane's role reads."""
        return self.value if role is PlaneRole.VALUE else self.key

    def check_layout(self, layout: KVLayout) -> None:
        """Every plane of the layout has a row of as many heads.

        Raises:
            CodecError: it describes another layout.
        """
        for role, planes in layout.planes_by_table().items():
            table = self.table_of(role)
            if len(planes) != table.shape[0] or any(layout.planes[p].heads != table.shape[1] for p in planes):
                raise CodecError(
                    f"head profile {self.profile_id} describes {table.shape[0]} layers of {table.shape[1]} heads",
                    code="codec.artefact",
                    hint="a profile belongs to one model, and to the heads of one rank",
                )


def find_head_profile(artefacts: Mapping[str, object], profile_id: str) -> HeadProfile:
    """The profile that a configuration names.

    Raises:
        CodecError: it is not there, or is something else.
    """
    profile = artefacts.get(profile_id)
    if not isinstance(profile, HeadProfile) or profile.profile_id != profile_id:
        raise CodecError(f"head profile {profile_id} is not here", code="codec.artefact_unknown")
    return profile
