"""YAML without surprises: the core types of YAML 1.2, each key once, bounded, and every value knows its place.

Built on PyYAML's event stream, so that neither its resolver (`NO` is false, `010` is 8, `12:30` is 750) nor its
constructor (the last of two equal keys wins) has a say, and so that nesting never recurses.

Merges (`<<: *base`) add keys and never override: a key that is both merged and written is a duplicate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import yaml

Plain = str | int | float | bool | None


class Position(NamedTuple):
    """A place in a file, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"line {self.line}, column {self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a document may cost. Nodes are counted after aliases are followed."""

    max_bytes: int = 1 << 20
    max_depth: int = 32
    max_nodes: int = 200_000
    max_aliases: int = 256
    max_scalar_characters: int = 16_384


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value of a core type. Floats are finite."""

    value: Plain
    position: Position
    nodes: int = 1


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list."""

    items: tuple[Node, ...]
    position: Position
    nodes: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a mapping with the place of the key and its value."""

    key_position: Position
    value: Node


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping with string keys, in the order written."""

    entries: Mapping[str, Entry]
    position: Position
    nodes: int

    def get(self, key: str) -> Node | None:
        """The value under a key, or None."""
        entry = self.entries.get(key)
        return entry.value if entry else None


Node = Scalar | Sequence | Table


@dataclass(frozen=True, slots=True)
class Flaw:
    """What is wrong with the document as YAML; `path` as in `classes[0].slo`."""

    position: Position
    path: str
    problem: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Document:
    """What was read. With flaws, `root` holds what could be understood, or is None."""

    root: Node | None
    flaws: tuple[Flaw, ...]


def parse(content: bytes, limits: Limits | None = None) -> Document:
    """Read exactly one document of UTF-8 YAML. Never raises on account of the content.

    Args:
        content: the file's bytes.
        limits: bounds; the defaults suit files that people write.
    """
    limits = limits or Limits()
    if len(content) > limits.max_bytes:
        flaw = Flaw(Position(1, 1), "", f"the file has {len(content)} bytes, more than {limits.max_bytes}")
        return Document(None, (flaw,))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8", errors="replace")
        return Document(None, (Flaw(_end_of(before), "", "not UTF-8", "save the file as UTF-8"),))
    unprintable = _UNPRINTABLE.search(text)
    if unprintable:
        code_point = f"U+{ord(unprintable.group()):04X}"
        flaw = Flaw(_end_of(text[: unprintable.start()]), "", f"the character {code_point} is not allowed")
        return Document(None, (flaw,))
    builder = _Builder(limits)
    try:
        for event in _events(text):
            builder.take(event)
    except _Fatal as fatal:
        builder.flaws.append(fatal.flaw)
        return Document(None, tuple(builder.flaws))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        position = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
        problem = f"not YAML: {error.problem or error.context}"
        builder.flaws.append(Flaw(position, "", problem, _syntax_hint(text, position, error)))
        return Document(None, tuple(builder.flaws))
    if builder.root is None and not builder.flaws:
        builder.flaws.append(Flaw(Position(1, 1), "", "the file is empty"))
    return Document(builder.root, tuple(builder.flaws))


def to_plain(node: Node) -> Any:
    """The value as dictionaries, lists and scalars."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Sequence):
        return [to_plain(item) for item in node.items]
    return {key: to_plain(entry.value) for key, entry in node.entries.items()}


def path_text(path: tuple[str | int, ...]) -> str:
    """`("classes", 0, "slo")` as `classes[0].slo`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]")
_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_MAX_DIGITS = 400

_CORE = "tag:yaml.org,2002:"
_MERGE = "<<"


