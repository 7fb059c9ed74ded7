"""Held-out texts are never calibration or served texts, and a workload is measured on its own texts only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplanes.sglang.profiler.corpus import CorpusError, corpus_for, python_manual, read_corpus, split_corpus


@given(st.lists(st.text(max_size=30), max_size=40))
def test_the_split_loses_nothing_repeats_nothing_and_ignores_order(documents: list[str]) -> None:
    corpus = split_corpus("x", documents)
    together = [*corpus.held_out, *corpus.calibration, *corpus.served]
    assert sorted(together) == sorted({text.strip() for text in documents} - {""})
    assert split_corpus("x", reversed(documents)) == corpus


def test_the_manual_is_enough_for_many_segments_of_every_part() -> None:
    """Parts are of whole documents, so that their sizes differ between releases of Python: 57,000 to 120,000 served."""
    corpus = python_manual()
    assert sum(map(len, corpus.held_out)) > 200_000
    assert sum(map(len, corpus.calibration)) > 80_000
    assert sum(map(len, corpus.served)) > 40_000
    assert corpus.label.startswith("python-manual#")


def test_the_label_follows_the_held_out_texts() -> None:
    a, b = split_corpus("x", ["one", "two", "three", "four"]), split_corpus("x", ["one", "two", "three", "five!"])
    assert a.held_out != b.held_out
    assert a.label != b.label


def test_rows_of_both_shapes_are_read(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}"} for n in range(20)] + [{"question": f"q{n}", "answer": f"a{n}"} for n in range(20)]
    path = tmp_path / "maths.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    corpus = read_corpus(path)
    assert len(corpus.held_out) + len(corpus.calibration) + len(corpus.served) == 40
    assert any(text.startswith("Question: q") for text in corpus.held_out)
    assert corpus.examples == ()
    assert corpus_for("maths", tmp_path) == corpus


def test_a_corpus_of_questions_with_answers_keeps_them_apart(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": f"a{n}\n"} for n in range(20)]
    path = tmp_path / "maths.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in (*rows, rows[3])))
    corpus = read_corpus(path)
    assert corpus.held_out == tuple(example.text.strip() for example in corpus.examples)
    assert {(example.question, example.answer) for example in corpus.examples} < {
        (row["question"], row["answer"]) for row in rows
    }
    texts = [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]
    assert corpus.label == split_corpus("maths", texts).label


@pytest.mark.parametrize(
    "row", [{"question": "q"}, {"question": "q", "answer": " "}, {"question": 1, "answer": "a"}, []]
)
def test_half_an_example_is_none(tmp_path: Path, row: object) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps({"question": "q", "answer": "a"}) + "\n" + json.dumps(row))
    with pytest.raises(CorpusError, match=r"bad\.jsonl:2"):
        read_corpus(path)


def test_a_malformed_row_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"txt": "bad"}\n')
    with pytest.raises(CorpusError, match=r"bad\.jsonl:2"):
        read_corpus(path)


def test_only_the_general_workload_has_texts_of_its_own(tmp_path: Path) -> None:
    assert corpus_for("general", tmp_path) == python_manual()
    with pytest.raises(CorpusError) as missing:
        corpus_for("dialogue", tmp_path)
    assert missing.value.code == "corpus.unknown_workload"
    assert "dialogue.jsonl" in missing.value.hint


def test_a_folder_of_texts_is_one_corpus(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.md").write_text(f"document {number}")
    (folder / "ignored.bin").write_bytes(b"\xff\xfe")
    corpus = corpus_for("code", tmp_path)
    assert len(corpus.held_out) + len(corpus.calibration) + len(corpus.served) == 12
