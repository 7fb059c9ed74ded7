"""The delivery state of one agent, on a clock that only the test moves."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controld.fleet.delivery import NACK_BACKOFF_MAX_S, Answer, Delivery
from controld.fleet.published import Published


def published(version: int) -> Published:
    return Published(version, 1, ())


def refuse(delivery: Delivery, nonce: str, version: int, now_s: float) -> Answer:
    return delivery.nack(nonce, version, "no", "", now_s=now_s, now_unix_s=now_s)


def test_a_permanent_refusal_is_tried_ever_more_rarely() -> None:
    delivery, now_s, sendings = Delivery(), 0.0, []
    delivery.want(published(1))
    while now_s < 3600:
        due = delivery.due(now_s)
        if due is not None:
            delivery.sent(str(len(sendings)), due)
            assert refuse(delivery, str(len(sendings)), 1, now_s) is Answer.TAKEN
            sendings.append(now_s)
        now_s += 0.5
    gaps = [b - a for a, b in itertools.pairwise(sendings)]
    assert gaps[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(gaps) == NACK_BACKOFF_MAX_S and len(sendings) < 25
    assert delivery.last_failed is not None and delivery.last_failed.attempts == len(sendings)


def test_a_publisher_cannot_make_a_refusing_agent_hot() -> None:
    delivery, sendings = Delivery(), 0
    for second in range(600):
        delivery.want(published(second + 1))
        due = delivery.due(float(second))
        if due is not None:
            sendings += 1
            delivery.sent(f"n{second}", due)
            refuse(delivery, f"n{second}", due.version, float(second))
    assert sendings <= 11


def test_backoff_never_overflows() -> None:
    delivery = Delivery()
    delivery.want(published(1))
    for attempt in range(2000):
        delivery.sent(str(attempt), published(1))
        refuse(delivery, str(attempt), 1, 0.0)
    assert delivery.wait_s(0.0) == NACK_BACKOFF_MAX_S


def test_an_answer_is_taken_once() -> None:
    delivery = Delivery()
    delivery.want(published(1))
    delivery.sent("n", published(1))
    assert delivery.ack("n", 1) is Answer.TAKEN
    assert delivery.ack("n", 1) is Answer.LATE
    assert refuse(delivery, "n", 1, 0.0) is Answer.LATE
    assert not delivery.degraded


class AnyOrder(RuleBasedStateMachine):
    """Publishes, answers of any nonce and new streams in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.delivery = Delivery()
        self.now_s = 0.0
        self.version = 0
        self.nonces: list[tuple[str, int]] = []
        self.ever_acked = {0}

    @rule()
    def publish(self) -> None:
        self.version += 1
        self.delivery.want(published(self.version))

    @rule(seconds=st.floats(0, 400))
    def send(self, seconds: float) -> None:
        self.now_s += seconds
        due = self.delivery.due(self.now_s)
        if due is not None:
            self.nonces.append((f"n{len(self.nonces)}", due.version))
            self.delivery.sent(self.nonces[-1][0], due)

    @rule(index=st.integers(0, 50), good=st.booleans(), wrong=st.integers(-1, 1))
    def answer(self, index: int, good: bool, wrong: int) -> None:
        if not self.nonces:
            return
        nonce, version = self.nonces[index % len(self.nonces)]
        if good:
            if self.delivery.ack(nonce, version + wrong) is Answer.TAKEN:
                assert wrong == 0 and (nonce, version) == self.nonces[-1]
                self.ever_acked.add(version)
        elif refuse(self.delivery, nonce, version + wrong, self.now_s) is Answer.TAKEN:
            assert self.delivery.degraded

    @rule()
    def reconnect(self) -> None:
        self.delivery.new_stream()

    @invariant()
    def desired_is_the_last_published_and_acked_was_acknowledged(self) -> None:
        assert self.delivery.desired == self.version
        assert self.delivery.acked in self.ever_acked

    @invariant()
    def something_is_always_on_its_way_unless_settled(self) -> None:
        settled_or_moving = self.delivery.due(self.now_s + NACK_BACKOFF_MAX_S + 1) is None
        if settled_or_moving and self.version:
            in_flight = self.delivery._in_flight
            assert in_flight is not None or self.delivery.acked == self.version


TestAnyOrder = AnyOrder.TestCase
