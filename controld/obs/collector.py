"""Counts that other parts keep, read when somebody scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


@dataclass(frozen=True, slots=True)
class AgentLabel:
    """What agents are counted by; `state` is attached, degraded or not_attached."""

    kind: str
    role: str
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSample:
    """What is told of one tenant; both labels are names in policies.

    Args:
        slowdown: of recent transfers; None: there were none.
    """

    deployment: str
    tenant: str
    raw_bytes: int
    wire_bytes: int
    slowdown: float | None


class TenantCollector(Collector):
    """Tenants of the policies in force.

    Args:
        tenants: one sample each.
        jain_indices: by deployment, where there is one.
    """

    def __init__(
        self, tenants: Callable[[], Iterable[TenantSample]], jain_indices: Callable[[], Mapping[str, float]]
    ) -> None:
        self._tenants = tenants
        self._jain_indices = jain_indices

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read parts that are still being put together."""
        return []

    def collect(self) -> Iterator[Metric]:
        labels = ["deployment", "tenant"]
        raw = CounterMetricFamily("controld_tenant_raw_bytes", "A tenant's KV bytes before coding", labels=labels)
        wire = CounterMetricFamily("controld_tenant_wire_bytes", "A tenant's bytes on the link", labels=labels)
        slowdown = GaugeMetricFamily("controld_tenant_slowdown", "Time over the time alone", labels=labels)
        for sample in self._tenants():
            values = [sample.deployment, sample.tenant]
            raw.add_metric(values, sample.raw_bytes)
            wire.add_metric(values, sample.wire_bytes)
            if sample.slowdown is not None:
                slowdown.add_metric(values, sample.slowdown)
        jain = GaugeMetricFamily("controld_tenant_jain_index", "Jain's index of slowdown", labels=["deployment"])
        for deployment, value in sorted(self._jain_indices().items()):
            jain.add_metric([deployment], value)
        yield from (raw, wire, slowdown, jain)


class PartsCollector(Collector):
    """Agents, the fleet's own counters, reloads, and what the quality guard made of measured errors and losses.

    Args:
        agents: one label for each connected agent.
        fleet_counts: what streams brought and were refused, by (name, field or code).
        reload_counts: by outcome.
        guard_looks: by what was made of them.
    """

    def __init__(
        self,
        agents: Callable[[], Iterable[AgentLabel]],
        fleet_counts: Callable[[], Mapping[tuple[str, str], int]],
        reload_counts: Callable[[], Mapping[str, int]],
        guard_looks: Callable[[], Mapping[str, int]],
    ) -> None:
        self._agents = agents
        self._fleet_counts = fleet_counts
        self._reload_counts = reload_counts
        self._guard_looks = guard_looks

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read parts that are still being put together."""
        return []

    def collect(self) -> Iterator[Metric]:
        agents = GaugeMetricFamily("controld_agents", "Connected agents", labels=["kind", "role", "state"])
        for label, number in sorted(Counter(self._agents()).items(), key=lambda item: str(item[0])):
            agents.add_metric([label.kind, label.role, label.state], number)
        yield agents
        fleet = CounterMetricFamily("controld_fleet", "What agents' streams brought", labels=["name", "label"])
        for (name, label_text), number in sorted(self._fleet_counts().items()):
            fleet.add_metric([name, label_text], number)
        yield fleet
        reloads = CounterMetricFamily("controld_reloads", "Reloads of the policies", labels=["outcome"])
        for outcome, number in sorted(self._reload_counts().items()):
            reloads.add_metric([outcome], number)
        yield reloads
        looks = CounterMetricFamily("controld_guard_looks", "What was made of errors and losses", labels=["outcome"])
        for outcome, number in sorted(self._guard_looks().items()):
            looks.add_metric([outcome], number)
        yield looks
