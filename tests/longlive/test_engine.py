"""What engines are asked for must make sense before any engine is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controld.contract.configuration import Configuration
from dataplanes.longlive.engine import EngineError, LoadSpec, SessionSpec
from dataplanes.longlive.reference.shapes import parse_prompt

SETTING = Configuration({"steps": 4})


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: LoadSpec(checkpoint="", setting=SETTING, memory_limit_bytes=-5), r"load\.memory_limit_bytes: -5"),
        (lambda: SessionSpec(session_id="a", prompt="x", chunks=-3), r"session\.chunks: -3"),
    ],
)
def test_numbers_are_not_negative(make: Callable[[], object], named: str) -> None:
    with pytest.raises(EngineError, match=named):
        make()


def test_a_prompt_of_a_megabyte_is_refused_in_a_line() -> None:
    with pytest.raises(EngineError, match="not in this engine's vocabulary") as caught:
        parse_prompt("x" * 1_000_000)
    assert len(str(caught.value)) < 300
