"""The spaces of connected agents as trees and as JSON."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from controld.cli.main import main
from controld.cli.space import space_tree
from controld.contract.rpc import fleet_pb2 as pb
from controld.contract.rpc.convert import PROTOCOL_VERSION
from controld.contract.rpc.fleet_pb2_grpc import FleetStub
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace

PATIENCE_S = 20.0

SPACE = StrategySpace(
    parameters=(
        Parameter(name="transform", values=("none", "hadamard")),
        Parameter(name="quantise", values=("none", "levels", "fp8", "[red]")),
        Parameter(name="levels", values=(4, 8), ordered=True),
        Parameter(name="axis", values=("channel", "token")),
        Parameter(name="group", values=(32, 64), ordered=True),
        Parameter(name="window", values=(0, 64), ordered=True, default=0),
        Parameter(name="code", values=("none", "zstd"), lossy=False),
    ),
    conditions=(
        Condition(parameter="levels", parent="quantise", parent_values=("levels",)),
        Condition(parameter="axis", parent="quantise", parent_values=("levels",)),
        Condition(parameter="group", parent="quantise", parent_values=("levels",)),
        Condition(parameter="group", parent="axis", parent_values=("channel",)),
        Condition(parameter="window", parent="transform", parent_values=("hadamard",)),
        Condition(parameter="window", parent="quantise", parent_values=("levels", "fp8", "[red]")),
    ),
    forbidden=(
        Forbidden(values={"quantise": ("none",), "transform": ("hadamard",)}, reason="nothing to transform for"),
        Forbidden(values={"quantise": ("fp8",), "code": ("zstd",)}, reason="whole bytes"),
    ),
)


def test_the_tree_shows_parameters_below_what_they_need() -> None:
    out = Console(width=160, force_terminal=False)
    with out.capture() as shown:
        out.print(space_tree(SPACE))
    assert shown.get().splitlines() == [
        "parameters",
        "├── transform: none, hadamard",
        "├── quantise: none, levels, fp8, [red]",
        "│   ├── quantise = levels",
        "│   │   ├── levels: 4, 8 (ordered)",
        "│   │   └── axis: channel, token",
        "│   │       └── axis = channel",
        "│   │           └── group: 32, 64 (ordered)",
        "│   └── quantise = all but none",
        "│       └── window: 0, 64 (ordered; default 0; only where transform = hadamard)",
        "├── code: none, zstd (lossless)",
        "└── forbidden together",
        "    ├── nothing to transform for",
        "    │   └── quantise = none and transform = hadamard",
        "    └── whole bytes",
        "        └── quantise = fp8 and code = zstd",
    ]


@pytest.fixture
def daemon(config_file: Path, serving_of: Any) -> Iterator[Path]:
    process = serving_of(config_file)
    process.start()
    assert main(["reload", "--wait", "--timeout", "30"]) == 0
    yield config_file
    process.stop()


class Connected:
    """An agent that stays on its stream until it is closed."""

    def __init__(self, config_file: Path, agent_id: str, **changes: Any) -> None:
        self._messages: queue.SimpleQueue[pb.AgentMessage | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(f"unix:{config_file.parent / 'fleet.sock'}")
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION,
            agent_id=agent_id,
            instance_id="i",
            role_peers=1,
            started_unix_s=1.0,
            model=pb.Model(name="tiny", fingerprint="f" * 64),
            **{"kind": "sglang", "deployment": "chat", "role": "prefill", **changes},
        )
        self._messages.put(pb.AgentMessage(hello=hello))
        self._stream = FleetStub(self._channel).Attach(iter(self._messages.get, None))
        assert next(self._stream).WhichOneof("message") == "welcome"

    def close(self) -> None:
        self._messages.put(None)
        self._stream.cancel()
        self._channel.close()


def test_the_spaces_of_connected_agents_come_once_with_their_size(
    daemon: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["space"]) == 0
    assert "no agent that advertises" in capsys.readouterr().out
    capabilities = pb.Capabilities(space_json=SPACE.to_json(), tiers=["pd"])
    agents = [
        Connected(daemon, "prefill-0", capabilities=capabilities),
        Connected(daemon, "decode-0", role="decode", capabilities=capabilities),
        Connected(daemon, "silent-0"),
        Connected(daemon, "odd-0", capabilities=pb.Capabilities(space_json="{}", tiers=["pd"])),
    ]
    started_s = time.monotonic()
    assert main(["space", "--plane", "sglang", "--json"]) == 0
    assert time.monotonic() - started_s < 5
    odd, whole = sorted(json.loads(capsys.readouterr().out), key=lambda entry: entry["space"] is not None)
    assert (whole["agents"], whole["model"]) == (["decode-0", "prefill-0"], "tiny")
    assert StrategySpace.from_json(json.dumps(whole["space"])) == SPACE
    assert (whole["lossy_parts"], whole["configurations"]) == (SPACE.count(lossy_only=True), SPACE.count())
    assert odd["agents"] == ["odd-0"] and "not a strategy space" in odd["problem"]
    assert main(["space"]) == 0
    text = capsys.readouterr().out
    assert f"{SPACE.count(lossy_only=True)} lossy parts, {SPACE.count()} configurations" in text
    assert "window: 0, 64 (ordered; default 0" in text
    assert "cannot be read" in text
    assert main(["space", "--plane", "video"]) == 1
    assert "connected: sglang" in capsys.readouterr().err
    for agent in agents:
        agent.close()
