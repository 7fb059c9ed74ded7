"""The one place that holds the policies in force: it replaces them whole or keeps the last good ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controld.policy.last_good import LastGood, LastGoodFile
from controld.policy.loader import SourceFile, fingerprint, parse_policies, parse_with_warnings, read_sources
from controld.policy.model import PolicySet, content_hash
from controld.policy.problem import PolicyErrors, Problem

_log = logging.getLogger(__name__)

Listener = Callable[[PolicySet], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadOutcome:
    """What a reload came to.

    Args:
        generation: of the policies in force after it.
        content_hash: of their meaning.
        changed: whether they are others than before.
        problems: why the files were refused; empty where they were accepted.
    """

    generation: int
    content_hash: str
    changed: bool
    problems: tuple[Problem, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether the files on disk are what is in force."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """As REST and `--json` show it."""
        return {
            "generation": self.generation,
            "content_hash": self.content_hash,
            "changed": self.changed,
            "accepted": self.accepted,
            "problems": [problem.to_json() for problem in self.problems],
        }


class PolicySource:
    """Policies of one directory. Not thread-safe: the daemon serialises its calls.

    Args:
        directory: of the policy files.
        last_good: where accepted policies are kept over a restart; None keeps them in memory only.
    """

    def __init__(self, directory: Path, last_good: LastGoodFile | None = None) -> None:
        self.directory = directory
        self._last_good = last_good
        self._current: PolicySet | None = None
        self._attempted = ""
        self._problems: tuple[Problem, ...] = ()
        self._listeners: list[Listener] = []

    @property
    def current(self) -> PolicySet:
        """The policies in force.

        Raises:
            RuntimeError: `load_initial` has not succeeded yet.
        """
        if self._current is None:
            raise RuntimeError("the policies were not loaded yet")
        return self._current

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What is wrong with the files on disk as they were last read; empty when they are in force."""
        return self._problems

    @property
    def last_good_problem(self) -> str:
        """What was wrong with the policies that the last process kept; empty where nothing was."""
        return self._last_good.problem if self._last_good else ""

    def subscribe(self, listener: Listener) -> None:
        """Be called with every new set when it is announced; a listener is quick and does not raise."""
        self._listeners.append(listener)

    def announce(self) -> None:
        """Tell the listeners what is in force, on the caller's thread: reading may happen on another one."""
        for listener in self._listeners:
            listener(self.current)

    def is_touched(self) -> str | None:
        """A fingerprint of the files where it is not the last attempted one, else None.

        Files that cannot be read count as a state of their own, so that each is tried and reported once.
        """
        found = _fingerprint(self.directory)
        return None if found == self._attempted else found

    def load_initial(self) -> ReloadOutcome:
        """Load the files, or where they are refused, the last good policies.

        Raises:
            PolicyErrors: the files are refused and nothing good was kept.
        """
        kept = self._last_good.read() if self._last_good else None
        try:
            return self._accept(self._read(), kept.generation if kept else 0, kept.content_hash if kept else "")
        except PolicyErrors as error:
            if kept is None:
                raise
            try:
                policies = parse_policies(kept.sources)
            except PolicyErrors:
                raise error from None
            self._problems = error.problems
            self._current = PolicySet(kept.generation, content_hash(policies), policies)
            _log.error("policies refused, the last good ones are in force", extra=_details(self.current, error))
            return self._outcome(changed=False)

    def reload(self) -> ReloadOutcome:
        """Read the files again; what is in force changes only if all of them are right and mean something else."""
        before = self.current
        try:
            return self._accept(self._read(), before.generation, before.content_hash)
        except PolicyErrors as error:
            self._problems = error.problems
            _log.error("policies refused, the last good ones stay in force", extra=_details(before, error))
            return self._outcome(changed=False)

    def _read(self) -> tuple[SourceFile, ...]:
        try:
            sources = read_sources(self.directory)
        except PolicyErrors as error:
            self._attempted = _unreadable(error)
            raise
        self._attempted = fingerprint(sources)
        return sources

    def _accept(self, sources: tuple[SourceFile, ...], generation: int, known_hash: str) -> ReloadOutcome:
        policies, warnings = parse_with_warnings(sources)
        for warning in warnings:
            _log.warning("%s", warning)
        self._problems = ()
        meaning = content_hash(policies)
        changed = meaning != known_hash
        if changed or self._current is None:
            generation += changed
            self._current = PolicySet(generation, meaning, policies)
            if self._last_good and changed:
                self._last_good.write(LastGood(generation, meaning, sources))
        return self._outcome(changed=changed)

    def _outcome(self, *, changed: bool) -> ReloadOutcome:
        return ReloadOutcome(
            generation=self.current.generation,
            content_hash=self.current.content_hash,
            changed=changed,
            problems=self._problems,
        )


def _details(policies: PolicySet, error: PolicyErrors | None = None) -> dict[str, Any]:
    details: dict[str, Any] = {"generation": policies.generation, "policies": len(policies.policies)}
    if error is not None:
        details["problems"] = [str(problem) for problem in error.problems]
    return details


def _fingerprint(directory: Path) -> str:
    try:
        return fingerprint(read_sources(directory))
    except PolicyErrors as error:
        return _unreadable(error)


def _unreadable(error: PolicyErrors) -> str:
    return f"unreadable: {error.message}"
