"""What must hold between the keys of a policy and between policies.

The checks read the YAML tree, not the validated model, so that one wrong unit does not hide a missing class: everything
is reported at once. A value of the wrong type is left to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from controld.contract.decision import DEFAULT_CLASS
from controld.contract.errors import FieldError
from controld.contract.quantity import format_rate, parse_rate_bytes_per_s, parse_share
from controld.policy.checks_video import check_kind
from controld.policy.model import TIERS_BY_KIND, PlaneKind, Tier
from controld.policy.problem import Problem
from controld.policy.settings import Path, Reading, suggest
from controld.policy.strict_yaml import Node, Scalar, Table, path_text
from controld.policy.strict_yaml import Sequence as YamlSequence

_DEFAULT_TENANT = "default"
_SUM_TOLERANCE = 1e-9


def check_policy(reading: Reading) -> None:
    """Note the problems of one file."""
    root = reading.root
    if root is None:
        return
    tenants = _names_once(reading, "tenants")
    classes = _names_once(reading, "classes")
    if isinstance(root.get("classes"), YamlSequence) and DEFAULT_CLASS not in classes:
        reading.add(("classes",), "has no class default", "it takes every request that no other class matches")
    _check_tenants(reading, tenants if root.get("tenants") is not None else {_DEFAULT_TENANT: ()})
    _check_guarantees(reading)
    _check_tiers(reading)
    _check_matches(reading)
    check_kind(reading)


def check_together(readings: Sequence[Reading]) -> None:
    """Note what no file shows alone: a name or a selection used twice."""
    names: dict[str, Reading] = {}
    selections: dict[tuple[str, str], Reading] = {}
    for reading in readings:
        name = _text(reading.root, "metadata", "name")
        if name is not None:
            first = names.setdefault(name, reading)
            if first is not reading:
                reading.add(
                    ("metadata", "name"), f'"{name}" is used twice (first at {_place(first, "metadata", "name")})'
                )
        kind, deployment = _text(reading.root, "select", "kind"), _text(reading.root, "select", "deployment")
        if kind is not None and deployment is not None:
            first = selections.setdefault((kind, deployment), reading)
            if first is not reading:
                place = _place(first, "select")
                reading.add(
                    ("select",), f"selects the same planes as another policy (first at {place})", "merge the two"
                )


def _place(reading: Reading, *path: str) -> str:
    position = reading.position(path)
    return f"{reading.file}:{position.line}:{position.column}"


def _node(node: Node | None, *path: str) -> Node | None:
    for part in path:
        node = node.get(part) if isinstance(node, Table) else None
    return node


def _text(root: Node | None, *path: str) -> str | None:
    node = _node(root, *path)
    return node.value if isinstance(node, Scalar) and isinstance(node.value, str) else None


def _rows(reading: Reading, key: str) -> Iterator[tuple[Path, Table]]:
    listed = reading.root.get(key) if reading.root else None
    for index, item in enumerate(listed.items if isinstance(listed, YamlSequence) else ()):
        if isinstance(item, Table):
            yield (key, index), item


def _names_once(reading: Reading, key: str) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path, row in _rows(reading, key):
        name = _text(row, "name")
        if name is None:
            continue
        if name in found:
            first = reading.position((*found[name], "name"))
            reading.add((*path, "name"), f'"{name}" is used twice (first at {first})')
        else:
            found[name] = path
    return found


def _check_tenants(reading: Reading, tenants: dict[str, Path]) -> None:
    known = ", ".join(tenants) or "none"
    for path, row in _rows(reading, "classes"):
        tenant = _text(row, "tenant")
        if tenant is None and row.get("tenant") is None and _DEFAULT_TENANT not in tenants:
            reading.add(path, "has no tenant, and there is no tenant default", f"tenants: {known}")
        elif tenant is not None and tenant not in tenants:
            reading.add((*path, "tenant"), f'there is no tenant "{tenant}"', suggest(tenant, tenants, "tenants"))


def _check_guarantees(reading: Reading) -> None:
    """What tenants are guaranteed together is no more than the link."""
    rate = _quantity(_text(reading.root, "links", "default", "rate"), parse_rate_bytes_per_s)
    shares: dict[str, float] = {}
    place: Path = ()
    for path, row in _rows(reading, "tenants"):
        name, quota = _text(row, "name") or "", _quantity(_text(row, "quota"), parse_rate_bytes_per_s)
        if row.get("quota") is not None and _node(reading.root, "links", "default", "rate") is None:
            hint = "give links: {default: {rate: 10Gbit}}, or a share of the link"
            reading.add((*path, "quota"), "is a rate, and the link's rate is not given", hint)
        share = _quantity(_text(row, "share"), parse_share) or (quota / rate if quota and rate else 0.0)
        if share:
            shares[name] = shares.get(name, 0.0) + share
            place = (*path, "quota" if quota else "share")
    total = sum(shares.values())
    if total > 1 + _SUM_TOLERANCE:
        parts = " + ".join(f"{name} {_guarantee(share, rate)}" for name, share in shares.items())
        link = f"the link's {format_rate(rate)}" if rate else "the link"
        reading.add(place, f"the tenants are guaranteed {_guarantee(total, rate)} of {link}: {parts}")


def _guarantee(share: float, rate: float | None) -> str:
    return f"{share * 100:.4g}%" + (f" ({format_rate(share * rate)})" if rate else "")


def _quantity(text: str | None, parse: Callable[..., float]) -> float | None:
    try:
        return None if text is None else parse(text, field="value")
    except FieldError:
        return None


def warnings_of(reading: Reading) -> list[Problem]:
    """What is allowed but hardly meant: a tenant that no class uses."""
    used = {_text(row, "tenant") or _DEFAULT_TENANT for _, row in _rows(reading, "classes")}
    return [
        Problem(
            reading.file,
            *reading.position((*path, "name")),
            path_text((*path, "name")),
            f'no class uses the tenant "{name}"',
            "name it in a class, or remove it",
        )
        for path, row in _rows(reading, "tenants")
        if (name := _text(row, "name")) is not None and name not in used
    ]


def _check_tiers(reading: Reading) -> None:
    kind = _text(reading.root, "select", "kind")
    for path, row in _rows(reading, "classes"):
        tiers = row.get("tiers")
        seen: set[str] = set()
        for index, item in enumerate(tiers.items if isinstance(tiers, YamlSequence) else ()):
            tier = _text(item)
            if tier is None or tier not in list(Tier):
                continue
            if tier in seen:
                reading.add((*path, "tiers", index), f'"{tier}" is listed twice')
            seen.add(tier)
            if kind in list(PlaneKind) and tier not in TIERS_BY_KIND[PlaneKind(kind)]:
                allowed = ", ".join(TIERS_BY_KIND[PlaneKind(kind)])
                reading.add(
                    (*path, "tiers", index), f'planes of kind {kind} have no tier "{tier}"', f"tiers: {allowed}"
                )


def _check_matches(reading: Reading) -> None:
    above: list[tuple[str, str | None, int | None]] = []
    for path, row in _rows(reading, "classes"):
        name, match = _text(row, "name"), row.get("match")
        if name == DEFAULT_CLASS:
            if match is not None:
                reading.add((*path, "match"), "default takes what no other class matches", "remove match")
            continue
        if match is None:
            reading.add(path, "has no match, so no request would ever belong to it", "give match: {extra_key: ...}")
            continue
        if not isinstance(match, Table):
            continue
        extra_key, priority_node = _text(match, "extra_key"), match.get("priority")
        priority = (
            priority_node.value if isinstance(priority_node, Scalar) and type(priority_node.value) is int else None
        )
        if extra_key is None and priority is None:
            continue
        for other_path, other_extra_key, other_priority in above:
            if other_extra_key in (None, extra_key) and other_priority in (None, priority):
                reading.add((*path, "match"), f"is never reached: {other_path} above it matches all of it")
                break
        above.append((f"classes[{path[1]}]", extra_key, priority))
