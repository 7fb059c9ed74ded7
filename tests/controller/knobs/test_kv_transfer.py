from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controld.controller.knobs.base import STAGES, Context, Knob, Stage, StageModels
from controld.controller.knobs.kv_transfer import KvTransfer

KNOB = KvTransfer(chunk_bytes=4e6, rtt_s=1e-3)


def models(**columns: list[float]) -> StageModels:
    values = {
        "encode_a_s": [2e-3, 1e-3],
        "encode_b_s_per_byte": [0.0, 2e-9],
        "decode_a_s": [0.0, 2e-3],
        "decode_b_s_per_byte": [0.0, 1e-9],
        "wire_share": [1.0, 0.25],
    }
    arrays = {name: np.array(column) for name, column in {**values, **columns}.items()}
    return StageModels(framed=np.array([False] + [True] * (len(arrays["wire_share"]) - 1)), **arrays)


def context(size: float, bandwidth: float, load: float = 0.0) -> Context:
    return Context(sizes_bytes=np.array([size]), bandwidths_bytes_per_s=np.array([bandwidth]), loads=np.array([load]))


def ones(m: StageModels) -> np.ndarray:
    return np.ones((len(m), len(STAGES)))


def test_the_pipeline_formula() -> None:
    m = models()
    prediction = KNOB.predict(m, ones(m), context(16e6, 1e7))
    raw, coded = prediction.service_s[:, 0, 0, 0]
    assert raw == pytest.approx(1e-3 + 2e-3 + 1.6)
    encode, wire, decode = 1e-3 / 4 + 2e-9 * 4e6, 4e6 * 0.25 / 1e7, 2e-3 / 4 + 1e-9 * 4e6
    assert coded == pytest.approx(1e-3 + encode + wire + decode + 3 * wire)
    assert prediction.encode_s[1, 0, 0, 0] == pytest.approx(4 * encode)
    assert prediction.decode_s[1, 0, 0, 0] == pytest.approx(4 * decode)


def test_the_slowest_stage_paces_the_pipeline() -> None:
    m = models(encode_b_s_per_byte=[0.0, 1e-7])
    prediction = KNOB.predict(m, ones(m), context(16e6, 1e9))
    one_chunk = 0.4
    assert prediction.service_s[1, 0, 0, 0] == pytest.approx(4 * one_chunk, rel=0.02)


def test_corrections_multiply_their_stage_and_raw_takes_the_wires() -> None:
    m = models()
    factors = ones(m)
    factors[:, STAGES.index(Stage.WIRE)] = 2.0
    factors[1, STAGES.index(Stage.ENCODE)] = 3.0
    factors[1, STAGES.index(Stage.BYTES)] = 1.5
    plain, corrected = (KNOB.predict(m, f, context(16e6, 1e7)) for f in (ones(m), factors))
    ratio = {name: (getattr(corrected, name) / getattr(plain, name))[:, 0, 0, 0] for name in ("encode_s", "wire_s")}
    assert ratio["encode_s"] == pytest.approx([2.0, 3.0])
    assert ratio["wire_s"] == pytest.approx([2.0, 3.0])


def test_waiting_is_that_of_a_regular_server() -> None:
    m = models(encode_a_s=[0.0, 0.0], decode_a_s=[0.0, 0.0])
    knob = KvTransfer(chunk_bytes=4e6, rtt_s=0.0)
    prediction = knob.predict(m, ones(m), context(16e6, 1e7, load=0.5))
    assert prediction.rho[0, 0, 0, 0] == pytest.approx(0.5)
    assert prediction.wait_s[0, 0, 0, 0] == pytest.approx(0.5 / (2 * 0.5) * 1.6)
    assert prediction.rho[1, 0, 0, 0] < 0.2


def test_waiting_is_that_of_the_busiest_server() -> None:
    m = models()
    shared = KvTransfer(chunk_bytes=4e6, exclusive_connection=False)
    prediction = shared.predict(m, ones(m), context(16e6, 1e7, load=2.0))
    wire, rho = 0.4, 0.5
    assert prediction.rho[1, 0, 0, 0] == pytest.approx(rho)
    assert prediction.wait_s[1, 0, 0, 0] == pytest.approx(wire * rho / (2 * (1 - rho)))
    idle = shared.predict(m, ones(m), context(16e6, 1e7, load=0.0))
    assert idle.wait_s == pytest.approx(0.0)


def test_a_full_server_waits_for_ever() -> None:
    m = models()
    prediction = KNOB.predict(m, ones(m), context(16e6, 1e7, load=1.2))
    assert prediction.rho[0, 0, 0, 0] > 1
    assert np.isinf(prediction.total_s[0, 0, 0, 0])
    assert np.isfinite(prediction.total_s[1, 0, 0, 0])


def test_other_classes_work_counts_and_a_smaller_share_offers_less() -> None:
    m = models()
    other = np.full((len(KNOB.work_stages), 1, 1, 1, 1), 0.4)
    alone = KNOB.predict(m, ones(m), context(16e6, 1e7, load=0.5), share=0.5)
    together = KNOB.predict(m, ones(m), context(16e6, 1e7, load=0.5), share=0.5, other_work=other)
    assert together.rho == pytest.approx(alone.rho + 0.4)
    assert (together.wait_s > alone.wait_s).all()


@given(size=st.floats(1e3, 1e9), slow=st.floats(1e5, 1e10), faster=st.floats(1.0, 1e3), load=st.floats(0, 0.9))
def test_a_faster_link_is_never_slower_and_the_shape_is_the_contexts(
    size: float, slow: float, faster: float, load: float
) -> None:
    m = models()
    where = Context(
        sizes_bytes=np.array([size, 2 * size]),
        bandwidths_bytes_per_s=np.array([slow, slow * faster]),
        loads=np.array([0.0, load, 0.95]),
    )
    prediction = KNOB.predict(m, ones(m), where)
    assert prediction.total_s.shape == (2, 2, 2, 3)
    assert (prediction.service_s[:, :, 1] <= prediction.service_s[:, :, 0] * (1 + 1e-12)).all()
    assert (prediction.wait_s >= 0).all()


def test_what_an_effect_should_have_shown() -> None:
    m = models()
    assert KNOB.stage_seconds(m, 1, raw_bytes=16e6, wire_bytes=5e6, bandwidth=1e7) == pytest.approx(
        {Stage.ENCODE: 1e-3 + 0.032, Stage.BYTES: 4e6, Stage.DECODE: 2e-3 + 0.016, Stage.WIRE: 0.5}
    )
    assert KNOB.stage_seconds(m, 0, raw_bytes=16e6, wire_bytes=16e6, bandwidth=1e7) == pytest.approx(
        {Stage.WIRE: 2e-3 + 1.6}
    )
    assert KNOB.stage_seconds(m, 0, raw_bytes=16e6, wire_bytes=16e6, bandwidth=0.0) == {}
    assert Stage.WIRE not in KNOB.stage_seconds(m, 1, raw_bytes=16e6, wire_bytes=5e6, bandwidth=0.0)


def test_it_is_a_knob() -> None:
    knob: Knob = KNOB
    assert knob.name == "kv_transfer"
    assert KvTransfer(**KNOB.to_document()) == KNOB
