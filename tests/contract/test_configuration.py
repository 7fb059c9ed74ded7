"""Configurations have one identity, whatever the order they were written in."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError

names = st.from_regex(r"[a-z][a-z_]{0,12}", fullmatch=True)
values = st.one_of(
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.text(max_size=8),
    st.floats(allow_nan=False, allow_infinity=False).filter(lambda value: not value.is_integer()),
)


@given(st.dictionaries(names, values, max_size=6))
def test_identity_survives_order_json_and_pickle(mapping: dict[str, object]) -> None:
    forward = Configuration(mapping)
    backward = Configuration(dict(reversed(mapping.items())))
    assert forward == backward
    assert forward.config_id == backward.config_id
    assert Configuration.from_json(forward.canonical_json) == forward
    assert pickle.loads(pickle.dumps(forward)) == forward


def test_id_is_the_documented_hash() -> None:
    assert Configuration({"code": "zstd", "a": 1}).canonical_json == '{"a":1,"code":"zstd"}'
    assert Configuration({}).config_id == "44136fa355b3678a"  # SHA-256 of "{}"


def test_lossy_part_ignores_the_coder_only() -> None:
    one = Configuration({"levels": 8, "code": "zstd"})
    two = one.with_coder("bitpack")
    assert one.lossy_id == two.lossy_id
    assert one.config_id != two.config_id
    assert one.lossy_id != Configuration({"levels": 9, "code": "zstd"}).lossy_id


@pytest.mark.parametrize("bad", [12.0, float("nan"), float("inf"), None, [1], {"a": 1}])
def test_values_with_two_spellings_are_refused_by_name(bad: object) -> None:
    with pytest.raises(FieldError, match=r"configuration\.levels"):
        Configuration({"levels": bad})  # type: ignore[dict-item]


@pytest.mark.parametrize("text", ["[]", "{", "1", '{"Levels": 1}', '{"a": {"b": 1}}'])
def test_malformed_json_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        Configuration.from_json(text)
