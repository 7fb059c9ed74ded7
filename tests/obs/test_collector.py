"""Metrics are read from the parts that keep the counts, when somebody scrapes."""

from __future__ import annotations

from controld.contract.effect import Effect, Half, Path, Verdict
from controld.obs.collector import AgentLabel, PartsCollector, TenantCollector, TenantSample
from controld.obs.metrics import OTHER_CLASS, Metrics


def effect(service_class: str) -> Effect:
    return Effect(
        transfer_id="t", half=Half.SENDER, arm_id="raw", table_version=1, service_class=service_class, tier="pd",
        link_group="default", tokens=1, chunks=1, raw_bytes=10, wire_bytes=5, encode_s=0.0, wire_s=0.1, decode_s=0.0,
        wait_s=0.0, total_s=0.1, path=Path.RAW, verdict=Verdict.UNVERIFIED,
    )  # fmt: skip


def test_a_scrape_shows_the_counts_of_that_moment() -> None:
    metrics = Metrics()
    agents = [AgentLabel("sglang", "prefill", "attached")]
    reloads = {"accepted": 1}
    metrics.registry.register(
        PartsCollector(lambda: agents, lambda: {("streams", ""): 3}, lambda: reloads, lambda: {"breach": 2})
    )
    agents.append(AgentLabel("sglang", "prefill", "attached"))
    reloads["refused"] = 2
    shown = metrics.exposition().decode()
    assert 'controld_agents{kind="sglang",role="prefill",state="attached"} 2.0' in shown
    assert 'controld_fleet_total{label="",name="streams"} 3.0' in shown
    assert 'controld_reloads_total{outcome="refused"} 2.0' in shown


def test_classes_that_no_policy_names_share_one_label() -> None:
    metrics = Metrics()
    for number in range(50):
        metrics.count_effect(effect(f"class-{number}"), {"class-7"})
    lines = [line for line in metrics.exposition().decode().splitlines() if line.startswith("controld_effects_total")]
    assert len(lines) == 2
    assert any(f'service_class="{OTHER_CLASS}"' in line and line.endswith(" 49.0") for line in lines)


def test_tenants_show_their_bytes_and_a_slowdown_only_once_there_is_one() -> None:
    metrics = Metrics()
    samples = [
        TenantSample(deployment="chat", tenant="acme", raw_bytes=10, wire_bytes=5, slowdown=1.5),
        TenantSample(deployment="chat", tenant="idle", raw_bytes=0, wire_bytes=0, slowdown=None),
    ]
    metrics.registry.register(TenantCollector(lambda: samples, lambda: {"chat": 0.9}))
    shown = metrics.exposition().decode()
    assert 'controld_tenant_wire_bytes_total{deployment="chat",tenant="acme"} 5.0' in shown
    assert 'controld_tenant_slowdown{deployment="chat",tenant="acme"} 1.5' in shown
    assert 'controld_tenant_slowdown{deployment="chat",tenant="idle"}' not in shown
    assert 'controld_tenant_jain_index{deployment="chat"} 0.9' in shown
