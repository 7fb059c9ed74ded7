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


class PartsCollector(Collector):
    """Agents, the fleet's own counters, and reloads.

    Args:
        agents: one label for each connected agent.
        fleet_counts: what streams brought and were refused, by (name, field or code).
        reload_counts: by outcome.
    """

    def __init__(
        self,
        agents: Callable[[], Iterable[AgentLabel]],
        fleet_counts: Callable[[], Mapping[tuple[str, str], int]],
        reload_counts: Callable[[], Mapping[str, int]],
    ) -> None:
        self._agents = agents
        self._fleet_counts = fleet_counts
        self._reload_counts = reload_counts

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
