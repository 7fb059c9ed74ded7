"""The agent of a video engine: one setting in force for the engine, instead of an arm drawn for each transfer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from controld.contract.clock import Clock
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from controld.contract.telemetry import Telemetry
from controld.contract.video import Applied, ChunkReport, EngineSetting, EngineState, engine_setting_name
from dataplanes.agent.agent import Agent
from dataplanes.agent.engine_desk import EngineDesk
from dataplanes.agent.identity import AgentIdentity, AgentTiming
from dataplanes.agent.plain_text import plain_text


class VideoAgent(Agent):
    """An agent whose identity has the engine's facts and space.

    A setting outlives its lease and the daemon: an engine has to run under some setting, and the last one that was
    decided is better than any other. Telemetry says that the lease is over (`applied_version` 0).

    Args:
        identity: kind "longlive", role "engine", with `engine` and `space_json`.
        address, clock, timing, rng: as for `Agent`.
        initial: the configuration that the engine was started with.

    Raises:
        FieldError: the identity lacks the engine's facts, or its space cannot be read.
    """

    def __init__(
        self,
        identity: AgentIdentity,
        address: str,
        *,
        initial: Configuration,
        clock: Clock | None = None,
        timing: AgentTiming | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if identity.engine is None:
            raise FieldError("agent_identity.engine", "is missing", code="agent.identity")
        space = StrategySpace.from_json(identity.space_json)
        self._desk = EngineDesk(EngineState(setting_id=initial.config_id))
        self._open_sessions: Callable[[], Mapping[str, int]] | None = None
        super().__init__(
            identity,
            address,
            clock=clock,
            validate_configuration=space.validate,
            timing=timing,
            rng=rng,
            engine=self._desk,
        )
        self._desk.count_with(self._counters)
        self._setting_name = engine_setting_name(identity.agent_id)

    def setting(self) -> tuple[int, EngineSetting] | None:
        """The newest setting for this engine with its snapshot's version; None before the first."""
        applied = self._in_force.applied
        found = applied.settings.get(self._setting_name)
        return (applied.version, found) if found is not None else None

    def ask_sessions(self, open_sessions: Callable[[], Mapping[str, int]]) -> None:
        """Ask for the open sessions by class with every telemetry: an engine can lose them while nobody calls it.

        Args:
            open_sessions: called from the stream's thread; must not wait.
        """
        self._open_sessions = open_sessions

    def applied(self, answer: Applied) -> None:
        """What came of a setting; texts are made fit to be sent."""
        try:
            refused = {plain_text(name): plain_text(reason) for name, reason in answer.refused.items()}
            self._desk.applied(replace(answer, refused=refused))
            self._connection.telemetry_is_due()
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("applied", error)

    def chunk(self, report: ChunkReport) -> None:
        """A chunk was made."""
        try:
            self._desk.chunk(report)
            self._connection.wake()
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("chunk", error)

    def engine_is(
        self,
        *,
        setting_id: str,
        setting_version: int,
        chunk: int,
        sessions: Mapping[str, int],
        memory_limit_bytes: int,
    ) -> None:
        """The engine's state now; told at once where sessions or memory changed, else with the next telemetry."""
        before = self._desk.state
        self._desk.state = EngineState(
            setting_id=setting_id,
            setting_version=setting_version,
            chunk=chunk,
            sessions=dict(sessions),
            memory_limit_bytes=memory_limit_bytes,
        )
        if (before.sessions, before.memory_limit_bytes) != (dict(sessions), memory_limit_bytes):
            self._connection.telemetry_is_due()

    def _telemetry(self) -> Telemetry:
        told = super()._telemetry()
        if told.engine is None or self._open_sessions is None:
            return told
        try:
            return replace(told, engine=replace(told.engine, sessions=dict(self._open_sessions())))
        except Exception as error:  # noqa: BLE001 - the edge towards the data plane
            self._edge.caught("ask_sessions", error)
            return told
