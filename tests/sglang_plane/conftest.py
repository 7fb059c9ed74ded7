"""What the tests of the SGLang plane share: the model, prompts, and the marker-dependent skips' reasons."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from controld.contract.configuration import Configuration
from controld.contract.effect import Effect, Half, Verdict
from controld.contract.effect import Path as EffectPath

if TYPE_CHECKING:
    from tests.sglang_plane.pd_rig import Rig

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
    """The daemon's real fleet server in a process of its own, publishing what a test says; see `fixed_daemon.py`."""

    PATIENCE_S = 90.0

    def __init__(self, folder: Path) -> None:
        self.address = f"unix://{folder / 'fleet.sock'}"
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Serve; what was told to an earlier process is forgotten, what it stored is not."""
        script = Path(__file__).with_name("fixed_daemon.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), str(self._folder), self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer() == "ready"

    def stop(self) -> None:
        """Say goodbye to the agents and end the process, if there is one."""
        if self._process is not None:
            self._process.communicate(timeout=self.PATIENCE_S)
            self._process = None

    def publish(self, choice: Mapping[str, Configuration | None]) -> int:
        """Publish one arm for each service class (None is raw); a class `x` is matched by the extra key `class=x`."""
        values = {name: None if arm is None else dict(arm) for name, arm in choice.items()}
        return int(self._ask({"publish": values}))

    def effects(self) -> list[Effect]:
        """All effects so far."""
        return [
            Effect(
                **(
                    fields
                    | {
                        "half": Half(fields["half"]),
                        "path": EffectPath(fields["path"]),
                        "verdict": Verdict(fields["verdict"]),
                    }
                )
            )
            for fields in self._ask({"heard": True})["effects"]
        ]

    def telemetry(self) -> dict[str, dict[str, Any]]:
        """The last report of each agent."""
        telemetry: dict[str, dict[str, Any]] = self._ask({"heard": True})["telemetry"]
        return telemetry

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the agents have told what a test needs."""
        deadline_s = time.monotonic() + self.PATIENCE_S
        while not condition():
            if time.monotonic() > deadline_s:
                raise AssertionError(f"waited {self.PATIENCE_S:.0f} s in vain until {what}: {self.telemetry()}")
            time.sleep(0.05)

    def wait_until_in_force(self, version: int, agents: int = 2) -> None:
        """Wait until so many agents are attached and have applied a version."""
        self.wait_for(
            lambda: (
                sum(seen["attached"] and seen["applied_version"] >= version for seen in self.telemetry().values())
                >= agents
            ),
            f"{agents} attached agents applied version {version}",
        )

    def wait_for_effects(self, transfers: int, half: Half = Half.SENDER) -> list[Effect]:
        """The effects of one half, once there are so many."""
        self.wait_for(
            lambda: sum(effect.half is half for effect in self.effects()) >= transfers,
            f"{transfers} {half} effects came",
        )
        return [effect for effect in self.effects() if effect.half is half]

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the fixed daemon ended with status {self._process.wait()}"
        return json.loads(line)


@pytest.fixture(scope="module")
def fixed_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FixedDaemon]:
    """A fixed daemon that is not started yet; it is stopped at the end of the module."""
    daemon = FixedDaemon(tmp_path_factory.mktemp("daemon"))
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rig]]:
    """Makes rigs of two real SGLang managers each; all are torn down at the end of the module."""
    from dataplanes.sglang.pd import lane
    from tests.sglang_plane.pd_rig import GIVEN_UP_S, Rig, Side, import_sglang, wait_until, write_model

    import_sglang()
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    rigs: list[Rig] = []

    def make(*, decode_plane: bool = True, **changes: Any) -> Rig:
        rig = Rig(folder)
        rigs.append(rig)
        rig.prefill = Side(rig, "prefill", with_plane=True, **changes)
        rig.decode = Side(rig, "decode", with_plane=decode_plane, **changes)
        rig.fill()
        return rig

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane, "ACK_PATIENCE_S", GIVEN_UP_S)
        yield make
        for rig in reversed(rigs):
            rig.close()
    ours = ("controld-wire", "controld-decode")
    wait_until(lambda: not any(thread.name in ours for thread in threading.enumerate()), "no thread of ours is left")


@pytest.fixture(scope="module")
def rig_at_rest(make_rig: Callable[..., Rig]) -> list[Rig]:
    """The rig that tests take turns with; empty until there is one."""
    return []


@pytest.fixture
def rig(rig_at_rest: list[Rig], make_rig: Callable[..., Rig]) -> Iterator[Rig]:
    """A rig as new: raw is drawn, nothing is damaged, nobody has told anything."""
    rig = rig_at_rest.pop() if rig_at_rest else make_rig()
    yield rig
    # One that does not come to rest is not handed on: what is wrong with it is no other test's fault.
    rig.reset()
    rig_at_rest.append(rig)
