"""The decision table: what the daemon pushes and the data plane draws from, in about a microsecond.

A cell is named by service class, transfer size, link bandwidth and load; it holds a mixture of arms. The arm of a
transfer is drawn by a hash of its id and the table's version: equal inputs give the equal arm on every machine.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError

RAW = "raw"
RECOMPUTE = "recompute"
DEFAULT_CLASS = "default"
PREFIX_STORE = "prefix_store"
"""The one tier in which what is loaded could be computed again."""

_WEIGHT_TOLERANCE = 1e-6


@dataclass(frozen=True, slots=True)
class Arm:
    """A choice: a configuration by its id, or `RAW`, or `RECOMPUTE` (both without a configuration)."""

    arm_id: str
    configuration: Configuration | None = None

    def __post_init__(self) -> None:
        if (self.arm_id in (RAW, RECOMPUTE)) != (self.configuration is None):
            raise FieldError(f"arm.{self.arm_id}", "raw and recompute have no configuration, every other arm has one")
        if self.configuration is not None and self.configuration.config_id != self.arm_id:
            raise FieldError(f"arm.{self.arm_id}", f"its configuration has the id {self.configuration.config_id}")


@dataclass(frozen=True, slots=True)
class Mixture:
    """Arms of one cell with their weights.

    Args:
        arms: indices into the table's arms, each once, heaviest first.
        weights: as many, positive, summing to one.
        raw_below_s, raw_below_s_per_byte: a transfer of V bytes goes raw all the same where raw's seconds on the wire,
            V / bandwidth, are fewer than `raw_below_s + raw_below_s_per_byte * V`: the arms pay in a part of the cell.
    """

    arms: tuple[int, ...]
    weights: tuple[float, ...]
    raw_below_s: float = 0.0
    raw_below_s_per_byte: float = 0.0
    cumulative: tuple[float, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.arms or len(self.arms) != len(self.weights) or len(set(self.arms)) != len(self.arms):
            raise FieldError("mixture.arms", "needs at least one arm, each once, with a weight for each")
        # A table has thousands of mixtures: their sum shows what is not finite in any of them.
        cumulative = tuple(accumulate(self.weights))
        if not math.isfinite(cumulative[-1]) or min(self.weights) <= 0:
            raise FieldError("mixture.weights", "must be positive and finite")
        if abs(cumulative[-1] - 1) > _WEIGHT_TOLERANCE:
            raise FieldError("mixture.weights", f"sum to {cumulative[-1]}, not 1")
        if not math.isfinite(self.raw_below_s + self.raw_below_s_per_byte):
            name = "raw_below_s_per_byte" if math.isfinite(self.raw_below_s) else "raw_below_s"
            raise FieldError(f"mixture.{name}", f"{getattr(self, name)} is not finite")
        object.__setattr__(self, "cumulative", cumulative)

    @property
    def is_split(self) -> bool:
        """Whether the arms pay in a part of the cell only."""
        return self.raw_below_s != 0 or self.raw_below_s_per_byte != 0

    def is_raw(self, size_bytes: float, bandwidth_bytes_per_s: float) -> bool:
        """Whether a transfer lies in the part of the cell in which no arm pays."""
        return size_bytes < bandwidth_bytes_per_s * (self.raw_below_s + self.raw_below_s_per_byte * size_bytes)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The outcome of a draw.

    Args:
        arm: what to do.
        explored: whether it was drawn to learn: neither the heaviest arm of its cell, nor raw where that does not pay.
        cell: index of the cell in the table, -1 where no table was consulted.
        table_version: version of the table, 0 where there was none.
    """

    arm: Arm
    explored: bool
    cell: int
    table_version: int


