from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.policy.strict_yaml import Limits, Position, Scalar, Sequence, Table, parse, path_text, to_plain


def plain(text: str) -> object:
    document = parse(text.encode())
    assert document.flaws == ()
    assert document.root is not None
    return to_plain(document.root)


def only_flaw(text: str | bytes, limits: Limits | None = None) -> tuple[int, int, str, str]:
    document = parse(text if isinstance(text, bytes) else text.encode(), limits)
    assert len(document.flaws) == 1, document.flaws
    flaw = document.flaws[0]
    return flaw.position.line, flaw.position.column, flaw.path, flaw.problem


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("NO", "NO"), ("no", "no"), ("yes", "yes"), ("on", "on"), ("Off", "Off"), ("y", "y"),
        ("true", True), ("False", False), ("TRUE", True), ("tRUE", "tRUE"),
        ("010", 10), ("0o17", 15), ("0x1F", 31), ("0b1", "0b1"), ("1_000", "1_000"),
        ("12:30", "12:30"), ("+7", 7), ("-0", 0),
        ("1.5", 1.5), (".5", 0.5), ("1.", 1.0), ("1e3", 1000.0), ("1e-2", 0.01), ("1.2.3", "1.2.3"), ("e3", "e3"),
        ("~", None), ("null", None), ("Null", None), ("", None), ("nUll", "nUll"),
        ("2001-01-01", "2001-01-01"), ("=", "="), ("'3'", "3"), ('"true"', "true"), ("!!str 3", "3"), ('!!int "3"', 3),
        ("!!float 3", 3.0), ("! 3", "3"), ('!!null ""', None), ("!!bool true", True),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(written: str, value: object) -> None:
    read = plain(f"key: {written}\n")
    assert read == {"key": value}
    assert type(read["key"]) is type(value)  # type: ignore[index]


# YAML has no surrogate escapes and folds Unicode's line separators, so these are left out.
TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn", "Zl", "Zp"], exclude_characters="\ufeff"))
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(TEXT, JSON_VALUES, min_size=1, max_size=4))
def test_every_json_document_reads_as_itself(value: dict[str, object]) -> None:
    document = parse(json.dumps(value, ensure_ascii=False).encode())
    assert document.flaws == ()
    assert document.root is not None
    assert to_plain(document.root) == value


@given(st.binary(max_size=200) | st.text(alphabet="{}[]:,-&*!<>|'\"\n \tab1#%@`?~", max_size=60).map(str.encode))
def test_no_content_ever_raises_or_yields_a_number_that_is_not_finite(content: bytes) -> None:
    document = parse(content)
    assert document.root is not None or document.flaws

    def walk(value: object) -> None:
        if isinstance(value, float):
            assert math.isfinite(value)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            walk(inner)

    if document.root is not None:
        walk(to_plain(document.root))


def test_every_value_knows_its_place() -> None:
    document = parse(b"\n# comment\ntop:\n  inner: [1, {k: v}]\n")
    root = document.root
    assert isinstance(root, Table)
    assert root.position == Position(3, 1)
    inner = root.get("top")
    assert isinstance(inner, Table)
    assert inner.entries["inner"].key_position == Position(4, 3)
    items = inner.get("inner")
    assert isinstance(items, Sequence)
    assert items.position == Position(4, 10)
    table = items.items[1]
    assert isinstance(table, Table)
    value = table.get("k")
    assert isinstance(value, Scalar)
    assert value.position == Position(4, 18)


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("a: 1\na: 2\n", (2, 1, "a", "duplicate key (first at line 1, column 1)")),
        ("x:\n  a: 1\n  a: 2\n", (3, 3, "x.a", "duplicate key (first at line 2, column 3)")),
        ("x:\n  - y: {a: 1, a: 2}\n", (2, 15, "x[0].y.a", "duplicate key (first at line 2, column 9)")),
        ("x: {y: {z: {a: 1, 'a': 2}}}\n", (1, 19, "x.y.z.a", "duplicate key (first at line 1, column 13)")),
        ("x: &anchor {a: 1, a: 2}\ny: *anchor\n", (1, 19, "x.a", "duplicate key (first at line 1, column 13)")),
        (
            "b: &b {a: 1}\nx:\n  <<: *b\n  a: 2\n",
            (4, 3, "x.a", 'duplicate key (first at line 1, column 8, merged by "<<" at line 3, column 3)'),
        ),
        (
            "b: &b {a: 1}\nx:\n  a: 2\n  <<: *b\n",
            (4, 3, "x.a", 'duplicate key (first at line 1, column 8, merged by "<<" at line 4, column 3)'),
        ),
        (
            "b: &b {a: 1}\nc: &c {a: 1}\nx:\n  <<: [*b, *c]\n",
            (4, 3, "x.a", 'duplicate key (first at line 1, column 8, merged by "<<" at line 4, column 3)'),
        ),
        ("x:\n  <<: {a: 1}\n  <<: {b: 1}\n", (3, 3, "x.<<", "duplicate key (first at line 2, column 3)")),
    ],
)
def test_a_key_occurs_once_and_both_places_are_named(text: str, flaw: tuple[int, int, str, str]) -> None:
    assert only_flaw(text) == flaw


