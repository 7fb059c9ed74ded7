"""What the fit promises: prediction and transform earn their place, tables are near the entropy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplanes.kvcodec import ArtefactShelf, CodecError, KVCodec
from dataplanes.kvcodec.predictive.fit import FitSettings, fit_artefact, square_roots
from dataplanes.kvcodec.predictive.place import Place
from dataplanes.kvcodec.predictive.predictor import reduced_rank_regression
from dataplanes.kvcodec.predictive.tables import (
    CLASSES,
    PROBABILITY_TOTAL,
    TABLE_SYMBOLS,
    class_magnitude,
    frequency_tables,
    scale_class,
    symbol_places,
    table_sizes,
)


def _frame_bytes(bench, artefact) -> int:
    shelf = ArtefactShelf()
    shelf.add(artefact)
    configuration = type(bench)(artefact, shelf).configuration(0.2)
    return len(KVCodec(configuration, bench.layout(), artefacts=shelf).encode(bench.planes(120), first_token=0))


def test_prediction_saves_bytes(bench, calibration) -> None:
    alone = fit_artefact(calibration, FitSettings(depth=0, bottleneck=32))
    assert _frame_bytes(bench, bench.artefact) < 0.9 * _frame_bytes(bench, alone)


def test_the_stream_is_within_two_percent_of_its_entropy(bench) -> None:
    stage = KVCodec(bench.configuration(0.1), bench.layout(), artefacts=bench.artefacts)._stages[0]
    tokens = 2000
    planes = bench.planes(tokens + 4)[:, 4:]
    kernel = stage._kernel
    from dataplanes.kvcodec.native.predictive_kernels import JointPlanes

    layers = bench.artefact.layers
    symbols = kernel.quantise(JointPlanes(planes[:layers], planes[layers:], None), Place(4))
    coded = kernel.code(symbols, tokens, Place(4))
    assert np.array_equal(kernel.uncode(coded, tokens, Place(4)), symbols)
    # The best that any table per class could do, fitted on these very symbols.
    bits, at = 0.0, 0
    tally: dict[int, dict[int, int]] = {}
    for layer in range(layers):
        rank = int(bench.artefact.ranks[0, 2, layer])
        block = symbols[at : at + tokens * rank].reshape(tokens, rank)
        at += tokens * rank
        for column in range(rank):
            counts = tally.setdefault(int(bench.artefact.classes[0, 2, layer, column]), {})
            for value, count in zip(*np.unique(block[:, column], return_counts=True), strict=True):
                counts[int(value)] = counts.get(int(value), 0) + int(count)
    for counts in tally.values():
        shares = np.array(list(counts.values()), np.float64)
        bits += float(-(shares * np.log2(shares / shares.sum())).sum())
    assert coded.size * 8 < 1.02 * bits + 32 * 32


def test_too_little_text_is_refused(calibration) -> None:
    import dataclasses

    short = dataclasses.replace(calibration, joint=calibration.joint[:, :50], positions=calibration.positions[:50])
    with pytest.raises(CodecError, match="too few"):
        fit_artefact(short)


def test_full_rank_regression_is_plain_ridge() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = torch.randn(200, 12, generator=generator), torch.randn(200, 8, generator=generator)
    metric = torch.eye(8) + 0.3
    root, inverse = square_roots(metric)
    assert torch.allclose(root @ inverse, torch.eye(8), atol=1e-4)
    down, up = reduced_rank_regression(inputs, outputs, root, inverse, 8, 1e-6)
    plain = torch.linalg.lstsq(inputs, outputs).solution
    assert torch.allclose(down @ up, plain, atol=1e-3)
    narrow_down, narrow_up = reduced_rank_regression(inputs, outputs, root, inverse, 2, 1e-6)
    assert torch.linalg.matrix_rank(narrow_down @ narrow_up) == 2


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 10**6), min_size=TABLE_SYMBOLS, max_size=TABLE_SYMBOLS), st.integers(0, CLASSES - 1))
def test_tables_always_sum_and_can_code_everything(counts: list[int], index: int) -> None:
    tally = np.zeros((CLASSES, TABLE_SYMBOLS), np.int64)
    tally[index] = counts
    tables = frequency_tables(tally)
    assert (tables.sum(1) == PROBABILITY_TOTAL).all()
    assert (tables >= 0).all()
    for row, size in zip(tables, table_sizes(tables), strict=True):
        assert (row[:size] >= 1).all()
        assert not row[size:].any()
        assert size % 2 == 0  # zero, pairs of both signs, the escape


def test_classes_stand_for_their_magnitude() -> None:
    for index in range(4, CLASSES):
        assert int(scale_class(torch.tensor(class_magnitude(index)))) == index
    assert symbol_places(torch.tensor([0, 1, -1, 2, -2])).tolist() == [0, 1, 2, 3, 4]
