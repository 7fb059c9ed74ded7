"""The daemon's real fleet server and store in a process of its own, publishing what a test says.

A process of its own, because gRPC's threads and the launcher's forks do not go together. Reads one JSON request a line,
writes one JSON answer a line; see `FixedDaemon` in `conftest.py` for the other end.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from controld.contract.configuration import Configuration
from controld.contract.decision import RAW, Arm, ClassRule, DecisionTable, Mixture
from controld.contract.snapshot import ClassRules, Resource, TenantShare
from controld.contract.telemetry import Telemetry
from controld.fleet import FleetServer, Selector
from controld.store.sqlite import SqliteStore

PRIOR_BANDWIDTH_BYTES_PER_S = 1e9


def resources_for(choice: dict[str, dict[str, Any] | None]) -> list[Resource]:
    """One arm for each service class; a class `x` is matched by the extra key `class=x` and is a tenant of its own."""
    arms = [Arm(RAW)]
    cells = []
    for values in choice.values():
        configuration = None if values is None else Configuration(values)
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
        prior_bandwidth_bytes_per_s=PRIOR_BANDWIDTH_BYTES_PER_S,
    )
    rules = tuple(ClassRule(name, extra_key=f"class={name}", tenant=name) for name in choice if name != "default")
    tenants = tuple(TenantShare(name, 1.0) for name in choice)
    return [Resource("pd/default", table), Resource("classes", ClassRules(rules, tenants))]


class Heard:
    """What agents told."""

    def __init__(self) -> None:
        self.effects: list[dict[str, Any]] = []
        self.telemetry: dict[str, dict[str, Any]] = {}

    async def on_effects(self, _session: Any, records: Any) -> None:
        self.effects.extend(asdict(record.effect) for record in records)

    async def on_telemetry(self, session: Any, telemetry: Telemetry) -> None:
        self.telemetry[session.identity.agent_id] = {
            "attached": telemetry.attached,
            "attach_reason": telemetry.attach_reason,
            "applied_version": telemetry.applied_version,
            "counters": dict(telemetry.counters),
            "links": [asdict(link) for link in telemetry.links],
        }


async def main(folder: Path, address: str) -> None:
    heard = Heard()
    store = await SqliteStore.open(folder / "store")
    server = FleetServer(store, on_effects=heard.on_effects, on_telemetry=heard.on_telemetry)
    await server.start([address])
    print(json.dumps("ready"), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        request = json.loads(line)
        answer: Any = None
        if "publish" in request:
            answer = await server.publish(
                Selector("sglang", "default"), resources_for(request["publish"]), policy_generation=1
            )
        elif "heard" in request:
            answer = {"effects": heard.effects, "telemetry": heard.telemetry}
        print(json.dumps(answer), flush=True)
    await server.stop(0.5)
    await store.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
