from __future__ import annotations

import math

import pytest

from controld.contract.decision import RAW
from controld.contract.errors import FieldError
from controld.controller.guard import Pin, PinBoard


def pin(arm_id: str, **changes: object) -> Pin:
    values: dict[str, object] = {"arm_id": arm_id, "reason": "probe breach", "since_unix_s": 1.0}
    return Pin(**{**values, **changes})  # type: ignore[arg-type]


def test_a_pin_holds_for_its_class_until_its_end() -> None:
    board = PinBoard().with_pin(pin("a", service_class="chat", until_unix_s=10.0)).with_pin(pin("b"))
    assert board.reason("a", "chat") == "probe breach"
    assert board.reason("a", "batch") == ""
    assert board.reason("b", "batch") == "probe breach"
    assert [p.arm_id for p in board.at(10.0).pins] == ["b"]
    assert board.without(["b"]).pins == board.pins[:1]


def test_a_newer_pin_replaces_the_older_one() -> None:
    board = PinBoard((pin("a"),)).merged(PinBoard((pin("a", reason="again"), pin("a", service_class="chat"))))
    assert [(p.service_class, p.reason) for p in board.pins] == [("*", "again"), ("chat", "probe breach")]


def test_json_round_trip() -> None:
    board = PinBoard((pin("a"), pin("b", until_unix_s=9.0)))
    again = PinBoard.from_json(board.to_json())
    assert again == board
    assert math.isinf(again.pins[0].until_unix_s)


def test_raw_cannot_be_pinned_and_a_pin_has_a_reason() -> None:
    for changes in ({"arm_id": RAW}, {"reason": ""}):
        with pytest.raises(FieldError):
            pin(**{"arm_id": "a", **changes})  # type: ignore[arg-type]
    for text in ("", "{}", '[{"arm": 1}]', '[{"arm_id": "raw", "reason": "x", "since_unix_s": 1}]'):
        with pytest.raises(FieldError):
            PinBoard.from_json(text if text != "{}" else "3")
