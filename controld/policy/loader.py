"""Reads a directory of policies: all files, all problems, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from controld.policy.checks import check_policy, check_together, warnings_of
from controld.policy.model import Policy
from controld.policy.problem import PolicyErrors, Problem
from controld.policy.schema import PolicyKeys
from controld.policy.settings import Reading
from controld.policy.strict_yaml import Limits

SUFFIXES = (".yaml", ".yml")
_MAX_FILES = 1000
_MAX_BYTES = Limits().max_bytes


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The bytes of one policy file under the name that messages show."""

    file: str
    content: bytes


def is_policy_file(path: Path) -> bool:
    """Whether a directory entry counts: editors' backups, hidden files and Kubernetes' `..data` do not."""
    return path.suffix in SUFFIXES and not path.name.startswith((".", "#"))


def read_sources(path: Path) -> tuple[SourceFile, ...]:
    """The policy files of a directory (not of its subdirectories) in the order of their names, or one named file.

    The files are read once; everything after works on these bytes.

    Raises:
        PolicyErrors: there is no such path, no policy in it, or a file cannot be read, is none, or is too long.
    """
    name = str(path)
    try:
        files = sorted(p for p in path.iterdir() if is_policy_file(p)) if path.is_dir() else [path]
    except OSError as error:
        raise PolicyErrors([Problem(name, 0, 0, "", f"cannot be read: {error.strerror}")]) from error
    if not files:
        hint = f"write one there, or name another directory; files end in {' or '.join(SUFFIXES)}"
        raise PolicyErrors([Problem(name, 0, 0, "", "holds no policy", hint)])
    if len(files) > _MAX_FILES:
        raise PolicyErrors([Problem(name, 0, 0, "", f"holds {len(files)} policies, more than {_MAX_FILES}")])
    sources, problems = [], []
    for file in files:
        try:
            sources.append(SourceFile(str(file), _read_bounded(file)))
        except OSError as error:
            problems.append(Problem(str(file), 0, 0, "", f"cannot be read: {error.strerror}"))
        except PolicyErrors as error:
            problems += error.problems
    if problems:
        raise PolicyErrors(problems)
    return tuple(sources)


def _read_bounded(path: Path) -> bytes:
    # A pipe without a writer must not hold up the daemon, nor a device without an end fill its memory.
    with open(path, "rb", opener=_open_at_once) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            hint = "a policy is a file, or a link to one"
            raise PolicyErrors([Problem(str(path), 0, 0, "", "is not a regular file", hint)])
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise PolicyErrors([Problem(str(path), 0, 0, "", f"the file has more than {_MAX_BYTES} bytes")])
    return content


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def fingerprint(sources: Iterable[SourceFile]) -> str:
    """SHA-256 over names and bytes: tells whether anything was touched, not whether it means something else."""
    digest = hashlib.sha256()
    for source in sources:
        for part in (source.file.encode(errors="surrogateescape"), source.content):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
    return digest.hexdigest()


def parse_policies(sources: Sequence[SourceFile]) -> tuple[Policy, ...]:
    """Policies in the order of their names.

    Raises:
        PolicyErrors: with every problem of every file.
    """
    return parse_with_warnings(sources)[0]


def parse_with_warnings(sources: Sequence[SourceFile]) -> tuple[tuple[Policy, ...], tuple[Problem, ...]]:
    """The same, and what is allowed but hardly meant.

    Raises:
        PolicyErrors: with every problem of every file.
    """
    readings = [Reading(source.file, source.content) for source in sources]
    models = [reading.validate(PolicyKeys) for reading in readings]
    for reading in readings:
        check_policy(reading)
    check_together(readings)
    problems = [problem for reading in readings for problem in reading.problems]
    if problems:
        raise PolicyErrors(problems)
    policies = [model.to_policy(r.file) for model, r in zip(models, readings, strict=True) if model is not None]
    warnings = sorted(warning for reading in readings for warning in warnings_of(reading))
    return tuple(sorted(policies, key=lambda policy: policy.name)), tuple(warnings)


def load_policies(directory: Path) -> tuple[Policy, ...]:
    """Read and check a directory (or one file).

    Raises:
        PolicyErrors: with every problem of every file.
    """
    return parse_policies(read_sources(directory))
