"""Which parts the daemon is made of: the one place where they are put together."""

from __future__ import annotations

import asyncio
import json
import logging

from controld import __version__
from controld.admin.daemon_backend import build_backend
from controld.admin.server import AdminAddress, AdminServer
from controld.config import Config
from controld.contract.clock import Clock, SystemClock
from controld.contract.telemetry import Telemetry
from controld.contract.trial import TrialOutcome
from controld.contract.video import Applied, ChunkReport
from controld.daemon import Daemon
from controld.fleet.server import FleetServer, FleetSettings
from controld.fleet.session import AgentSession
from controld.obs.collector import AgentLabel, PartsCollector, TenantCollector, TenantSample
from controld.obs.metrics import Metrics
from controld.planning.artefacts import ArtefactFolder
from controld.planning.planner import Planner
from controld.planning.probing import PROBE_STUDY, Prober
from controld.planning.video_planner import VideoPlanner
from controld.policy.last_good import LastGoodFile
from controld.policy.model import PolicySet
from controld.policy.source import PolicySource
from controld.profiling.service import StudyService
from controld.store.errors import StoreError
from controld.store.records import AuditEvent, EffectRecord
from controld.store.sqlite import SqliteStore
from controld.systemd import Notifier

_log = logging.getLogger(__name__)

_PARTS = 6


