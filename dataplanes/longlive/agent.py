"""A video engine under control: takes the newest setting before each chunk, and tells what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from controld.contract.configuration import Configuration
from controld.contract.video import Applied, ChunkReport, EngineFacts, MemorySplit, Transition, TransitionPlan
from dataplanes.agent import AgentIdentity, VideoAgent
from dataplanes.longlive.engine import ChunkResult, EngineCapabilities, EngineError, LoadSpec, SessionSpec, VideoEngine

KIND = "longlive"
ROLE = "engine"
TIER = "video"

_MOST_WAITING = 64
_ALL_LOST = frozenset({"engine.worker_died", "engine.not_loaded"})


def engine_facts(capabilities: EngineCapabilities) -> EngineFacts:
    """What controld needs of an engine's capabilities, beside its space."""
    return EngineFacts(
        engine=capabilities.engine,
        transitions=capabilities.transitions,
        chunk_latents=capabilities.chunk_latents,
        frames_per_chunk=capabilities.frames_per_chunk,
        sessions=capabilities.sessions,
        backends=capabilities.backends,
        left_out=capabilities.left_out,
    )


def engine_identity(
    capabilities: EngineCapabilities, *, deployment: str, agent_id: str, model_name: str, model_fingerprint: str
) -> AgentIdentity:
    """How an engine announces itself."""
    return AgentIdentity(
        deployment=deployment,
        agent_id=agent_id,
        kind=KIND,
        role=ROLE,
        model_name=model_name,
        model_fingerprint=model_fingerprint,
        device=capabilities.device,
        torch_version=torch.__version__,
        threads=torch.get_num_threads(),
        space_json=capabilities.space.to_json(),
        tiers=(TIER,),
        engine=engine_facts(capabilities),
    )