class _Fatal(Exception):  # noqa: N818 - it never leaves this module
    """Stops the reading: what follows cannot be trusted or would cost too much."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.problem)
        self.flaw = flaw


@dataclass(frozen=True, slots=True)
class _Key:
    """A key that waits for its value; without a name the value is read and dropped."""

    name: str | None
    position: Position
    merge: bool = False


@dataclass(slots=True)
class _Open:
    """A collection that is being read."""

    position: Position
    anchor: str | None
    is_table: bool
    items: list[Node] = field(default_factory=list)
    entries: dict[str, Entry] = field(default_factory=dict)
    merges: list[tuple[Position, Node]] = field(default_factory=list)
    key: _Key | None = None


class _Builder:
    """Turns events into nodes with a stack of its own."""

    def __init__(self, limits: Limits) -> None:
        self.root: Node | None = None
        self.flaws: list[Flaw] = []
        self._limits = limits
        self._open: list[_Open] = []
        self._anchors: dict[str, Node] = {}
        self._anchor_positions: dict[str, Position] = {}
        self._aliases = 0
        self._documents = 0
        self._written = 0

    def take(self, event: yaml.Event) -> None:
        mark = event.start_mark
        position = Position(mark.line + 1, mark.column + 1) if mark else Position(1, 1)
        if isinstance(event, yaml.ScalarEvent):
            self._count(position)
            self._define(event.anchor, position)
            self._attach(self._scalar(event, position), position, event.anchor, merge=_is_merge(event))
        elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingStartEvent):
            self._count(position)
            self._define(event.anchor, position)
            is_table = isinstance(event, yaml.MappingStartEvent)
            if event.tag not in (None, "!", _CORE + ("map" if is_table else "seq")):
                self._refuse_tag(event.tag, position)
            if len(self._open) >= self._limits.max_depth:
                raise _Fatal(Flaw(position, "", f"nested deeper than {self._limits.max_depth} levels"))
            self._open.append(_Open(position, event.anchor, is_table))
        elif isinstance(event, yaml.SequenceEndEvent | yaml.MappingEndEvent):
            self._close()
        elif isinstance(event, yaml.AliasEvent):
            self._follow(event.anchor, position)
        elif isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                raise _Fatal(Flaw(position, "", "a second document", "one document a file: split it"))
            if event.version and tuple(event.version) != (1, 2):
                self._flaw(position, "only YAML 1.2 is read", hint="remove the %YAML line")

    def _path(self, *last: str | int | None) -> str:
        parts: list[str | int] = []
        for frame in self._open:
            if not frame.is_table:
                parts.append(len(frame.items))
            elif frame.key is not None and frame.key.name is not None:
                parts.append(frame.key.name)
        return path_text((*parts, *(part for part in last if part is not None)))

    def _flaw(self, position: Position, problem: str, *, hint: str = "", key: str | None = None) -> None:
        self.flaws.append(Flaw(position, self._path(key), problem, hint))

    def _count(self, position: Position, nodes: int = 1) -> None:
        self._written += nodes
        if self._written > self._limits.max_nodes:
            raise _Fatal(Flaw(position, "", f"more than {self._limits.max_nodes} values, aliases followed"))

    def _define(self, anchor: str | None, position: Position) -> None:
        if anchor is None:
            return
        if anchor in self._anchor_positions:
            first = self._anchor_positions[anchor]
            self._flaw(position, f"the anchor &{anchor} is defined twice (first at {first})")
        else:
            self._anchor_positions[anchor] = position

    def _follow(self, anchor: str | None, position: Position) -> None:
        self._aliases += 1
        if self._aliases > self._limits.max_aliases:
            raise _Fatal(Flaw(position, self._path(), f"more than {self._limits.max_aliases} aliases"))
        target = self._anchors.get(anchor or "")
        if target is None:
            inside = anchor in self._anchor_positions
            problem = f"*{anchor} refers to " + ("itself" if inside else "an anchor that is not defined above it")
            raise _Fatal(Flaw(position, self._path(), problem))
        self._count(position, target.nodes)
        self._attach(target, position, None, merge=False)

    def _attach(self, node: Node, position: Position, anchor: str | None, *, merge: bool) -> None:
        if anchor is not None:
            self._anchors.setdefault(anchor, node)
        if not self._open:
            self.root = node
            return
        frame = self._open[-1]
        if not frame.is_table:
            frame.items.append(node)
        elif frame.key is None:
            frame.key = self._key(frame, node, position, merge)
        else:
            key, frame.key = frame.key, None
            if key.merge:
                frame.merges.append((key.position, node))
            elif key.name is not None:
                frame.entries[key.name] = Entry(key.position, node)

    def _key(self, frame: _Open, node: Node, position: Position, merge: bool) -> _Key:
        if merge:
            if frame.merges:
                first = frame.merges[0][0]
                self._flaw(position, f"duplicate key (first at {first})", key=_MERGE, hint="merge a list: <<: [*a, *b]")
            return _Key(None, position, merge=True)
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            kind = f"{node.value!r}" if isinstance(node, Scalar) else "a collection"
            hint = "put it in quotes" if isinstance(node, Scalar) and node.value is not None else ""
            self._flaw(position, f"a key must be a string, not {kind}", hint=hint)
            return _Key(None, position)
        if node.value in frame.entries:
            first = frame.entries[node.value].key_position
            self._flaw(position, f"duplicate key (first at {first})", key=node.value)
            return _Key(None, position)
        return _Key(node.value, position)

    def _close(self) -> None:
        frame = self._open[-1]
        node: Node
        if frame.is_table:
            for position, source in frame.merges:
                self._merge(frame, position, source)
            values = (entry.value for entry in frame.entries.values())
            node = Table(frame.entries, frame.position, 1 + sum(value.nodes for value in values))
        else:
            items = tuple(frame.items)
            node = Sequence(items, frame.position, 1 + sum(item.nodes for item in items))
        self._open.pop()
        self._attach(node, frame.position, frame.anchor, merge=False)

    def _merge(self, frame: _Open, position: Position, source: Node) -> None:
        tables = source.items if isinstance(source, Sequence) else (source,)
        merged: dict[str, Entry] = {}
        for table in tables:
            if not isinstance(table, Table):
                self._flaw(position, "a merge takes a mapping or a list of mappings", key=_MERGE)
                return
            for key, entry in table.entries.items():
                other = frame.entries.get(key) or merged.get(key)
                if other is None:
                    merged[key] = entry
                    continue
                self._flaw(
                    max(other.key_position, position),
                    f"duplicate key (first at {min(other.key_position, entry.key_position)}, "
                    f'merged by "<<" at {position})',
                    key=key,
                    hint="a merge adds keys and never overrides: write the key in one place",
                )
        frame.entries.update(merged)

    def _scalar(self, event: yaml.ScalarEvent, position: Position) -> Scalar:
        text: str = event.value
        if len(text) > self._limits.max_scalar_characters:
            raise _Fatal(
                Flaw(position, self._path(), f"a value longer than {self._limits.max_scalar_characters} characters")
            )
        if event.tag is None:
            plain = bool(event.implicit[0])
            return Scalar(self._resolve(text, position) if plain else text, position)
        if event.tag in ("!", _CORE + "str"):
            return Scalar(text, position)
        wanted = _CORE_SCALARS.get(event.tag)
        if wanted is None:
            self._refuse_tag(event.tag, position)
            return Scalar(text, position)
        value = self._resolve(text, position)
        if wanted is float and type(value) is int:
            value = float(value)
        if type(value) is not wanted:
            self._flaw(position, f'"{text}" is not of the type !!{event.tag.removeprefix(_CORE)}')
        return Scalar(value, position)

    def _resolve(self, text: str, position: Position) -> Plain:
        """The value of a plain scalar by the core schema of YAML 1.2 (section 10.3.2)."""
        if _NULL.fullmatch(text):
            return None
        if _TRUE.fullmatch(text):
            return True
        if _FALSE.fullmatch(text):
            return False
        if _NOT_FINITE.fullmatch(text):
            self._flaw(position, f"{text} is not a finite number")
            return 0.0
        for pattern, base in ((_DECIMAL, 10), (_OCTAL, 8), (_HEXADECIMAL, 16)):
            if pattern.fullmatch(text):
                if len(text) > _MAX_DIGITS:
                    self._flaw(position, f"a number of more than {_MAX_DIGITS} digits")
                    return 0
                return int(text, base)
        if _FLOAT.fullmatch(text):
            value = float(text)
            if not math.isfinite(value):
                self._flaw(position, f"{text} is too large for a number")
                return 0.0
            return value
        return text

    def _refuse_tag(self, tag: str, position: Position) -> None:
        shown = "!!" + tag.removeprefix(_CORE) if tag.startswith(_CORE) else tag
        self._flaw(position, f"the tag {shown} is not allowed", hint="remove it: only core types are read")


_CORE_SCALARS: dict[str, type] = {
    _CORE + "int": int,
    _CORE + "float": float,
    _CORE + "bool": bool,
    _CORE + "null": type(None),
}


def _is_merge(event: yaml.ScalarEvent) -> bool:
    return event.tag is None and bool(event.implicit[0]) and event.value == _MERGE


def _events(text: str) -> Iterator[yaml.Event]:
    # libyaml where the wheel has it: a megabyte takes a tenth of a second instead of ten.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    events: Iterator[yaml.Event] = yaml.parse(text, Loader=loader)
    return events


def _end_of(text: str) -> Position:
    lines = text.split("\n")
    return Position(len(lines), len(lines[-1]) + 1)


def _syntax_hint(text: str, position: Position, error: yaml.MarkedYAMLError) -> str:
    lines = text.splitlines()
    if position.line <= len(lines) and "\t" in lines[position.line - 1][: position.column]:
        return "indent with spaces, not tabs"
    begin = error.context_mark
    if error.context and begin:
        return f"{error.context} that begins at {Position(begin.line + 1, begin.column + 1)}"
    return ""
