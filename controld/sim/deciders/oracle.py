"""The clairvoyant: what could be reached by somebody who knows the truth."""

from __future__ import annotations

from controld.contract.decision import RAW
from controld.sim.alone import least_possible_s, service_alone_s
from controld.sim.deciders.base import Menu, SilentDecider, Situation
from controld.sim.record import Arrival, Choice
from controld.sim.world import World


class Oracle(SilentDecider):
    """Knows every codec's true times now and the link's rate from now on; pays what everybody pays.

    It minimises, over the arms that the class may use,

        mean seconds of the transfer + (transfers in other queues of the link) x (its mean seconds on the wire)

    where the mean of the transfer is taken over nothing: each stage takes its mean, so noise is not foreseen. With one
    queue the second term is zero and each transfer ends as early as it can, which no transfer after it can lose by: in
    a world without noise no decider's times are less, one by one. Encodings that happen to run for other peers are not
    foreseen.
    """

    def __init__(self, world: World, menu: Menu) -> None:
        self._world = world
        self._menu = menu
        self._last: dict[str, str] = {}

    @property
    def name(self) -> str:
        return "oracle"

    def choose(self, arrival: Arrival, situation: Situation) -> Choice:
        """The best arm."""
        arms = self._menu.of_class(arrival.service_class)
        likely = self._last.get(arrival.service_class, RAW)
        best_arm, best_s = RAW, float("inf")
        # The last one's answer first: most others are then ruled out by their bounds.
        for arm_id in sorted(arms, key=lambda arm: arm != likely):
            others_s = situation.elsewhere * self._wire_s(arm_id, arrival, situation) if situation.elsewhere else 0.0
            bound_s = least_possible_s(
                self._world, arm_id, arrival.raw_bytes, now_s=situation.now_s, begun=situation.begun
            )
            if bound_s + others_s >= best_s:
                continue
            own_s = service_alone_s(
                self._world, arm_id, arrival.raw_bytes,
                now_s=situation.now_s, begun=situation.begun, link=situation.link,
            )  # fmt: skip
            if own_s + others_s < best_s:
                best_arm, best_s = arm_id, own_s + others_s
        self._last[arrival.service_class] = best_arm
        return Choice(best_arm)

    def _wire_s(self, arm_id: str, arrival: Arrival, situation: Situation) -> float:
        world = self._world
        work = world.work(arm_id, arrival.raw_bytes, situation.now_s, situation.begun)
        size_bytes = work.wire_bytes * (work.chunks - 1 + work.last_share)
        return size_bytes / world.link.schedule.rate(situation.now_s, situation.begun)
