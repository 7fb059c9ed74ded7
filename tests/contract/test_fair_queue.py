"""Who is served when: shares by weight, order inside a transfer, no starvation, no waiting without need."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.contract.errors import FieldError
from controld.contract.fair_queue import LEAST_SHARE, FairQueue, guaranteed_shares

TENANTS = ("acme", "bell", "cern")
weights = st.floats(0.1, 20.0)
costs = st.one_of(st.integers(0, 1000).map(float), st.floats(0.0, 1e9))

Item = tuple[str, int]


def filled(weight_of: dict[str, float], cost_of: dict[str, list[float]]) -> FairQueue[tuple[str, float]]:
    queue: FairQueue[tuple[str, float]] = FairQueue(weight_of)
    for tenant, of_tenant in cost_of.items():
        for number, cost in enumerate(of_tenant):
            queue.push((tenant, cost), tenant=tenant, transfer=(tenant, number), cost_bytes=cost)
    return queue


def test_equal_items_follow_the_weights() -> None:
    queue = filled({"acme": 3.0, "bell": 1.0}, {"acme": [10.0] * 40, "bell": [10.0] * 40})
    first = Counter(queue.pop()[0] for _ in range(40))
    assert first == {"acme": 30, "bell": 10}


def test_one_tenant_is_first_in_first_out() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(20):
        queue.push(number, tenant="", transfer=number, cost_bytes=float(20 - number))
    assert [queue.pop() for _ in range(20)] == list(range(20))


def test_a_flood_of_small_items_cannot_keep_a_large_one_waiting() -> None:
    queue = filled({}, {"bell": [1.0] * 500, "acme": [100.0]})
    served = [queue.pop() for _ in range(202)]
    assert served.index(("acme", 100.0)) <= 101


def test_a_large_item_waits_until_its_share_covers_it() -> None:
    # Served first and without a debt afterwards, a closed loop of large items would take the link from the small ones.
    queue: FairQueue[str] = FairQueue({"large": 1.0, "small": 1.0})
    for number in range(1000):
        queue.push("small", tenant="small", transfer=number, cost_bytes=1.0)
    bytes_served = Counter[str]()
    for number in range(5):
        queue.push("large", tenant="large", transfer=f"large {number}", cost_bytes=100.0)
        while (item := queue.pop()) != "large":
            bytes_served[item] += 1
        bytes_served["large"] += 100
    assert 0.8 <= bytes_served["small"] / bytes_served["large"] <= 1.2


def test_who_was_away_has_no_credit_from_that_time() -> None:
    queue: FairQueue[str] = FairQueue({"acme": 1.0, "bell": 1.0})
    for number in range(200):
        queue.push("bell", tenant="bell", transfer=number, cost_bytes=10.0)
    for _ in range(100):
        assert queue.pop() == "bell"
    for number in range(100):
        queue.push("acme", tenant="acme", transfer=f"a{number}", cost_bytes=10.0)
    served = Counter(queue.pop() for _ in range(20))
    assert abs(served["acme"] - served["bell"]) <= 1


def test_new_weights_hold_for_what_waits_already() -> None:
    queue = filled({"acme": 1.0, "bell": 1.0}, {"acme": [10.0] * 50, "bell": [10.0] * 50})
    assert queue.pop()[1] == 10.0
    queue.set_weights({"acme": 4.0, "bell": 1.0})
    served = Counter(queue.pop()[0] for _ in range(50))
    assert 39 <= served["acme"] <= 41


def test_what_cost_more_than_expected_is_paid_for() -> None:
    queue = filled({}, {"acme": [10.0] * 100, "bell": [10.0] * 100})
    wire = Counter[str]()
    for _ in range(80):
        tenant, cost = queue.pop()
        actual = cost * (3.0 if tenant == "acme" else 1.0)
        queue.charge(tenant, actual - cost)
        wire[tenant] += int(actual)
    assert abs(wire["acme"] - wire["bell"]) <= 60


def test_a_transfer_that_changes_its_tenant_keeps_its_order() -> None:
    queue: FairQueue[int] = FairQueue({"acme": 1.0, "bell": 100.0})
    assert queue.push(1, tenant="acme", transfer="t", cost_bytes=1000.0) == "acme"
    assert queue.push(2, tenant="bell", transfer="t", cost_bytes=1.0) == "acme"
    assert [queue.pop(), queue.pop()] == [1, 2]
    assert queue.push(3, tenant="bell", transfer="t", cost_bytes=1.0) == "bell"


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_none_is_refused_and_changes_nothing(weight: float) -> None:
    queue = filled({"acme": 3.0, "bell": 1.0}, {"acme": [10.0] * 40, "bell": [10.0] * 40})
    with pytest.raises(FieldError, match=r"weights\.bell"):
        queue.set_weights({"acme": 1.0, "bell": weight})
    assert Counter(queue.pop()[0] for _ in range(40)) == {"acme": 30, "bell": 10}


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_a_cost_that_is_none_is_refused_and_queues_nothing(cost: float) -> None:
    queue: FairQueue[int] = FairQueue()
    with pytest.raises(FieldError, match="cost_bytes"):
        queue.push(1, tenant="acme", transfer="t", cost_bytes=cost)
    with pytest.raises(FieldError, match="extra_bytes"):
        queue.charge("acme", math.nan)
    assert len(queue) == 0
    with pytest.raises(IndexError):
        queue.pop()


@given(
    st.dictionaries(st.sampled_from(TENANTS), weights, min_size=2, max_size=3),
    st.dictionaries(st.sampled_from(TENANTS), st.lists(costs, min_size=1, max_size=30), min_size=2, max_size=3),
)
def test_shares_follow_the_weights_within_one_largest_item(
    weight_of: dict[str, float], cost_of: dict[str, list[float]]
) -> None:
    queue = filled(weight_of, cost_of)
    served = dict.fromkeys(cost_of, 0.0)
    left = {tenant: len(of_tenant) for tenant, of_tenant in cost_of.items()}

    def weighted(tenant: str, size_bytes: float) -> float:
        return size_bytes / weight_of.get(tenant, 1.0)

    while all(left.values()):
        tenant, cost = queue.pop()
        served[tenant] += cost
        left[tenant] -= 1
        if not left[tenant]:
            break
        for one, other in itertools.combinations(cost_of, 2):
            bound = max(weighted(t, max(cost_of[t])) for t in (one, other))
            gap = abs(weighted(one, served[one]) - weighted(other, served[other]))
            assert gap <= bound * (1 + 1e-9) + 1e-6


@given(st.dictionaries(st.sampled_from("abcde"), st.tuples(weights, st.floats(0.0, 1.0)), min_size=1))
def test_guarantees_hold_and_the_rest_is_shared_by_weight(asked: dict[str, tuple[float, float]]) -> None:
    weight = {tenant: each[0] for tenant, each in asked.items()}
    total = max(1.0, sum(each[1] for each in asked.values()))
    guaranteed = {tenant: each[1] / total for tenant, each in asked.items()}
    shares = guaranteed_shares(weight, guaranteed)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert all(share > 0 for share in shares.values())
    per_weight = max(shares[tenant] / weight[tenant] for tenant in asked)
    for tenant, share in shares.items():
        assert share >= guaranteed[tenant] * (1 - len(asked) * LEAST_SHARE) - 1e-9
        # Whoever is above its guarantee has what its weight gives, as everybody else above theirs.
        if share > guaranteed[tenant] * 1.01 + 2 * LEAST_SHARE:
            others = [t for t in asked if shares[t] > guaranteed[t] * 1.01 + 2 * LEAST_SHARE]
            assert share / weight[tenant] == pytest.approx(shares[others[0]] / weight[others[0]])
    assert per_weight > 0


def test_without_guarantees_shares_are_the_weights() -> None:
    assert guaranteed_shares({"acme": 3.0, "bell": 1.0}, {}) == {"acme": 0.75, "bell": 0.25}


pushes = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.sampled_from(TENANTS), st.integers(0, 5), costs),
        st.tuples(st.just("pop"), st.just(""), st.just(0), st.just(0.0)),
        st.tuples(st.just("charge"), st.sampled_from(TENANTS), st.just(0), st.floats(-1e9, 1e9)),
        st.tuples(st.just("weights"), st.sampled_from(TENANTS), st.just(0), st.floats(0.1, 20.0)),
    ),
    max_size=200,
)


@given(pushes)
def test_nothing_is_lost_or_kept_back_and_transfers_keep_their_order(
    steps: list[tuple[str, str, int, float]],
) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    waiting: dict[int, list[int]] = {}
    numbers = itertools.count()

    def take() -> None:
        transfer, number = queue.pop()
        assert waiting[transfer].pop(0) == number

    for what, tenant, transfer, amount in steps:
        if what == "push":
            number = next(numbers)
            waiting.setdefault(transfer, []).append(number)
            queue.push((transfer, number), tenant=tenant, transfer=transfer, cost_bytes=amount)
        elif what == "charge":
            queue.charge(tenant, amount)
        elif what == "weights":
            queue.set_weights({tenant: amount})
        elif any(waiting.values()):
            # Work conserving: whatever anybody owes, something is served while anything waits.
            take()
        assert len(queue) == sum(map(len, waiting.values()))
        assert all(size >= 0 for size in queue.waiting_bytes().values())
    while len(queue):
        take()
    assert not any(waiting.values())
    assert queue.waiting_bytes() == {}


@given(st.floats(0.1, 20.0), st.floats(0.1, 20.0), st.floats(1.0, 1e6), st.floats(1.0, 1e6))
def test_nobody_starves(weight: float, other_weight: float, cost: float, other_cost: float) -> None:
    queue: FairQueue[str] = FairQueue({"acme": weight, "bell": other_weight})
    queue.push("acme", tenant="acme", transfer="a", cost_bytes=cost)
    before_bytes = 0.0
    for number in itertools.count():
        queue.push("bell", tenant="bell", transfer=number, cost_bytes=other_cost)
        if number < 1:
            continue
        if queue.pop() == "acme":
            break
        before_bytes += other_cost
        assert before_bytes <= cost * other_weight / weight * (1 + 1e-9) + other_cost
        if number > 300:
            break
