"""What the tests of the SGLang plane share: the model, prompts, and the marker-dependent skips' reasons."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, Arm, ClassRule, DecisionTable, Mixture
from controld.contract.effect import Effect
from controld.contract.snapshot import ClassRules, Resource
from controld.contract.telemetry import Telemetry
from controld.fleet import FleetServer, Selector
from controld.store.sqlite import SqliteStore

MODEL = Path(__file__).resolve().parents[2] / "build/models/smollm2-135m-instruct"


@pytest.fixture(scope="session")
def model() -> Path:
    """The small model's folder."""
    assert (MODEL / "config.json").is_file(), f"no model in {MODEL}: run make setup"
    return MODEL


@pytest.fixture(scope="session")
def prompt(model: Path) -> Callable[[int, int], list[int]]:
    """A function from (number, tokens) to a prompt of exactly that many tokens of real text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "".join(inspect.getsource(module) for module in (argparse, asyncio.base_events))
    token_ids = tokenizer.encode(text).ids

    def cut(number: int, tokens: int) -> list[int]:
        start = number * 997 % (len(token_ids) - tokens)
        return list(token_ids[start : start + tokens])

    return cut


class FixedDaemon:
    """The daemon's real fleet server and store, publishing what a test says instead of what a planner decides."""

    PATIENCE_S = 60.0

    def __init__(self, folder: Path) -> None:
        self.address = f"unix://{folder / 'fleet.sock'}"
        self.effects: list[Effect] = []
        self.telemetry: dict[str, Telemetry] = {}
        self._folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server, self._store = self._do(self._start())

    def stop(self) -> None:
        """Say goodbye to the agents."""
        self._do(self._server.stop(0.5))
        self._do(self._store.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(self.PATIENCE_S)
        self._loop.close()

    def publish(self, choice: Mapping[str, Configuration | None]) -> int:
        """Publish one arm for each service class (None is raw); a class `x` is matched by the extra key `class=x`."""
        arms = [Arm(RAW)]
        cells = []
        for configuration in choice.values():
            arm = Arm(RAW) if configuration is None else Arm(configuration.config_id, configuration)
            if arm not in arms:
                arms.append(arm)
            cells.append(arms.index(arm))
        table = DecisionTable(
            tier="pd",
            link_group="default",
            version=1,
            classes=tuple(choice),
            size_edges_bytes=(),
            bandwidth_edges_bytes_per_s=(),
            load_edges=(),
            arms=tuple(arms),
            mixtures=tuple(Mixture((index,), (1.0,)) for index in range(len(arms))),
            cells=tuple(cells),
            prior_bandwidth_bytes_per_s=1e9,
        )
        rules = ClassRules(tuple(ClassRule(name, extra_key=f"class={name}") for name in choice if name != "default"))
        resources = [Resource("pd/default", table), Resource("classes", rules)]
        return self._do(self._server.publish(Selector("sglang", "default"), resources, policy_generation=1))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the agents have told what a test needs."""
        deadline_s = time.monotonic() + self.PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"waited {self.PATIENCE_S:.0f} s in vain until {what}: {self.telemetry}")
            time.sleep(0.02)

    def wait_for_version(self, version: int, agents: int) -> None:
        """Wait until so many agents have applied a version."""
        self.wait_for(
            lambda: sum(seen.applied_version >= version for seen in self.telemetry.values()) >= agents,
            f"{agents} agents applied version {version}",
        )

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(self.PATIENCE_S)

    async def _start(self) -> tuple[FleetServer, SqliteStore]:
        store = await SqliteStore.open(self._folder / "store")
        server = FleetServer(store, on_effects=self._on_effects, on_telemetry=self._on_telemetry)
        await server.start([self.address])
        return server, store

    async def _on_effects(self, _session: Any, records: Any) -> None:
        self.effects.extend(record.effect for record in records)

    async def _on_telemetry(self, session: Any, telemetry: Telemetry) -> None:
        self.telemetry[session.identity.agent_id] = telemetry


@pytest.fixture
def fixed_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], FixedDaemon]]:
    """A function that starts a fixed daemon; all of them are stopped at the end."""
    started: list[FixedDaemon] = []

    def start() -> FixedDaemon:
        started.append(FixedDaemon(tmp_path_factory.mktemp("daemon")))
        return started[-1]

    yield start
    for daemon in started:
        daemon.stop()