def test_a_merge_adds_keys() -> None:
    text = "b: &b {a: 1}\nc: &c {d: 2}\nx:\n  <<: [*b, *c]\n  e: 3\n"
    read = plain(text)
    assert isinstance(read, dict)
    assert read["x"] == {"a": 1, "d": 2, "e": 3}
    assert plain("'<<': 1") == {"<<": 1}


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("a: !!python/object:os.system x", (1, 4, "a", "the tag !!python/object:os.system is not allowed")),
        ("a: !own {b: 1}", (1, 4, "a", "the tag !own is not allowed")),
        ("a: !!set {b}", (1, 4, "a", "the tag !!set is not allowed")),
        ("a: !!timestamp 2001-01-01", (1, 4, "a", "the tag !!timestamp is not allowed")),
        ("a: !!int x", (1, 4, "a", '"x" is not of the type !!int')),
        ("a: .nan", (1, 4, "a", ".nan is not a finite number")),
        ("a: [-.INF]", (1, 5, "a[0]", "-.INF is not a finite number")),
        ("a: 1e999", (1, 4, "a", "1e999 is too large for a number")),
        ("a: " + "9" * 5000, (1, 4, "a", "a number of more than 400 digits")),
        ("1: a", (1, 1, "", "a key must be a string, not 1")),
        ("x: {true: a}", (1, 5, "x", "a key must be a string, not True")),
        ("? [a]\n: b", (1, 3, "", "a key must be a string, not a collection")),
        ("a: *b", (1, 4, "a", "*b refers to an anchor that is not defined above it")),
        ("a: &b {c: *b}", (1, 11, "a.c", "*b refers to itself")),
        ("a: &b 1\nc: &b 2", (2, 4, "c", "the anchor &b is defined twice (first at line 1, column 4)")),
        ("a: 1\n---\nb: 2", (2, 1, "", "a second document")),
        ("%YAML 1.1\n---\na: 1", (1, 1, "", "only YAML 1.2 is read")),
        ("", (1, 1, "", "the file is empty")),
        ("# only a comment\n", (1, 1, "", "the file is empty")),
        (b"a: \xff", (1, 4, "", "not UTF-8")),
        (b"ok: 1\nb: x\x00", (2, 5, "", "the character U+0000 is not allowed")),
        ("a: [1, 2\n", (2, 1, "", "not YAML: did not find expected ',' or ']'")),
        ("a:\n\tb: 1", (2, 1, "", "not YAML: found character that cannot start any token")),
    ],
)  # fmt: skip
def test_what_is_not_strict_is_refused_where_it_stands(text: str | bytes, flaw: tuple[int, int, str, str]) -> None:
    assert only_flaw(text) == flaw


def test_all_flaws_are_reported() -> None:
    document = parse(b"a: .nan\nb: !x 1\na: 2\n")
    assert [flaw.position.line for flaw in document.flaws] == [1, 2, 3]


def test_a_byte_order_mark_is_no_content() -> None:
    assert plain("\ufeffa: 1") == {"a": 1}


@pytest.mark.parametrize(
    ("text", "limits", "problem"),
    [
        ("[" * 100_000, Limits(), "not YAML: exceeded maximum nesting depth"),
        ("{a: " * 50_000, Limits(), "nested deeper than 32 levels"),
        ("- " * 40 + "1", Limits(), "nested deeper than 32 levels"),
        ("a: [1, 1, 1, 1]", Limits(max_nodes=5), "more than 5 values, aliases followed"),
        ("a: &a 1\nb: [*a, *a, *a]", Limits(max_aliases=2), "more than 2 aliases"),
        ("a: " + "x" * 100, Limits(max_scalar_characters=99), "a value longer than 99 characters"),
        ("a: 1", Limits(max_bytes=3), "the file has 4 bytes, more than 3"),
    ],
)
def test_cost_is_bounded(text: str, limits: Limits, problem: str) -> None:
    assert only_flaw(text, limits)[3] == problem


def test_aliases_cannot_multiply() -> None:
    lines = ["- &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"- &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 9)]
    assert only_flaw("\n".join(lines))[3] == "more than 200000 values, aliases followed"


def test_paths_read_as_they_are_written() -> None:
    assert path_text(("classes", 0, "slo", "ttft")) == "classes[0].slo.ttft"
    assert path_text((0, "a")) == "[0].a"
