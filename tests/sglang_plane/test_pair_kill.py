"""controld is killed five times while requests are in flight on a slow link: clients do not notice, nothing is lost."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from controld.candidates.profile import Profile, StageTime
from controld.contract.configuration import Configuration
from controld.store.records import ProfileKey, ProfileRecord
from controld.store.sqlite import SqliteStore
from dataplanes.sglang.demo.daemon import Daemon
from dataplanes.sglang.demo.plan import DEMO
from dataplanes.sglang.demo.policies import DEPLOYMENT, extra_key_of, policy_text
from dataplanes.sglang.launcher import GenerationError, PairSettings, ServerSettings, SglangClient, SglangPair
from dataplanes.sglang.link import ShapedLink
from dataplanes.sglang.model_identity import identify_model

pytestmark = [pytest.mark.pair, pytest.mark.root, pytest.mark.slow]

SLOW_BITS_PER_S = 20_000_000
KILLS = 5
PROMPT_TOKENS = 300
CODED = Configuration(
    {
        "transform": "hadamard",
        "quantise": "levels",
        "key_levels": 16,
        "key_axis": "channel",
        "key_group": 64,
        "value_levels": 8,
        "value_axis": "token",
        "value_group": 64,
        "code": "entropy",
    }
)


async def keep_profile(state_dir: Path, fingerprint: str) -> None:
    profile = Profile(
        configuration=CODED, workload="general", model_fingerprint=fingerprint, loss_mean_nats=0.01, loss_se_nats=0.001,
        loss_samples=12, worst_prompt_tokens=2048, ratio=4.5, encode=StageTime(1e-3, 3e-9),
        decode=StageTime(1e-3, 2e-9), median_transfer_bytes=14e6,
    )  # fmt: skip
    key = ProfileKey(
        model_fingerprint=fingerprint,
        workload="general",
        config_id=profile.arm_id,
        sender_hardware="",
        receiver_hardware="",
    )
    store = await SqliteStore.open(state_dir)
    await store.profiles.upsert([ProfileRecord(key=key, document=profile.to_json(), updated_unix_s=1.0)])
    await store.close()


class Traffic:
    """Two clients that ask for one short answer after another until told to stop."""

    def __init__(self, client: Callable[[], SglangClient], prompt: Callable[[int, int], list[int]]) -> None:
        self.answered = 0
        self.errors: list[GenerationError] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(client, prompt, index)) for index in range(2)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, client: Callable[[], SglangClient], prompt: Callable[[int, int], list[int]], index: int) -> None:
        number = index
        while not self._stop.is_set():
            try:
                client().generate(prompt(number, PROMPT_TOKENS), max_new_tokens=2, extra_key=extra_key_of("controld"))
            except GenerationError as error:
                self.errors.append(error)
                return
            with self._lock:
                self.answered += 1
            number += 2

    def wait_for(self, more: int) -> None:
        wanted = self.answered + more
        deadline_s = time.monotonic() + 300
        while self.answered < wanted and not self.errors:
            assert time.monotonic() < deadline_s, "no answers any more"
            time.sleep(0.05)


def sender_effects(daemon: Daemon) -> dict[str, dict[str, Any]]:
    listed = daemon.get("/v1/decisions?limit=1000")["decisions"]
    return {effect["transfer_id"]: effect for effect in listed if effect["half"] == "sender"}


def evidence(daemon: Daemon) -> Any:
    return daemon.get("/v1/posteriors")


def settled_evidence(daemon: Daemon) -> Any:
    """Once the planner, which learns every second, has learned everything that is stored."""
    deadline_s = time.monotonic() + 60
    found = evidence(daemon)
    while True:
        before = found
        time.sleep(1.5)
        if (found := evidence(daemon)) == before:
            return found
        assert time.monotonic() < deadline_s, "it goes on learning"


def test_five_kills_cost_no_client_anything_and_no_acknowledged_effect(
    model: Path, prompt: Callable[[int, int], list[int]], tmp_path: Path
) -> None:
    asyncio.run(keep_profile(tmp_path / "state", identify_model(model).fingerprint))
    policy = policy_text(DEMO, {}).replace("tenants:", "links: {default: {rate: 20Mbit}}\ntenants:")
    daemon = Daemon(tmp_path, {"demo.yaml": policy})
    environment = {"CONTROLD_ADDRESS": daemon.fleet_address, "CONTROLD_DEPLOYMENT": DEPLOYMENT}
    daemon.start()
    try:
        with ShapedLink(SLOW_BITS_PER_S) as link:
            settings = PairSettings(
                server=ServerSettings(model=model, radix_cache=False, environment=environment),
                log_dir=tmp_path / "servers",
                prefill_host=link.inside_address,
                decode_host=link.outside_address,
                prefill_prefix=link.inside,
            )
            with SglangPair(settings) as pair:
                daemon.attached_agents(["prefill", "decode"], 120)
                generation = daemon.get("/v1/policies")["generation"]
                known: dict[str, dict[str, Any]] = {}
                with Traffic(pair.client, prompt) as traffic:
                    for _ in range(KILLS):
                        traffic.wait_for(3)
                        # What the API shows is in the store; what is in the store was or may be acknowledged.
                        known |= sender_effects(daemon)
                        daemon.kill()
                        traffic.wait_for(1)
                        daemon.start()
                        after = sender_effects(daemon)
                        lost = [transfer for transfer in known if after.get(transfer) != known[transfer]]
                        assert not lost
                        assert daemon.get("/v1/policies")["generation"] == generation
                    traffic.wait_for(2)
                assert not traffic.errors
                deadline_s = time.monotonic() + 120
                while len(sender_effects(daemon)) < traffic.answered:
                    assert time.monotonic() < deadline_s, "an effect never came"
                    time.sleep(0.1)
                effects = sender_effects(daemon)
                assert len(effects) == traffic.answered
                coded = [effect for effect in effects.values() if effect["path"] == "coded"]
                assert len(coded) > traffic.answered / 2, "the last known good table goes on while nobody is there"
                before = settled_evidence(daemon)
                daemon.kill()
                daemon.start()
                assert evidence(daemon) == before
    finally:
        daemon.stop()
