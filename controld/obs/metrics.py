"""Metrics of the daemon. Labels are bounded: classes, arms in the tables and enumerated reasons, never ids."""

from __future__ import annotations

from collections.abc import Container

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from controld.contract.effect import Effect, Half

OTHER_CLASS = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """One registry per daemon, so that tests and embedders never share counters."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.policy_generation = Gauge("controld_policy_generation", "Generation in force", registry=registry)
        self.published_version = Gauge("controld_published_version", "Newest snapshot version", registry=registry)
        self.plans = Counter("controld_plans", "Plans made", ["outcome"], registry=registry)
        self.plan_seconds = Histogram(
            "controld_plan_seconds",
            "Time to make one plan",
            registry=registry,
            buckets=(0.005, 0.02, 0.05, 0.1, 0.3, 1, 3),
        )
        self.effects = Counter(
            "controld_effects", "Committed effects", ["half", "service_class", "path", "verdict"],
            registry=registry,
        )  # fmt: skip
        self.raw_bytes = Counter("controld_transfer_raw_bytes", "KV bytes before coding", ["path"], registry=registry)
        self.wire_bytes = Counter(
            "controld_transfer_wire_bytes", "Bytes that crossed the link", ["path"], registry=registry
        )
        self.feedback = Counter("controld_feedback", "What was made of effects", ["outcome"], registry=registry)
        self.arms_out = Gauge(
            "controld_arms_out_of_use", "Arms and classes that a pin keeps apart", ["kind", "deployment"],
            registry=registry,
        )  # fmt: skip
        self.self_checks = Counter(
            "controld_self_checks", "Transfers of which the sender decoded a frame itself", ["service_class"],
            registry=registry,
        )  # fmt: skip
        self.video_chunks = Counter("controld_video_chunks", "Chunks of video engines", ["outcome"], registry=registry)
        self.video_settings = Counter(
            "controld_video_settings", "Answers of video engines to settings", ["outcome"], registry=registry
        )
        self.probes = Counter(
            "controld_guard_probes", "Arms that a profiling worker measured again", ["outcome"], registry=registry
        )
        self.internal_errors = Counter(
            "controld_internal_errors", "Errors caught at a process edge", ["where"], registry=registry
        )

    def count_effect(self, effect: Effect, known_classes: Container[str]) -> None:
        """Count one committed effect; bytes only once a transfer, from the sender's half.

        Args:
            known_classes: those of the policies; any other counts as `other`, for agents' texts are without end.
        """
        service_class = effect.service_class if effect.service_class in known_classes else OTHER_CLASS
        self.effects.labels(effect.half.value, service_class, effect.path.value, effect.verdict.value).inc()
        if effect.reconstruction_error is not None:
            self.self_checks.labels(service_class).inc()
        if effect.half is Half.SENDER:
            self.raw_bytes.labels(effect.path.value).inc(effect.raw_bytes)
            self.wire_bytes.labels(effect.path.value).inc(effect.wire_bytes)

    def exposition(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)
