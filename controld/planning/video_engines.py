"""What is remembered of every video engine, in memory and in the store."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from controld.contract.clock import Clock
from controld.contract.errors import ControldError
from controld.contract.video import Applied, EngineSetting
from controld.controller.guard import EVERY_CLASS
from controld.controller.video_plan import VideoPlan, setting_of_document, setting_to_document
from controld.fleet.published import Selector
from controld.planning.video_lessons import EngineLessons
from controld.policy.model import PlaneKind
from controld.store.errors import ConflictError, StoreError
from controld.store.interface import Store
from controld.store.records import PosteriorRecord

_log = logging.getLogger(__name__)

MAX_ENGINES = 4096
"""Beyond this many, those that are not connected leave the memory; what they taught stays in the store."""

FORGET_AFTER_S = 7 * 86400.0
"""An engine that was not seen for so long is forgotten, with its setting and what it taught."""

ABSENT_S = 300.0
"""An engine that has been away for so long is left out of what is published; it comes back to the setting it had."""

MAX_VERSIONS = 64
"""Of the versions that told an engine something, the last ones: an answer to an older one accuses no setting."""

_PREFIX = "video/"
_SEEN = "seen_unix_s"
_SETTING = "setting"
_WRITE_SEEN_S = 86400.0
_KIND = PlaneKind.LONGLIVE.value

EngineKey = tuple[Selector, str]


@dataclass(slots=True)
class KnownEngine:
    """What is remembered of one engine.

    Attributes:
        lessons: what it taught.
        record_version: of the stored record; 0: there is none.
        dirty: the record is older than the lessons.
        setting_id, since_s: in force, and since when on the monotonic clock.
        seen_unix_s, written_unix_s: when it last said something, and when its record was last written.
        here_s: when it was last there, on the monotonic clock, or when this process first knew of it.
        plan: the last decision.
        pushed: what it should run under.
        told: setting's id by version, of the last versions that were published.
        answered: instance and content of its last answer, which is told again on every stream.
        refused: the setting that it refused last; asked for again once its pin is over.
    """

    lessons: EngineLessons = field(default_factory=EngineLessons)
    record_version: int = 0
    dirty: bool = False
    setting_id: str = ""
    since_s: float = 0.0
    seen_unix_s: float = 0.0
    written_unix_s: float = 0.0
    here_s: float = 0.0
    plan: VideoPlan | None = None
    pushed: EngineSetting | None = None
    told: dict[int, str] = field(default_factory=dict)
    answered: tuple[str, Applied | None] = ("", None)
    refused: str = ""

    def push(self, setting: EngineSetting) -> None:
        """It should run under this one, and come back to it."""
        self.dirty = self.dirty or self.pushed is None or self.pushed.setting_id != setting.setting_id
        self.pushed = setting

    def tell(self, version: int) -> None:
        """A version with its setting is out."""
        if self.pushed is None:
            return
        self.told[version] = self.pushed.setting_id
        while len(self.told) > MAX_VERSIONS:
            del self.told[min(self.told)]

    def may_run(self, setting_id: str) -> bool:
        """Whether the engine can be under this setting: it said so, or was told to."""
        pushed = "" if self.pushed is None else self.pushed.setting_id
        return setting_id in (self.setting_id, pushed) or setting_id in self.told.values()

    def may_be_asked_again(self, now_unix_s: float) -> bool:
        """Whether what it should run under is a setting that it refused, but so long ago that it is in use again."""
        if self.pushed is None or self.pushed.setting_id != self.refused or self.setting_id == self.refused:
            return False
        return not self.lessons.pins.at(now_unix_s).reason(self.refused, EVERY_CLASS)

    def asked(self, version: int) -> str:
        """Id of the setting that a version asked for; empty where that is not known any more."""
        if version > max(self.told, default=0) and self.pushed is not None:
            # The answer was faster than the word that the version is out.
            return self.pushed.setting_id
        return self.told.get(version, "")


class EngineBook:
    """All engines that are remembered.

    Args:
        connected: the engines that are there now.

    Attributes:
        engines: by selector and agent.
    """

    def __init__(self, store: Store, clock: Clock, connected: Callable[[], Collection[EngineKey]]) -> None:
        self._store = store
        self._clock = clock
        self._connected = connected
        self.engines: dict[EngineKey, KnownEngine] = {}

    async def of(self, key: EngineKey) -> KnownEngine:
        """An engine that just said something; what an evicted one had taught is read again. Raises: StoreError."""
        if key not in self.engines:
            if len(self.engines) >= MAX_ENGINES:
                here = self._connected()
                for gone in [known for known in self.engines if known not in here]:
                    del self.engines[gone]
            record = await self._store.posteriors.get(_record_key(key))
            found = KnownEngine() if record is None else _engine_of(record, self._clock)
            found.since_s = self._clock.monotonic_s()
            self.engines.setdefault(key, found)
        engine, now_unix_s = self.engines[key], self._clock.unix_s()
        engine.seen_unix_s, engine.here_s = now_unix_s, self._clock.monotonic_s()
        if now_unix_s - engine.written_unix_s > _WRITE_SEEN_S:
            engine.dirty = True
        return engine

    def present(self, selector: Selector) -> dict[str, KnownEngine]:
        """Engines of a deployment, by agent, that are connected or were until a few minutes ago."""
        here, now_s, found = self._connected(), self._clock.monotonic_s(), {}
        for (of, agent_id), engine in self.engines.items():
            if (of, agent_id) in here:
                engine.here_s = now_s
            if of == selector and now_s - engine.here_s <= ABSENT_S:
                found[agent_id] = engine
        return found

    async def restore(self) -> None:
        """Take over what an earlier process learned. Raises: StoreError."""
        for record in await self._store.posteriors.list(_PREFIX):
            _, deployment, agent_id, *_ = map(unquote, record.key.split("/"))
            self.engines[Selector(_KIND, deployment), agent_id] = _engine_of(record, self._clock)

    def restore_setting(self, key: EngineKey, setting: EngineSetting, version: int) -> None:
        """An earlier process published it."""
        fresh = KnownEngine(seen_unix_s=self._clock.unix_s(), here_s=self._clock.monotonic_s())
        engine = self.engines.setdefault(key, fresh)
        engine.push(setting)
        engine.tell(version)

    async def checkpoint(self) -> None:
        """Write down what was learned, and forget who is long gone. Raises: StoreError."""
        for key, engine in list(self.engines.items()):
            if engine.dirty:
                await self.write(key)
        here, oldest_unix_s = self._connected(), self._clock.unix_s() - FORGET_AFTER_S
        for key, engine in list(self.engines.items()):
            if key not in here and engine.seen_unix_s < oldest_unix_s:
                await self._store.posteriors.delete(_record_key(key))
                self.engines.pop(key, None)

    async def write(self, key: EngineKey) -> None:
        """Write down what one engine taught. Raises: StoreError."""
        engine = self.engines.get(key)
        if engine is None:
            return  # it left the memory while another one was written
        engine.dirty = False
        document = {**engine.lessons.to_document(), _SEEN: engine.seen_unix_s}
        if engine.pushed is not None:
            document[_SETTING] = setting_to_document(engine.pushed)
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
        name = _record_key(key)
        try:
            try:
                await self._put(PosteriorRecord(key=name, version=engine.record_version, document=text))
            except ConflictError:
                # What is known here is newer than whatever is there, and other engines must not wait for this one.
                found = await self._store.posteriors.get(name)
                engine.record_version = 0 if found is None else found.version
                await self._put(PosteriorRecord(key=name, version=engine.record_version, document=text))
        except ConflictError as error:
            engine.dirty = True
            _log.warning("what engine %s taught is not written: %s", key[1], error)
            return
        except StoreError:
            engine.dirty = True
            raise
        engine.record_version += 1
        engine.written_unix_s = self._clock.unix_s()

    async def _put(self, record: PosteriorRecord) -> None:
        await self._store.posteriors.put([record])


def _record_key(key: EngineKey) -> str:
    # With an end: records are deleted by what their keys begin with, and e1 is not the beginning of e10 then.
    selector, agent_id = key
    return f"{_PREFIX}{quote(selector.deployment, safe='')}/{quote(agent_id, safe='')}/"


def _engine_of(record: PosteriorRecord, clock: Clock) -> KnownEngine:
    engine = KnownEngine(record_version=record.version, seen_unix_s=clock.unix_s(), here_s=clock.monotonic_s())
    try:
        document = json.loads(record.document)
        engine.lessons = EngineLessons.from_document(document)
        engine.seen_unix_s = engine.written_unix_s = float(document[_SEEN])
        if _SETTING in document:
            engine.pushed = setting_of_document(document[_SETTING])
    except (ControldError, ValueError, TypeError, KeyError) as error:
        _log.warning("what an engine taught is lost: %s", error, extra={"record": record.key})
    return engine
