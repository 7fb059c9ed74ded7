"""Planes that ask the same get one answer; whoever asks anything else gets their own."""

from __future__ import annotations

from dataclasses import replace

from controld.controller.decide import decide
from controld.controller.plan import plan_equal
from controld.controller.posterior import StageCorrection
from controld.planning.plane import Place, table_requests
from controld.planning.shared_decisions import REMEMBERED, SharedDecisions
from tests.planning.test_planner import CODED, PLACE, policy_set, profile, service_class

POLICY = policy_set(service_class("chat", explore_share=0.0)).policies[0]


def asked(place: Place = PLACE) -> list:  # type: ignore[type-arg]
    return table_requests(POLICY, place, [profile()], {})


def test_equal_planes_share_their_tables_round_after_round() -> None:
    shared = SharedDecisions()
    first = shared.decide(asked(), policy_generation=1, now_unix_s=5.0)
    second = shared.decide(asked(), policy_generation=2, now_unix_s=6.0)
    assert second.tables[0] is first.tables[0]
    assert (second.policy_generation, second.decided_unix_s) == (2, 6.0)
    assert plan_equal(decide(asked()), first)
    later = [shared.decide(asked(), previous=before) for before in (first, second)]
    assert later[0].tables[0] is later[1].tables[0]
    assert shared.decided == 2


def test_another_question_or_another_past_is_decided_by_itself() -> None:
    shared = SharedDecisions()
    first = shared.decide(asked())
    elsewhere = shared.decide(asked(replace(PLACE, sender_hardware="gpu")))
    assert elsewhere.tables[0].classes[0].candidates[1].foreign
    (request,) = asked()
    slower = replace(request, corrections={CODED.config_id: (StageCorrection(2.0, 1e-4, 0.01, 30.0),) * 4})
    assert not plan_equal(first, shared.decide([slower]))
    other_past = decide(asked())
    assert shared.decide(asked(), previous=other_past).tables[0] is not shared.decide(asked(), previous=first).tables[0]
    assert shared.decided == 5


def test_only_the_last_few_decisions_are_kept() -> None:
    shared = SharedDecisions()
    for number in range(REMEMBERED + 1):
        shared.decide(asked(replace(PLACE, sender_hardware=f"h{number}")))
    assert shared.decide(asked(replace(PLACE, sender_hardware="h1"))).tables
    assert shared.decided == REMEMBERED + 1
    shared.decide(asked(replace(PLACE, sender_hardware="h0")))
    assert shared.decided == REMEMBERED + 2