class SteeredEngine:
    """A `VideoEngine` (itself one) whose settings come from its agent. Used from one thread, as every engine.

    A setting that the engine refuses is answered with the reason and not tried again until another one comes; what was
    in force stays.

    Args:
        engine: does the work.
        agent: started by whoever made it.
    """

    def __init__(self, engine: VideoEngine, agent: VideoAgent) -> None:
        self._engine = engine
        self._agent = agent
        self._classes: dict[str, str] = {}
        self._made: dict[str, int] = {}
        self._held: set[str] = set()
        """Sessions that the engine keeps memory for: also those whose chunks are all made, until they are closed."""
        self._memory_limit_bytes = 0
        self._chunk = 0
        self._in_force = ""
        self._in_force_version = 0
        self._asked_version = 0
        self._asked = ""
        self._count = 0
        self._versions: dict[int, int] = {}
        agent.ask_sessions(self._open_by_class)

    def capabilities(self) -> EngineCapabilities:
        """As the engine's."""
        return self._engine.capabilities()

    def load(self, spec: LoadSpec) -> MemorySplit:
        """As the engine's; what controld wants is asked for again at the next chunk. Raises: EngineError."""
        with self._noting_losses():
            split = self._engine.load(spec)
            self._forget_sessions()
        self._in_force, self._in_force_version = spec.setting.config_id, 0
        self._asked, self._asked_version = spec.setting.config_id, 0
        self._memory_limit_bytes = spec.memory_limit_bytes
        self._tell()
        return split

    def unload(self) -> MemorySplit:
        """As the engine's."""
        split = self._engine.unload()
        self._forget_sessions()
        self._tell()
        return split

    def limit_memory(self, limit_bytes: int) -> None:
        """The engine may use this much from now on (0: no limit): controld is told, and decides."""
        self._memory_limit_bytes = limit_bytes
        self._tell()

    def plan(self, current: Configuration, wanted: Configuration) -> TransitionPlan:
        """As the engine's. Raises: EngineError."""
        with self._noting_losses():
            return self._engine.plan(current, wanted)

    def apply(self, wanted: Configuration, version: int) -> None:
        """As the engine's, for a person who sets aside what controld wants until it wants something else.

        Raises:
            EngineError: as the engine's.
        """
        with self._noting_losses():
            self._apply(wanted, version)
        self._asked = wanted.config_id

    def open(self, spec: SessionSpec) -> None:
        """As the engine's. Raises: EngineError."""
        with self._noting_losses():
            self._engine.open(spec)
        self._classes[spec.session_id] = spec.service_class
        self._held.add(spec.session_id)
        self._tell()

    def step(self, session_id: str) -> ChunkResult:
        """As the engine's, under the newest setting. Raises: EngineError."""
        self._steer()
        try:
            result = self._engine.step(session_id)
        except EngineError as error:
            self._answer(error.applied)
            if error.code == "engine.not_finite" and session_id in self._classes:
                # The chunk has no report of its own, and its setting must not go on unnoticed.
                self._agent.chunk(self._not_finite(session_id))
            self._forget(session_id)
            self._note_losses(error)
            self._tell()
            raise
        self._note_losses()
        self._chunk = result.report.chunk + 1
        self._made[session_id] = result.report.session_chunk + 1
        self._answer(result.applied)
        self._in_force = result.report.setting_id
        self._agent.chunk(replace(result.report, sessions=len(self._held)))
        if result.kv_unreadable:
            self._agent.count("kv_unreadable")
        if result.is_last:
            self._forget(session_id)
        self._tell()
        return result

    def push_prompt(
        self, session_id: str, prompt: str, *, scene_cut: bool = False, at_chunk: int | None = None
    ) -> None:
        """As the engine's. Raises: EngineError."""
        with self._noting_losses():
            self._engine.push_prompt(session_id, prompt, scene_cut=scene_cut, at_chunk=at_chunk)

    def close(self, session_id: str) -> torch.Tensor:
        """As the engine's. Raises: EngineError."""
        with self._noting_losses():
            try:
                return self._engine.close(session_id)
            finally:
                # Whatever became of its last frames, the engine serves it no longer.
                self._forget(session_id)
                self._held.discard(session_id)
                self._tell()

    def _steer(self) -> None:
        found = self._agent.setting()
        if found is None or found[0] == self._asked_version:
            return
        version, setting = found
        self._asked_version = version
        if setting.setting_id == self._asked:
            return
        self._asked = setting.setting_id
        try:
            self._apply(setting.configuration, version)
        except EngineError as error:
            if error.code in _ALL_LOST:
                # That is no word on the setting: it is asked for again once the engine is loaded.
                self._asked, self._asked_version = "", 0
                self._note_losses(error)
                raise
            # Another version may ask for it again.
            self._asked = ""
            self._agent.count("settings_refused")
            self._agent.applied(
                Applied(
                    version=version,
                    setting_id=self._in_force,
                    chunk=self._chunk,
                    transition=Transition.NONE,
                    seconds=0.0,
                    keeps_kv=True,
                    refused={error.code: str(error)},
                )
            )

    def _answer(self, answers: tuple[Applied, ...]) -> None:
        for answer in answers:
            applied = replace(answer, version=self._versions.pop(answer.version, 0))
            if applied.refused:
                self._asked = ""
            self._in_force, self._in_force_version = applied.setting_id, applied.version
            self._agent.applied(applied)

    def _apply(self, wanted: Configuration, version: int) -> None:
        """Under a count of its own: a daemon that lost its state counts versions from one again."""
        self._count += 1
        self._engine.apply(wanted, self._count)
        self._versions = {count: of for count, of in self._versions.items() if count > self._count - _MOST_WAITING}
        self._versions[self._count] = version

    @contextmanager
    def _noting_losses(self) -> Iterator[None]:
        try:
            yield
        except EngineError as error:
            self._note_losses(error)
            raise
        self._note_losses()

    def _note_losses(self, error: EngineError | None = None) -> None:
        """Any call may find that sessions are gone, also others than its own: they are told and counted at once."""
        left = frozenset() if error is not None and error.code in _ALL_LOST else self._engine.sessions()
        lost = self._held - left
        if not lost:
            return
        for session_id in lost:
            self._forget(session_id)
        self._held -= lost
        self._agent.count("sessions_lost", len(lost))
        self._tell()

    def _open_by_class(self) -> Counter[str]:
        """Asked by the agent from its own thread: the engine may have lost them while nobody called it."""
        left = self._engine.sessions()
        return Counter(name for session_id, name in self._classes.copy().items() if session_id in left)

    def _not_finite(self, session_id: str) -> ChunkReport:
        """Of the chunk that was thrown away: nothing but what it ran under and that it was not finite."""
        return ChunkReport(
            session_id=session_id,
            service_class=self._classes[session_id],
            setting_id=self._in_force,
            chunk=self._chunk,
            session_chunk=self._made.get(session_id, 0),
            frames=0,
            denoise_s=(),
            recache_s=0.0,
            vae_s=0.0,
            vae_overlap=0.0,
            total_s=0.0,
            first_frame_s=0.0,
            fps_denoise=0.0,
            fps_end_to_end=0.0,
            memory=MemorySplit(),
            has_nan=True,
        )

    def _forget(self, session_id: str) -> None:
        self._classes.pop(session_id, None)
        self._made.pop(session_id, None)

    def _forget_sessions(self) -> None:
        self._classes.clear()
        self._made.clear()
        self._held.clear()

    def _tell(self) -> None:
        self._agent.engine_is(
            setting_id=self._in_force,
            setting_version=self._in_force_version,
            chunk=self._chunk,
            sessions=Counter(self._classes.values()),
            memory_limit_bytes=self._memory_limit_bytes,
        )
