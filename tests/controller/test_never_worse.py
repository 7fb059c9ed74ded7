"""The short way to see who is slower than raw finds what predicting everything finds."""

from __future__ import annotations

import numpy as np
import pytest

from controld.controller.grid import Grid
from controld.controller.knobs.base import Array, Knob, StageModels, busiest_servers, queue
from controld.controller.knobs.kv_load import KvLoad
from controld.controller.knobs.kv_transfer import KvTransfer
from controld.controller.never_worse import RAW_ROW, _predicted, not_slower_at_corners

GRID = Grid(
    size_edges_bytes=(1e6, 4e6, 64e6),
    bandwidth_edges_bytes_per_s=(1e6, 1e7, 3e7, 1e8, 3e8, 1e9, 1e10),
    load_edges=(0.2, 0.7, 1.0, 3.0),
)
ARMS = 6


def arms(draw: np.random.Generator) -> StageModels:
    """Raw, and arms of which some decode for as long as raw takes of the link."""
    wire_share = np.append(1.0, draw.uniform(0.1, 1.0, ARMS - 1))
    slow = draw.choice([0.2e-9, 3e-9, 30e-9], ARMS)
    return StageModels(
        encode_a_s=draw.uniform(0, 2e-3, ARMS), encode_b_s_per_byte=np.append(0.0, slow[1:]),
        decode_a_s=np.append(0.0, draw.uniform(0, 2e-3, ARMS - 1)), decode_b_s_per_byte=np.append(0.0, slow[:0:-1]),
        wire_share=wire_share, framed=np.arange(ARMS) > 0,
    )  # fmt: skip


def other_work(draw: np.random.Generator, knob: Knob) -> Array:
    """Work of classes that were decided before: the connection has all of it, where it is a server."""
    work = draw.uniform(0, 0.4, (len(knob.work_stages), 1, *GRID.shape))
    work[-1] = work.sum(axis=0)
    return work


@pytest.mark.parametrize("knob", [KvTransfer(), KvTransfer(exclusive_connection=False), KvLoad()], ids=str)
@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_it_finds_what_predicting_everything_finds(knob: Knob, others: bool, seed: int) -> None:
    draw = np.random.default_rng(seed)
    models, factors = arms(draw), draw.uniform(0.5, 2.0, (ARMS, 4))
    work = other_work(draw, knob) if others else None
    found = not_slower_at_corners(knob, models, factors, GRID.points, share=0.4, other_work=work)
    wanted = _predicted(knob, models, factors, GRID.points, 0.4, work)
    assert np.array_equal(np.broadcast_to(found, wanted.shape), wanted)
    assert wanted[RAW_ROW].all()
    assert 0 < wanted[1:].mean() < 1, "a case in which all or none are slower would show nothing"


def test_where_a_connection_carries_one_at_a_time_load_is_not_looked_at() -> None:
    draw = np.random.default_rng(0)
    models = arms(draw)
    found = not_slower_at_corners(KvTransfer(), models, np.ones((ARMS, 4)), GRID.points, share=1.0, other_work=None)
    assert found.shape == (ARMS, *GRID.shape[:2], 1)


def test_a_server_that_another_one_covers_changes_no_wait() -> None:
    draw = np.random.default_rng(1)
    knob = KvTransfer()
    rest = knob.at_rest(arms(draw), np.ones((ARMS, 4)), GRID.points.middle)
    work = other_work(draw, knob)
    assert busiest_servers(rest.server_s, work) == [3]
    per_s = GRID.points.load[None, None, None, :] * np.ones((1, *GRID.shape))
    rho, wait = queue(rest.server_s, per_s, 0.5, work)
    offered = 0.5 * per_s
    assert np.array_equal(rho, np.max([offered * s + o for s, o in zip(rest.server_s, work, strict=True)], axis=0))
    assert np.array_equal(np.isinf(wait), rho >= 1.0)
    # Where others keep the link busier than the connection, that is looked at, too.
    work[1] += 1.0
    assert busiest_servers(rest.server_s, work) == [1, 3]
