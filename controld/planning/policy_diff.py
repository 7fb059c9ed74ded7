"""What a policy edit would change, before it is applied: in settings, and in the decisions made from them.

Both sides are decided at the same moment, from the same profiles and learned corrections and with the plan in force as
what is in use. So every difference is the edit's, and an edit that changes nothing shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from controld.contract.decision import DEFAULT_CLASS, ClassRule, match_class
from controld.contract.effect import Half
from controld.contract.errors import ControldError
from controld.contract.quantity import format_duration, format_rate
from controld.controller.compare import ClassChange, compare_class
from controld.controller.plan import Plan
from controld.fleet.published import Selector
from controld.planning.plane import selector_of
from controld.planning.planner import Planner
from controld.policy.model import Policy, PolicySet
from controld.store.interface import Store
from controld.store.records import EffectFilter, EffectRecord

RECENT_TRANSFERS = 1000
"""So many of the newest transfers are looked up in the changed cells."""


class Fate(StrEnum):
    """What the edit does to a policy or a class."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """One setting; None where it is not there."""

    path: str
    before: str | None
    after: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFate:
    """One class.

    Args:
        requests: for a new class, whose its requests were; for a removed one, whose they will be.
    """

    name: str
    fate: Fate
    requests: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """One policy.

    Args:
        notes: what else the operator should know: why it cannot be planned, what is missing.
        settings: that differ in classes and elsewhere; those of added and removed classes are left out.
        classes: added and removed ones.
        decisions: of every class in every tier that both sides have.
    """

    name: str
    selector: Selector
    fate: Fate
    notes: tuple[str, ...] = ()
    settings: tuple[SettingChange, ...] = ()
    classes: tuple[ClassFate, ...] = ()
    decisions: tuple[ClassChange, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "name": self.name,
            "kind": self.selector.kind,
            "deployment": self.selector.deployment,
            "fate": self.fate.value,
            "notes": list(self.notes),
            "settings": [asdict(setting) for setting in self.settings],
            "classes": [{**asdict(item), "fate": item.fate.value} for item in self.classes],
            "decisions": [decision.to_document() for decision in self.decisions],
        }


def edited_set(in_force: PolicySet, given: Sequence[Policy], *, whole: bool) -> tuple[Policy, ...]:
    """The policies that would be in force.

    Args:
        given: the edited policies.
        whole: whether they are all there would be; else each replaces the one of its name or of its planes.
    """
    if whole:
        return tuple(given)
    names, selectors = {policy.name for policy in given}, {selector_of(policy) for policy in given}
    kept = (p for p in in_force.policies if p.name not in names and selector_of(p) not in selectors)
    return tuple(sorted([*kept, *given], key=lambda policy: policy.name))


async def policy_changes(
    planner: Planner, store: Store, in_force: PolicySet, edited: Sequence[Policy]
) -> tuple[PolicyChange, ...]:
    """What putting `edited` in the place of `in_force` would change, policy by policy; nothing is kept of it."""
    old = {selector_of(policy): policy for policy in in_force.policies}
    new = {selector_of(policy): policy for policy in edited}
    recent = await store.effects.recent(RECENT_TRANSFERS, EffectFilter(half=Half.SENDER))
    changes = []
    for selector in sorted(old.keys() | new.keys(), key=lambda s: (s.kind, s.deployment)):
        before, after = old.get(selector), new.get(selector)
        if before is not None and after is not None:
            changes.append(await _changed(planner, selector, before, after, recent))
        elif after is not None:
            changes.append(await _added(planner, selector, after))
        elif before is not None:
            note = "its planes get nothing any more: everything goes raw"
            changes.append(PolicyChange(name=before.name, selector=selector, fate=Fate.REMOVED, notes=(note,)))
    return tuple(changes)


async def _added(planner: Planner, selector: Selector, policy: Policy) -> PolicyChange:
    _, notes = await _try_plan(planner, policy)
    notes = ("its planes had no policy: everything was raw", *notes)
    return PolicyChange(name=policy.name, selector=selector, fate=Fate.ADDED, notes=notes)


async def _changed(
    planner: Planner, selector: Selector, before: Policy, after: Policy, recent: Sequence[EffectRecord]
) -> PolicyChange:
    settings = tuple(_setting_changes(before, after))
    classes = tuple(_class_fates(before, after))
    if not settings and not classes:
        return PolicyChange(name=after.name, selector=selector, fate=Fate.SAME)
    (old, _), (new, notes) = await _try_plan(planner, before), await _try_plan(planner, after)
    decisions: tuple[ClassChange, ...] = ()
    if old is not None and new is not None:
        lessons = planner.learning.lessons.get(selector)
        agents = lessons.agents if lessons is not None else set()
        effects = [record.effect for record in recent if record.agent_id in agents]
        notes = (*notes, *_table_notes(old, new))
        decisions = tuple(
            compare_class(table, _class_before(before, service_class.rule), other, service_class.name, recent=effects)
            for other in new.tables
            if (table := old.table(*other.key)) is not None
            for service_class in after.classes
        )
    return PolicyChange(
        name=after.name,
        selector=selector,
        fate=Fate.CHANGED,
        notes=notes,
        settings=settings,
        classes=classes,
        decisions=decisions,
    )


async def _try_plan(planner: Planner, policy: Policy) -> tuple[Plan | None, tuple[str, ...]]:
    try:
        plan, notes = await planner.dry_plan(policy)
    except ControldError as error:
        return None, (f"cannot be planned: {error}",)
    return plan, notes


def _table_notes(old: Plan, new: Plan) -> Iterator[str]:
    before, after = {table.key for table in old.tables}, {table.key for table in new.tables}
    for tier, _ in sorted(after - before):
        yield f"tier {tier} is new: everything was raw there"
    for tier, _ in sorted(before - after):
        yield f"tier {tier} is named no more: everything goes raw there"


def _class_before(before: Policy, rule: ClassRule) -> str:
    """Whose decisions the requests of a class followed: its own, or those of the class that took them."""
    name = rule.service_class
    return name if before.service_class(name) is not None else _taker(before, rule)


def _taker(policy: Policy, rule: ClassRule) -> str:
    """The class in which requests that match a rule end up."""
    return match_class(policy.rules, extra_key=rule.extra_key, priority=rule.priority) or DEFAULT_CLASS


def _class_fates(before: Policy, after: Policy) -> Iterator[ClassFate]:
    for c in after.classes:
        if before.service_class(c.name) is None:
            yield ClassFate(name=c.name, fate=Fate.ADDED, requests=_taker(before, c.rule))
    for c in before.classes:
        if after.service_class(c.name) is None:
            yield ClassFate(name=c.name, fate=Fate.REMOVED, requests=_taker(after, c.rule))


def _setting_changes(before: Policy, after: Policy) -> Iterator[SettingChange]:
    old, new = dict(_flat(asdict(before))), dict(_flat(asdict(after)))
    one_side = {
        f"classes.{c.name}."
        for policy, other in ((before, after), (after, before))
        for c in policy.classes
        if other.service_class(c.name) is None
    }
    for path in [*new, *(path for path in old if path not in new)]:
        if old.get(path) != new.get(path) and not path.startswith(tuple(one_side)):
            yield SettingChange(path=path, before=old.get(path), after=new.get(path))
    kept = [[c.name for c in p.classes if q.service_class(c.name)] for p, q in ((before, after), (after, before))]
    if kept[0] != kept[1]:
        yield SettingChange(path="classes (order)", before=", ".join(kept[0]), after=", ".join(kept[1]))


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings by the path that a policy file has for them; what has a name stands under it, whatever its place."""
    for key, value in values.items():
        if value is None or value == () or key in _NOT_SETTINGS or (prefix and key == "name"):
            continue
        name, show = _WORDS.get(key, (key, _shown))
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            for item in value:
                yield from _flat(item, f"{path}.{item['name']}.")
        elif isinstance(value, list | tuple):
            yield path, ", ".join(_shown(item) for item in value)
        else:
            yield path, show(value)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _share(value: float) -> str:
    return f"{value * 100:.6g}%"


_NOT_SETTINGS = ("source_file", "service_class")
_WORDS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "rule": ("match", _shown),
    "explore_share": ("explore", _share),
    "sample_share": ("sample", _share),
    "rate_bytes_per_s": ("rate", format_rate),
    "ttft_s": ("ttft", format_duration),
    "jct_s": ("jct", format_duration),
}
"""What policy files call what the model calls otherwise, and how it is shown."""