class Core:
    """Everything that needs the store, as one component: it opens first and closes last.

    Args:
        config, policies, metrics, clock: as everywhere.

    Attributes:
        daemon: whose part this is; set before `start`.
    """

    def __init__(self, config: Config, policies: PolicySource, metrics: Metrics, clock: Clock) -> None:
        self._config = config
        self._policies = policies
        self._metrics = metrics
        self._clock = clock
        self.daemon: Daemon | None = None
        self._stack: list[SqliteStore | FleetServer | Planner | VideoPlanner | StudyService | Prober | AdminServer] = []

    async def start(self) -> None:
        """Open the store, learn where the last process stopped, then let agents and people in.

        Raises:
            StoreError: the state directory is another daemon's, or cannot be written.
            FleetError, OSError: an address is taken.
        """
        config, metrics, clock = self._config, self._metrics, self._clock
        store = await SqliteStore.open(config.state_dir, clock=clock)
        self._stack.append(store)
        self._store = store
        await self._note(AuditEvent.DAEMON_STARTED, version=__version__)
        fleet = FleetServer(
            store,
            settings=FleetSettings(lease_ttl_s=config.fleet.lease_s, lease_interval_s=config.fleet.renew_interval_s),
            clock=clock,
            on_effects=self._on_effects,
            on_telemetry=self._on_telemetry,
            on_trial_result=self._on_trial_result,
            on_session=self._on_session,
            on_applied=self._on_applied,
            on_chunks=self._on_chunks,
        )
        self.planner = Planner(
            lambda: self._policies.current,
            store,
            fleet,
            metrics,
            clock,
            interval_s=config.plan_interval_s,
            artefacts=ArtefactFolder(config.artefacts_dir),
        )
        self.video = VideoPlanner(
            lambda: self._policies.current, store, fleet, metrics, clock, interval_s=config.plan_interval_s
        )
        self.fleet = fleet
        metrics.registry.register(
            PartsCollector(
                self._agent_labels, fleet.tally.labelled, self._reload_counts, lambda: self.planner.guard_looks()
            )
        )
        metrics.registry.register(TenantCollector(self._tenant_samples, self._jain_indices))
        self.studies = StudyService(store, fleet, clock, on_profiles=self._profiles_changed)
        self.prober = Prober(lambda: self._policies.current, self.planner, self.studies.trials, fleet, metrics, clock)
        await self.planner.restore()
        await self.video.restore()
        self._policies.subscribe(self._on_policies)
        self._on_policies(self._policies.current)
        await fleet.start([str(address) for address in config.fleet.listen])
        self._stack.append(fleet)
        await self.studies.start()
        self._stack.append(self.studies)
        await self.planner.start()
        self._stack.append(self.planner)
        await self.video.start()
        self._stack.append(self.video)
        await self.prober.start()
        self._stack.append(self.prober)
        daemon = self.daemon
        assert daemon is not None  # set by build_daemon
        backend = build_backend(
            daemon, self._policies, store, fleet, self.planner, self.video, self.studies, clock,
            on_profiles=self._profiles_changed,
        )  # fmt: skip
        addresses = [AdminAddress(socket=config.admin.socket)]
        if config.admin.listen is not None:
            addresses.append(AdminAddress(host=config.admin.listen.host, port=config.admin.listen.port))
        admin = AdminServer(backend, metrics, tuple(addresses))
        await admin.start()
        self._stack.append(admin)

    async def stop(self) -> None:
        """The other way round; every part gets its turn whatever the one before it did."""
        failures: list[Exception] = []
        if self._stack:
            await self._note(AuditEvent.DAEMON_STOPPED)
        while self._stack:
            part = self._stack.pop()
            try:
                # No part may use up the time of those behind it: the store closes last.
                async with asyncio.timeout(self._config.stop_grace_s / _PARTS):
                    await (part.close() if isinstance(part, SqliteStore) else part.stop())
            except Exception as error:  # noqa: BLE001 - raised below, once everything is closed
                failures.append(error)
        if failures:
            raise ExceptionGroup("parts that failed to stop", failures)

    def _on_policies(self, policies: PolicySet) -> None:
        self._metrics.policy_generation.set(policies.generation)
        self.planner.wake()
        self.video.wake()
        details = {"generation": policies.generation, "policies": [policy.name for policy in policies.policies]}
        self.fleet.in_background(self._note(AuditEvent.POLICY_APPLIED, **details))

    async def _note(self, event: AuditEvent, **details: object) -> None:
        """The audit trail is for people: what it misses must not stop anything."""
        try:
            await self._store.audit.append(event, json.dumps(details, sort_keys=True))
        except StoreError as error:
            _log.error("audit event %s not kept: %s", event.value, error)
            self._metrics.internal_errors.labels("audit").inc()

    def _agent_labels(self) -> list[AgentLabel]:
        def state(session: AgentSession) -> str:
            return "degraded" if session.degraded else "attached" if session.attached else "not_attached"

        return [AgentLabel(s.identity.kind, s.identity.role, state(s)) for s in self.fleet.sessions()]

    def _tenant_samples(self) -> list[TenantSample]:
        return [
            TenantSample(
                deployment=report.selector.deployment,
                tenant=tenant.name,
                raw_bytes=tenant.raw_bytes,
                wire_bytes=tenant.wire_bytes,
                slowdown=tenant.slowdown,
            )
            for report in self.planner.tenants()
            for tenant in report.tenants
        ]

    def _jain_indices(self) -> dict[str, float]:
        reports = self.planner.tenants()
        return {r.selector.deployment: r.jain_index for r in reports if r.jain_index is not None}

    def _reload_counts(self) -> dict[str, int]:
        daemon = self.daemon
        if daemon is None:
            return {}
        accepted = daemon.reloads - daemon.refused_reloads
        return {"accepted": accepted, "refused": daemon.refused_reloads, "failed": daemon.failed_reloads}

    async def _on_effects(self, session: AgentSession, effects: tuple[EffectRecord, ...]) -> None:
        await self.planner.on_effects(session, effects)

    async def _on_telemetry(self, session: AgentSession, telemetry: Telemetry) -> None:
        await self.planner.on_telemetry(session, telemetry)
        await self.video.on_telemetry(session, telemetry)

    async def _on_applied(self, session: AgentSession, answer: Applied) -> None:
        await self.video.on_applied(session, answer)

    async def _on_chunks(self, session: AgentSession, reports: tuple[ChunkReport, ...]) -> None:
        await self.video.on_chunks(session, reports)

    def _profiles_changed(self) -> None:
        self.planner.profiles_changed()
        self.video.profiles_changed()

    async def _on_trial_result(self, session: AgentSession, outcome: TrialOutcome) -> None:
        part = self.prober if outcome.study_id == PROBE_STUDY else self.studies.trials
        await part.on_trial_result(session, outcome)

    async def _on_session(self, session: AgentSession) -> None:
        await self.planner.on_session(session)
        await self.video.on_session(session)
        await self.studies.trials.on_session(session)


def build_daemon(config: Config, notifier: Notifier) -> Daemon:
    """A daemon that is ready to run.

    Raises:
        PolicyErrors: the policies are refused and nothing good was kept.
    """
    clock = SystemClock()
    policies = PolicySource(config.policy.directory, LastGoodFile(config.state_dir / "last_good_policies.json"))
    policies.load_initial()
    core = Core(config, policies, Metrics(), clock)
    core.daemon = Daemon(config, policies, (core,), clock, notifier)
    return core.daemon
