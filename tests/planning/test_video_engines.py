"""What is remembered of video engines: none is written over, none holds up the others, who is gone is forgotten."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controld.contract.clock import ManualClock
from controld.contract.configuration import Configuration
from controld.contract.video import Applied, EngineSetting, Transition
from controld.fleet import Selector
from controld.planning import video_engines
from controld.planning.video_engines import ABSENT_S, FORGET_AFTER_S, MAX_VERSIONS, EngineBook, EngineKey, KnownEngine
from controld.store.records import PosteriorRecord
from controld.store.sqlite import SqliteStore

SELECTOR = Selector("longlive", "video")
E1, E2, E10 = ((SELECTOR, name) for name in ("e1", "e2", "e10"))
SETTING = EngineSetting(configuration=Configuration({"steps": 4}), reason="for the test")
TAKEN = Applied(version=1, setting_id="x", chunk=0, transition=Transition.RELOAD, seconds=3.0, keeps_kv=False)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    made = await SqliteStore.open(tmp_path / "state")
    yield made
    await made.close()


class Here:
    def __init__(self, store: SqliteStore) -> None:
        self.clock = ManualClock(unix_origin_s=1e9)
        self.connected: set[EngineKey] = set()
        self.store = store
        self.book = self.another()

    def another(self) -> EngineBook:
        return EngineBook(self.store, self.clock, lambda: frozenset(self.connected))

    async def teach(self, *keys: EngineKey) -> None:
        for key in keys:
            engine = await self.book.of(key)
            engine.lessons.applied(TAKEN)
            engine.dirty = True

    async def stored(self) -> list[str]:
        return [record.key for record in await self.store.posteriors.list("video/")]


@pytest.fixture
def here(store: SqliteStore) -> Here:
    return Here(store)


async def test_an_engine_that_left_the_memory_comes_back_with_what_it_taught(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(video_engines, "MAX_ENGINES", 1)
    await here.teach(E1)
    await here.book.checkpoint()
    await here.teach(E2)
    assert set(here.book.engines) == {E2}
    back = await here.book.of(E1)
    assert back.lessons.switch_seconds == {Transition.RELOAD: 3.0}
    back.dirty = True
    await here.book.checkpoint()
    await here.book.checkpoint()
    found = await here.store.posteriors.get("video/video/e1/")
    assert found is not None and found.version == back.record_version


async def test_names_with_slashes_share_no_record_and_come_back(here: Here) -> None:
    one, other = (Selector("longlive", "x"), "y/z"), (Selector("longlive", "x/y"), "z")
    await here.teach(one, other)
    await here.book.checkpoint()
    assert len(await here.stored()) == 2
    successor = here.another()
    await successor.restore()
    assert set(successor.engines) == {one, other}


async def test_a_record_that_somebody_else_wrote_does_not_hold_up_the_others(here: Here) -> None:
    await here.teach(E1, E2)
    for _ in range(3):
        version = 0 if (found := await here.store.posteriors.get("video/video/e1/")) is None else found.version
        document = "{}"
        await here.store.posteriors.put([PosteriorRecord(key="video/video/e1/", version=version, document=document)])
    await here.book.checkpoint()
    assert await here.stored() == ["video/video/e1/", "video/video/e2/"]
    again = here.another()
    await again.restore()
    assert {key: engine.lessons.switch_seconds for key, engine in again.engines.items()} == {
        E1: {Transition.RELOAD: 3.0},
        E2: {Transition.RELOAD: 3.0},
    }


async def test_who_is_long_gone_is_forgotten_with_setting_and_record_and_nobody_else(here: Here) -> None:
    here.connected = {E10}
    await here.teach(E1, E10)
    here.book.restore_setting(E1, SETTING, 5)
    await here.book.checkpoint()
    here.clock.advance(FORGET_AFTER_S - 10)
    await here.book.checkpoint()
    assert set(here.book.engines) == {E1, E10}
    here.clock.advance(20)
    await here.book.checkpoint()
    assert set(here.book.engines) == {E10}, "connected, whenever it last said something"
    assert await here.stored() == ["video/video/e10/"]


async def test_the_setting_that_it_comes_back_to_is_kept_with_what_it_taught(here: Here) -> None:
    await here.teach(E1, E2)
    here.book.engines[E1].pushed = SETTING
    await here.book.checkpoint()
    successor = here.another()
    await successor.restore()
    assert {key: engine.pushed for key, engine in successor.engines.items()} == {E1: SETTING, E2: None}
    newer = EngineSetting(configuration=Configuration({"steps": 2}), reason="published since")
    successor.restore_setting(E1, newer, 7)
    assert successor.engines[E1].pushed == newer


async def test_a_setting_published_just_before_the_daemon_was_killed_is_kept_when_no_version_has_it_any_more(
    here: Here,
) -> None:
    await here.teach(E1, E2)
    here.book.engines[E1].push(SETTING)
    await here.book.checkpoint()
    newer = EngineSetting(configuration=Configuration({"steps": 2}), reason="published since")
    successor = here.another()
    await successor.restore()
    for key in (E1, E2):  # E2's record has no setting: an earlier release wrote none
        successor.restore_setting(key, newer, 7)
    here.clock.advance(ABSENT_S + 1)
    assert successor.present(SELECTOR) == {}
    await successor.checkpoint()
    again = here.another()
    await again.restore()
    assert {key: engine.pushed for key, engine in again.engines.items()} == {E1: newer, E2: newer}


async def test_present_is_who_is_connected_or_was_until_a_few_minutes_ago(here: Here) -> None:
    here.connected = {E10}
    await here.teach(E1, E10, (Selector("longlive", "other"), "e1"))
    assert set(here.book.present(SELECTOR)) == {"e1", "e10"}
    here.clock.advance(ABSENT_S + 1)
    assert set(here.book.present(SELECTOR)) == {"e10"}
    here.connected = {E1}
    assert set(here.book.present(SELECTOR)) == {"e1", "e10"}, "back, and gone just now"
    successor = here.another()
    await here.book.checkpoint()
    await successor.restore()
    here.connected = set()
    assert set(successor.present(SELECTOR)) == {"e1", "e10"}, "a fresh daemon gives them time to connect"


async def test_when_an_engine_was_seen_is_written_down_once_a_day(here: Here) -> None:
    await here.book.of(E1)
    await here.book.checkpoint()
    here.clock.advance(3600)
    assert not (await here.book.of(E1)).dirty
    here.clock.advance(86400)
    assert (await here.book.of(E1)).dirty
    await here.book.checkpoint()
    again = here.another()
    await again.restore()
    assert again.engines[E1].seen_unix_s == here.clock.unix_s()


async def test_a_damaged_record_costs_its_lessons_only(here: Here) -> None:
    await here.store.posteriors.put([PosteriorRecord(key="video/video/e1/", version=0, document="not JSON")])
    await here.book.restore()
    assert here.book.engines[E1].lessons.switch_seconds == {}
    await here.teach(E1)
    await here.book.checkpoint()
    again = here.another()
    await again.restore()
    assert again.engines[E1].lessons.switch_seconds == {Transition.RELOAD: 3.0}


def test_what_a_version_asked_for_is_remembered_for_the_last_ones() -> None:
    engine = KnownEngine()
    assert engine.asked(1) == ""
    for version in range(1, MAX_VERSIONS + 11):
        engine.pushed = EngineSetting(configuration=Configuration({"steps": version}))
        assert engine.asked(version) == engine.pushed.setting_id, "an answer may come before publishing has returned"
        engine.tell(version)
    assert engine.asked(10) == ""
    assert engine.asked(11) == Configuration({"steps": 11}).config_id
    assert len(engine.told) == MAX_VERSIONS
