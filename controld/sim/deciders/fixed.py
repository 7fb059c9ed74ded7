"""Deciders that do not decide: one arm whatever happens."""

from __future__ import annotations

from controld.contract.decision import RAW
from controld.sim.deciders.base import Menu, SilentDecider, Situation
from controld.sim.record import Arrival, Choice


class StaticArm(SilentDecider):
    """One arm for every transfer whose class may use it; raw for the others.

    Args:
        menu: what classes may use; None: anything.
        name: in tables; the arm's id unless given.
    """

    def __init__(self, arm_id: str, menu: Menu | None = None, *, name: str = "") -> None:
        self._name = name or arm_id
        self._menu = menu
        self._arm_id = arm_id
        self._choice, self._raw = Choice(arm_id), Choice(RAW)

    @property
    def name(self) -> str:
        return self._name

    def choose(self, arrival: Arrival, situation: Situation) -> Choice:
        """The arm."""
        if self._menu is not None and self._arm_id not in self._menu.of_class(arrival.service_class):
            return self._raw
        return self._choice
