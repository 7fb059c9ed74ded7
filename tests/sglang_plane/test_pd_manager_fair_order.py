"""Tenants that compete for one of SGLang's transfer workers; see `pd_rig`."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.effect import Half
from controld.contract.effect import Path as EffectPath
from controld.contract.fair_queue import Tenancy
from dataplanes.sglang.pd import page_sizes
from tests.sglang_plane.pd_rig import LOSSLESS, PAGE_TOKENS, TOKEN_BYTES, TWO_TENANTS, Rig, coded, wait_until

pytestmark = pytest.mark.slow  # importing SGLang takes most of it


def contended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, classes: Sequence[str], *, pages_each: int = 10, **how: Any
) -> list[str]:
    """Queue one transfer of each class while the worker is held up by the first; the classes as they were finished."""
    holding, gate, write = threading.Event(), threading.Event(), rig.prefill.engine.batch_transfer_sync

    def held_up(*args: Any) -> int:
        holding.set()
        gate.wait()
        return int(write(*args))

    monkeypatch.setattr(rig.prefill.engine, "batch_transfer_sync", held_up)
    statuses: list[bool] = []

    def send(pages: Sequence[int], name: str) -> None:
        target, tokens = [page + 100 for page in pages], len(pages) * PAGE_TOKENS
        statuses.append(rig.succeeded(pages, target, tokens, extra_key=f"class={name}", **how))

    threads: list[threading.Thread] = []
    try:
        for number, name in enumerate(classes):
            pages = range(pages_each * number, pages_each * (number + 1))
            threads.append(threading.Thread(target=send, args=(pages, name)))
            threads[-1].start()
            wait_until(lambda: len(rig.prefill.agent.backlog) >= len(threads), "the transfer is queued")
            wait_until(holding.is_set, "the worker is at the first one")
    finally:
        gate.set()
        for thread in threads:
            thread.join()
    assert statuses == [True] * len(classes)
    rig.effect(len(classes))
    sent = range(pages_each * len(classes))
    tokens = len(sent) * PAGE_TOKENS
    assert torch.equal(rig.got([page + 100 for page in sent], tokens), rig.sent(sent, tokens))
    return [effect.service_class for effect in rig.prefill.agent.effects if effect.half is Half.SENDER]


def test_a_greedy_tenant_does_not_keep_another_waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prefill.agent.shares = TWO_TENANTS
    order = contended(rig, monkeypatch, ["bulk"] * 6 + ["chat"] * 2)
    assert order[0] == "bulk"
    assert order[1:5].count("chat") == 2, order
    assert "pd.fair_order_given_up" not in rig.prefill.agent.counts


def test_without_tenants_the_order_of_arrival_stays(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert contended(rig, monkeypatch, ["bulk"] * 4 + ["chat"] * 2) == ["bulk"] * 4 + ["chat"] * 2


def test_chunks_of_tenants_that_compete_arrive_whole(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prefill.agent.shares = TWO_TENANTS
    coded(rig, LOSSLESS)
    contended(rig, monkeypatch, ["bulk", "bulk", "chat", "bulk", "chat"], chunk_pages=3)
    assert {effect.path for effect in rig.prefill.agent.effects} == {EffectPath.CODED}


@pytest.mark.parametrize("configuration", [None, LOSSLESS])
def test_large_transfers_let_others_through_and_arrive_whole(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, configuration: Configuration | None
) -> None:
    monkeypatch.setattr(page_sizes, "PART_BYTES", 1)
    rig.prefill.agent.shares = TWO_TENANTS
    if configuration is not None:
        coded(rig, configuration)
    order = contended(rig, monkeypatch, ["bulk", "bulk", "chat"], pages_each=33)
    assert order == ["chat", "bulk", "bulk"] or order == ["bulk", "chat", "bulk"]
    effects = [effect for effect in rig.prefill.agent.effects if effect.half is Half.SENDER]
    assert all(effect.chunks >= 3 and effect.wait_s > 0 for effect in effects if effect.service_class == "chat")
    assert {effect.raw_bytes for effect in effects} == {33 * PAGE_TOKENS * TOKEN_BYTES}


def test_a_fault_of_ours_leaves_the_order_of_arrival(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.prefill.agent.shares = Tenancy({"greedy": 1.0, "modest": 0.0}, TWO_TENANTS.tenant_of_class)
    assert contended(rig, monkeypatch, ["bulk"] * 3 + ["chat"] * 2) == ["bulk"] * 3 + ["chat"] * 2
    assert rig.prefill.agent.counts["pd.fair_order_given_up"] >= 1


def test_an_arm_is_drawn_for_all_parts_of_an_unknown_request(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_sizes, "PART_BYTES", 1)
    monkeypatch.setattr(rig.prefill.manager.controld_plane.requests, "note", lambda *_: None)
    rig.prefill.agent.shares = TWO_TENANTS
    assert rig.succeeded(range(40), range(100, 140), 40 * PAGE_TOKENS)
    effect = rig.effect()
    assert effect.chunks == 3, "it came in parts"
    (draw,) = rig.prefill.agent.draws
    assert draw["raw_bytes"] == effect.expected_bytes == effect.raw_bytes == 40 * PAGE_TOKENS * TOKEN_BYTES
    assert rig.prefill.agent.counts["pd.request_unknown"] == 1
