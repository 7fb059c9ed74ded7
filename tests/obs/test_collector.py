"""Metrics are read from the parts that keep the counts, when somebody scrapes."""

from __future__ import annotations

from controld.contract.effect import Effect, Half, Path, Verdict
from controld.obs.collector import AgentLabel, PartsCollector
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
    metrics.registry.register(PartsCollector(lambda: agents, lambda: {("streams", ""): 3}, lambda: reloads))
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