@dataclass(frozen=True, slots=True)
class DecisionTable:
    """Cells over [class][size][bandwidth][load], in that order.

    Args:
        tier: "pd", "prefix_store" or "video".
        link_group: which links it is for.
        version: of the snapshot that carries it; at least 1.
        classes: service classes; `default` is among them.
        size_edges_bytes, bandwidth_edges_bytes_per_s, load_edges: strictly rising inner edges; n edges make n + 1 bins;
            a value on an edge belongs to the bin above.
        arms: all arms; `RAW` is among them.
        mixtures: the distinct mixtures.
        cells: for each cell an index into `mixtures`.
        prior_bandwidth_bytes_per_s: what the operator says of the link, used until a transfer was seen; 0: unknown.
        guard_sample: of this share of the coded transfers the sender decodes one frame itself.

    Raises:
        FieldError: any of the above does not hold; the field is named.
    """

    tier: str
    link_group: str
    version: int
    classes: tuple[str, ...]
    size_edges_bytes: tuple[float, ...]
    bandwidth_edges_bytes_per_s: tuple[float, ...]
    load_edges: tuple[float, ...]
    arms: tuple[Arm, ...]
    mixtures: tuple[Mixture, ...]
    cells: tuple[int, ...]
    prior_bandwidth_bytes_per_s: float = 0.0
    guard_sample: float = 0.0
    _class_index: Mapping[str, int] = field(init=False, compare=False, repr=False)
    _raw: Arm = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.version < 1:
            raise FieldError("decision_table.version", f"{self.version} is below 1")
        if not math.isfinite(self.prior_bandwidth_bytes_per_s) or self.prior_bandwidth_bytes_per_s < 0:
            raise FieldError("decision_table.prior_bandwidth_bytes_per_s", "must be finite and not negative")
        if not 0 <= self.guard_sample <= 1:
            raise FieldError("decision_table.guard_sample", f"{self.guard_sample} is not in [0, 1]")
        if DEFAULT_CLASS not in self.classes or len(set(self.classes)) != len(self.classes):
            raise FieldError("decision_table.classes", "must hold each class once, and 'default'")
        for name in ("size_edges_bytes", "bandwidth_edges_bytes_per_s", "load_edges"):
            edges = getattr(self, name)
            if not all(math.isfinite(edge) for edge in edges) or any(low >= high for low, high in pairwise(edges)):
                raise FieldError(f"decision_table.{name}", "must be finite and strictly rising")
        raw = next((arm for arm in self.arms if arm.arm_id == RAW), None)
        if raw is None:
            raise FieldError("decision_table.arms", "raw is missing")
        object.__setattr__(self, "_raw", raw)
        for mixture in self.mixtures:
            if max(mixture.arms) >= len(self.arms) or min(mixture.arms) < 0:
                raise FieldError("decision_table.mixtures", "names an arm that is not in the table")
        expected = len(self.classes)
        for edges in (self.size_edges_bytes, self.bandwidth_edges_bytes_per_s, self.load_edges):
            expected *= len(edges) + 1
        if len(self.cells) != expected:
            raise FieldError("decision_table.cells", f"{len(self.cells)} cells, not {expected}")
        if any(not 0 <= cell < len(self.mixtures) for cell in self.cells):
            raise FieldError("decision_table.cells", "names a mixture that is not in the table")
        object.__setattr__(self, "_class_index", {name: index for index, name in enumerate(self.classes)})

    def cell_index(self, service_class: str, size_bytes: float, bandwidth_bytes_per_s: float, load: float) -> int:
        """Index of the cell; an unknown class is `default`."""
        index = self._class_index.get(service_class)
        if index is None:
            index = self._class_index[DEFAULT_CLASS]
        sizes, bandwidths, loads = self.size_edges_bytes, self.bandwidth_edges_bytes_per_s, self.load_edges
        index = index * (len(sizes) + 1) + bisect_right(sizes, size_bytes)
        index = index * (len(bandwidths) + 1) + bisect_right(bandwidths, bandwidth_bytes_per_s)
        return index * (len(loads) + 1) + bisect_right(loads, load)

    def cell_coordinates(self, cell: int) -> tuple[int, int, int, int]:
        """(class, size, bandwidth, load) indices of a cell."""
        rest, load = divmod(cell, len(self.load_edges) + 1)
        rest, bandwidth = divmod(rest, len(self.bandwidth_edges_bytes_per_s) + 1)
        service_class, size = divmod(rest, len(self.size_edges_bytes) + 1)
        return service_class, size, bandwidth, load

    def draw(
        self,
        transfer_id: str,
        service_class: str,
        size_bytes: float,
        bandwidth_bytes_per_s: float,
        load: float,
    ) -> Drawn:
        """The arm of a transfer: the same inputs give the same arm."""
        cell = self.cell_index(service_class, size_bytes, bandwidth_bytes_per_s, load)
        mixture = self.mixtures[self.cells[cell]]
        if mixture.is_raw(size_bytes, bandwidth_bytes_per_s):
            return Drawn(self._raw, False, cell, self.version)
        position = 0
        if len(mixture.arms) > 1:
            position = min(
                bisect_right(mixture.cumulative, unit_hash(transfer_id, self.version)), len(mixture.arms) - 1
            )
        return Drawn(self.arms[mixture.arms[position]], position != 0, cell, self.version)


def unit_hash(transfer_id: str, table_version: int) -> float:
    """A number in [0, 1) that depends on the transfer and the table's version only."""
    digest = hashlib.blake2b(f"{transfer_id}/{table_version}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


def is_sampled(transfer_id: str, share: float) -> bool:
    """Whether the sender checks itself on this transfer; independent of the arm that is drawn for it."""
    return share > 0 and _hash_fraction(transfer_id.encode(), b"guard") < share


def sampled_index(transfer_id: str, count: int) -> int:
    """Which of a transfer's `count` tokens lies in the frame that is checked: each is as likely as the others."""
    return int(_hash_fraction(transfer_id.encode(), b"piece") * count)


def _hash_fraction(content: bytes, purpose: bytes) -> float:
    digest = hashlib.blake2b(content, digest_size=8, person=purpose).digest()
    # Below 1 even where rounding to a float would make it 1.
    return (int.from_bytes(digest, "little") >> 11) / 2**53


@dataclass(frozen=True, slots=True)
class ClassRule:
    """When a request belongs to a service class; `None` matches anything. The first match wins.

    Args:
        learn: whether its transfers teach the estimators and the controller; false for an experiment's pinned arms.
        tenant: whose share of the link it uses; empty where nobody says.
    """

    service_class: str
    extra_key: str | None = None
    priority: int | None = None
    learn: bool = True
    tenant: str = ""


def match_class(rules: tuple[ClassRule, ...], *, extra_key: str | None, priority: int | None) -> str | None:
    """The first class whose rule matches, or None: the caller uses `default` and counts it."""
    for rule in rules:
        if rule.extra_key is None and rule.priority is None:
            continue
        if rule.extra_key is not None and rule.extra_key != extra_key:
            continue
        if rule.priority is not None and rule.priority != priority:
            continue
        return rule.service_class
    return None
