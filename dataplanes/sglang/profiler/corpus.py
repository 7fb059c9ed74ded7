"""Texts to measure on, by workload: what is measured is never what anything was calibrated on.

Every corpus is cut into documents, and documents go to the held-out, the calibration or the served part by a hash of
their text: the split survives reordering, and equal documents under two names never land on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from controld.contract.errors import ControldError

DEFAULT_WORKLOAD = "general"
_SUFFIXES = (".txt", ".md", ".jsonl")


class CorpusError(ControldError):
    """A workload has no usable texts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkedExample:
    """A question with its answer."""

    question: str
    answer: str

    @property
    def text(self) -> str:
        """As a document."""
        return f"Question: {self.question}\nAnswer: {self.answer}"


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents of one workload.

    Args:
        name: where they come from.
        held_out: for measuring profiles.
        calibration: for anything fitted.
        served: for requests of an experiment, which must be news to both.
        examples: the held-out documents in their order, where all documents are worked examples; else none.
    """

    name: str
    held_out: tuple[str, ...]
    calibration: tuple[str, ...]
    served: tuple[str, ...]
    examples: tuple[WorkedExample, ...] = ()

    @property
    def label(self) -> str:
        """Name and hash of the held-out texts: two measurements with equal labels saw equal texts."""
        return _label(self.name, self.held_out)

    @property
    def calibration_label(self) -> str:
        """The same of the calibration texts."""
        return _label(self.name, self.calibration)


def split_corpus(name: str, documents: Iterable[str]) -> Corpus:
    """Drop empty and repeated documents; half are held out, three eighths are for calibration, the rest is served.

    Each part is in the order of its hashes, a fixed shuffle: its first few segments are a fair sample of the whole.
    """
    by_digest = {hashlib.sha256(text.encode()).digest(): text for text in map(str.strip, documents) if text}
    ordered = sorted(by_digest.items())
    held_out, calibration, served = (
        tuple(text for digest, text in ordered if digest[-1] % 8 in share) for share in ((1, 3, 5, 7), (0, 2, 6), (4,))
    )
    return Corpus(name, held_out, calibration, served)


def python_manual() -> Corpus:
    """The language reference that ships with every CPython, as `help()` shows it."""
    from pydoc_data.topics import topics

    return split_corpus("python-manual", (topics[name] for name in sorted(topics)))


def python_sources() -> Corpus:
    """The modules of Python's own library: code, another kind of text than its manual."""
    import sysconfig

    folder = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_")]
    return split_corpus("python-sources", (path.read_text(errors="replace") for path in paths))


def read_corpus(path: Path) -> Corpus:
    """Texts of a file, or of every file in a folder.

    `.txt` and `.md`: one document a file. `.jsonl`: one a line, an object with `text`, or `question` and `answer`.
    Where every document is a question with its answer, the corpus keeps them as examples too.

    Raises:
        CorpusError: nothing readable, or a line that is none of these.
    """
    files = sorted(p for p in path.rglob("*") if p.suffix in _SUFFIXES) if path.is_dir() else [path]
    documents: list[str | WorkedExample] = []
    for file in files:
        if file.suffix == ".jsonl":
            documents.extend(_read_rows(file))
        else:
            documents.append(file.read_text())
    examples = {one.text.strip(): one for one in documents if isinstance(one, WorkedExample)}
    corpus = split_corpus(path.stem, (one.text if isinstance(one, WorkedExample) else one for one in documents))
    if all(text in examples for text in (*corpus.held_out, *corpus.calibration, *corpus.served)):
        corpus = replace(corpus, examples=tuple(examples[text] for text in corpus.held_out))
    if not corpus.held_out:
        raise CorpusError(f"{path} holds no texts", code="corpus.empty", hint=f"files of {_SUFFIXES}")
    return corpus


def corpus_for(workload: str, texts_dir: Path | None) -> Corpus:
    """Texts of a workload: `DIR/<workload>.jsonl|.txt|.md`, or the folder `DIR/<workload>/`.

    Only the workload "general" has a default, the Python manual: a quality measured on other texts than the
    workload's own would be a claim about the wrong thing.

    Raises:
        CorpusError: there are no such texts.
    """
    if texts_dir is not None:
        for path in (texts_dir / workload, *(texts_dir / f"{workload}{suffix}" for suffix in _SUFFIXES)):
            if path.exists():
                return read_corpus(path)
    if workload == DEFAULT_WORKLOAD:
        return python_manual()
    raise CorpusError(
        f"no texts for the workload {workload!r}",
        code="corpus.unknown_workload",
        hint=f"start the profiler with --texts DIR and put {workload}.jsonl or {workload}.txt there",
    )


def _label(name: str, texts: Iterable[str]) -> str:
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    return f"{name}#{digest}"


def _read_rows(file: Path) -> Iterable[str | WorkedExample]:
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            yield _row(json.loads(line))
        except (ValueError, TypeError, KeyError) as error:
            raise CorpusError(
                f"{file}:{number}: not a text: {error!r}",
                code="corpus.malformed",
                hint="an object with text, or with question and answer",
            ) from error


def _row(row: Any) -> str | WorkedExample:
    """Raises: ValueError, TypeError, KeyError: neither a text nor a worked example."""
    if "text" in row:
        return str(row["text"])
    for name in ("question", "answer"):
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{name} is not a text that says something")
    return WorkedExample(question=row["question"], answer=row["answer"])
