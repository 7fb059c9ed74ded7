"""What an edit would change, said before it is applied: nothing is kept of the asking, and it comes true."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path as FilePath

import numpy as np
import pytest

from controld.contract.clock import ManualClock
from controld.contract.decision import ClassRule
from controld.planning.policy_diff import Fate, PolicyChange, edited_set, policy_changes
from controld.planning.policy_diff_text import changes_text
from controld.policy.model import LinkPrior, Policy, PolicySet, Slo, Tier
from controld.store.sqlite import SqliteStore
from tests.planning.test_planner import CODED, SELECTOR, House, effect, policy_set, profile, service_class

CHAT = service_class("chat")


@pytest.fixture
async def house(tmp_path: FilePath) -> AsyncIterator[House]:
    store = await SqliteStore.open(tmp_path, clock=ManualClock())
    found = House(store, ManualClock(), policy_set(CHAT))
    await found.planner.learning.enroll(SELECTOR, "prefill-0")
    await found.keep(profile())
    await found.planner.plan_once()
    yield found
    await store.close()


def edited(house: House, *classes: object, **changes: object) -> tuple[Policy, ...]:
    [policy] = (policy_set(*classes) if classes else house.policies).policies  # type: ignore[arg-type]
    return (replace(policy, **changes),)  # type: ignore[arg-type]


async def changes_of(house: House, policies: tuple[Policy, ...]) -> tuple[PolicyChange, ...]:
    return await policy_changes(house.planner, house.store, house.policies, policies)


async def test_what_is_in_force_changes_nothing(house: House) -> None:
    [change] = await changes_of(house, edited(house))
    assert change.fate is Fate.SAME
    assert changes_text((change,), 1) == "nothing would change: this is what generation 1 says"


async def test_a_lower_limit_comes_true_as_it_was_said(house: House) -> None:
    await house.happen(*(effect(n) for n in range(7)))
    await house.planner.plan_once()
    policies = edited(house, replace(CHAT, max_quality_loss_nats=0.0))
    [change] = await changes_of(house, policies)
    assert [(s.path, s.before, s.after) for s in change.settings] == [
        ("classes.chat.max_quality_loss_nats", "0.02", "0")
    ]
    chat, default = change.decisions
    assert (chat.service_class, default.service_class, default.changed) == ("chat", "default", 0)
    assert {(a, b) for a, b, _ in chat.moves} == {(CODED.config_id, "raw")}
    assert (chat.transfers, chat.transfers_changed) == (7, 7)
    before = house.planner.plans[SELECTOR].tables[0]
    house.policies = PolicySet(2, "other", policies)
    assert await house.planner.plan_once() == 1
    after = house.planner.plans[SELECTOR].tables[0]
    ids = [np.array([arm.arm_id for arm in table.arms])[table.winners] for table in (before, after)]
    assert chat.changed == int((ids[0] != ids[1]).sum())


async def test_asking_leaves_no_trace(house: House) -> None:
    house.planner.alarms.clear()
    learned, plans = house.planner.learning.to_document(), dict(house.planner.plans)
    version, position = house.fleet.last_version, house.planner.learning.position
    other = replace(edited(house)[0], name="q", deployment="elsewhere")
    await changes_of(house, (*edited(house, replace(CHAT, workload="code", pin=CODED.config_id)), other))
    assert house.planner.learning.to_document() == learned
    assert house.planner.plans == plans
    assert (house.fleet.last_version, house.planner.learning.position) == (version, position)
    assert house.planner.alarms == {}
    assert list(house.planner.learning.lessons) == [SELECTOR]
    assert await house.planner.plan_once() == 0


async def test_what_was_learned_decides_on_both_sides(house: House) -> None:
    slow = [effect(n, encode_s=12.0, decode_s=12.0, wire_s=0.9) for n in range(12)]
    house.clock.advance(12)
    await house.happen(*slow)
    await house.planner.plan_once()
    [change] = await changes_of(house, edited(house, replace(CHAT, max_quality_loss_nats=0.0)))
    assert (change.decisions[0].transfers, change.decisions[0].transfers_changed) == (12, 0)


async def test_classes_come_and_go_with_their_requests(house: House) -> None:
    batch = service_class("batch")
    [change] = await changes_of(house, edited(house, batch))
    assert [(c.name, c.fate, c.requests) for c in change.classes] == [
        ("batch", Fate.ADDED, "default"),
        ("chat", Fate.REMOVED, "default"),
    ]
    assert change.settings == ()
    decision = change.decisions[0]
    assert (decision.service_class, decision.before_class) == ("batch", "default")
    assert {(a, b) for a, b, _ in decision.moves} == {("raw", CODED.config_id)}
    narrow = service_class("vip", rule=ClassRule("vip", extra_key="class=chat", priority=9))
    [split] = await changes_of(house, edited(house, narrow, CHAT))
    assert [(c.name, c.requests) for c in split.classes] == [("vip", "chat")]
    assert [d.changed for d in split.decisions] == [0, 0, 0]
    text = changes_text((change,), 1)
    assert "class batch added: its requests were those of default" in text
    assert "class batch (its requests were default's), tier pd" in text


async def test_settings_are_named_as_in_the_file(house: House) -> None:
    changed = replace(
        CHAT, explore_share=0.05, slo=Slo(ttft_s=0.3), rule=ClassRule("chat", priority=5), tiers=(Tier.PD,)
    )
    policies = edited(house, changed, links=(LinkPrior(name="default", rate_bytes_per_s=1.25e9),))
    [change] = await changes_of(house, policies)
    assert {(s.path, s.before, s.after) for s in change.settings} == {
        ("links.default.rate", None, "10 Gbit/s"),
        ("classes.chat.match.extra_key", "class=chat", None),
        ("classes.chat.match.priority", None, "5"),
        ("classes.chat.explore", "2%", "5%"),
        ("classes.chat.slo.ttft", None, "0.3 s"),
        ("classes.chat.slo.percentile", None, "90"),
    }
    two = [service_class("a"), service_class("b")]
    house.policies = policy_set(*two)
    [order] = await changes_of(house, edited(house, *reversed(two)))
    assert [(s.path, s.after) for s in order.settings] == [("classes (order)", "b, a, default")]


async def test_policies_come_and_go(house: House) -> None:
    other = replace(edited(house)[0], name="q", deployment="elsewhere")
    changes = await changes_of(house, (other,))
    assert [(c.name, c.fate) for c in changes] == [("p", Fate.REMOVED), ("q", Fate.ADDED)]
    assert "everything goes raw" in changes[0].notes[0]
    json.dumps([change.to_document() for change in changes], allow_nan=False)


async def test_what_cannot_be_used_is_said(house: House) -> None:
    [pinned] = await changes_of(house, edited(house, replace(CHAT, pin="0123456789abcdef")))
    assert any("chat" in note and "pinned" in note for note in pinned.notes)
    moved = tuple(replace(c, tiers=(Tier.PREFIX_STORE,)) for c in house.policies.policies[0].classes)
    [tier] = await changes_of(house, edited(house, classes=moved))
    assert "tier pd is named no more: everything goes raw there" in tier.notes
    assert tier.decisions == ()


def test_a_single_file_replaces_the_policy_of_its_name_or_planes() -> None:
    [policy] = policy_set(CHAT).policies
    other = replace(policy, name="q", deployment="elsewhere")
    in_force = PolicySet(1, "h", (policy, other))
    renamed = replace(policy, name="z")
    assert edited_set(in_force, [renamed], whole=False) == (other, renamed)
    assert edited_set(in_force, [renamed], whole=True) == (renamed,)
    moved = replace(policy, deployment="elsewhere")
    assert edited_set(in_force, [moved], whole=False) == (moved,)
