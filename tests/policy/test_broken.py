"""Ten broken policies, and the line that each is worth to the reader."""

from __future__ import annotations

from pathlib import Path

import pytest

from controld.policy.loader import load_policies
from controld.policy.problem import PolicyErrors

BROKEN = Path(__file__).parent / "broken"

EXPECTED = {
    "class_twice": '16:11: classes[1].name: "chat" is used twice (first at line 9, column 11)',
    "duplicate_key": "13:5: classes[0].tenant: duplicate key (first at line 10, column 5)",
    "merge_overrides": (
        '21:7: classes[1].slo.ttft: duplicate key (first at line 20, column 12, merged by "<<" at line 20, column 7) '
        "(a merge adds keys and never overrides: write the key in one place)"
    ),
    "no_default_class": "9:3: classes: has no class default (it takes every request that no other class matches)",
    "not_yaml": (
        "12:5: not YAML: did not find expected ',' or '}' "
        "(while parsing a flow mapping that begins at line 11, column 12)"
    ),
    "unit_missing": '15:13: classes[0].slo.ttft: "300" has no unit (write 300ms or 0.3s)',
    "unknown_key": "15:5: classes[0].max_quality_los_nats: unknown key (did you mean max_quality_loss_nats?)",
    "unknown_tenant": '10:13: classes[0].tenant: there is no tenant "acmee" (did you mean acme?)',
    "weight_zero": "6:26: tenants[0].weight: 0 is below 1e-06",
    "wrong_tier": '13:17: classes[0].tiers[1]: planes of kind sglang have no tier "video" (tiers: pd, prefix_store)',
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_broken_policy_gets_one_precise_line(name: str) -> None:
    file = BROKEN / f"{name}.yaml"
    with pytest.raises(PolicyErrors) as caught:
        load_policies(file)
    assert [str(problem) for problem in caught.value.problems] == [f"{file}:{EXPECTED[name]}"]


def test_a_directory_of_them_gets_all_lines_at_once() -> None:
    with pytest.raises(PolicyErrors) as caught:
        load_policies(BROKEN)
    assert [str(problem) for problem in caught.value.problems] == [
        f"{BROKEN}/{name}.yaml:{line}" for name, line in sorted(EXPECTED.items())
    ]
