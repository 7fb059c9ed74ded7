"""The experiment: a daemon, a profiled model, the real pair over a shaped link, every prompt once with every arm."""

from __future__ import annotations

import json
import platform
import random
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TextIO

from controld.contract.errors import ControldError
from dataplanes.sglang.demo.analysis import Sample, enough_pairs
from dataplanes.sglang.demo.daemon import Daemon, DaemonError
from dataplanes.sglang.demo.plan import ARMS, CONTROLD, ExperimentPlan, Phase
from dataplanes.sglang.demo.policies import (
    DEPLOYMENT,
    choose_separating_phase,
    choose_statics,
    extra_key_of,
    pinned_arms,
    policy_text,
    service_class_of,
)
from dataplanes.sglang.launcher import PairSettings, ServerSettings, SglangClient, SglangPair
from dataplanes.sglang.link import ShapedLink
from dataplanes.sglang.model_identity import identify_model
from dataplanes.sglang.profiler.corpus import python_manual

CONTINUATION_TOKENS = 128
SERVER_THREADS = 1
"""Threads that prefill and decode compute with; codecs are timed under the same number."""

_EFFECT_DEADLINE_S = 10.0
_ATTACH_DEADLINE_S = 120.0
_QUIET_S = 3.0


class Progress(Protocol):
    """Where the experiment says how far it is."""

    def stage(self, title: str, total: int) -> None:
        """A new stage of `total` steps begins."""
        ...

    def step(self, text: str = "") -> None:
        """One step is done."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One text of the experiment: what is sent, and how it really goes on (for measuring quality afterwards)."""

    phase: str
    pair: int
    token_ids: tuple[int, ...]
    continuation_ids: tuple[int, ...]


class Prompts:
    """Texts that no profile was measured on and nothing was calibrated on: the part of the corpus that is served.

    Args:
        model: folder of the model, for its tokenizer.
    """

    def __init__(self, model: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
        text = "\n\n".join(python_manual().served)
        self._tokens: list[int] = tokenizer(text)["input_ids"]
        self._seed = seed

    def get(self, phase: str, pair: int, tokens: int) -> Prompt:
        """The prompt of this phase and number: always the same text for the same arguments."""
        length = tokens + CONTINUATION_TOKENS
        start = random.Random(f"{self._seed}/{phase}/{pair}/text").randrange(len(self._tokens) - length)
        cut = self._tokens[start : start + length]
        return Prompt(phase=phase, pair=pair, token_ids=tuple(cut[:tokens]), continuation_ids=tuple(cut[tokens:]))


class Log:
    """Append-only JSON lines; a reader may follow along."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("w")
        self._lock = threading.Lock()

    def write(self, record: Mapping[str, Any]) -> None:
        """One line, flushed."""
        with self._lock:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def machine_facts() -> dict[str, str]:
    """What figures depend on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    cores = sum(line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines())
    versions = {name: version(name) for name in ("sglang", "torch", "mooncake-transfer-engine-non-cuda", "grpcio")}
    return {"processor": model, "cores": str(cores), "python": platform.python_version(), **versions}


class Experiment:
    """One run of a plan; everything it leaves is below `out`.

    Args:
        plan: what to do.
        model: folder of the model.
        out: `client.jsonl`, `link.jsonl`, `candidates.json`, `setup.json`, the daemon's folder and the servers' logs.
        progress: where to say how far it is.
        artefacts: folder of calibrated codec artefacts.
    """

    def __init__(
        self, plan: ExperimentPlan, model: Path, out: Path, progress: Progress, *, artefacts: Path | None = None
    ) -> None:
        self.plan = plan
        self.model = model
        self.artefacts = artefacts
        self.out = out
        self.progress = progress
        self._started_s = time.monotonic()
        self._run_id = secrets.token_hex(3)

    def _now_s(self) -> float:
        return round(time.monotonic() - self._started_s, 3)

    @contextmanager
    def daemon(self) -> Iterator[Daemon]:
        """The daemon with its profiles measured (or found from an earlier run) and the policy of the experiment."""
        # The pinned arms are known only after profiling, so the policy is loaded twice.
        root = self.out / "daemon"
        with Daemon(root, {"demo.yaml": policy_text(self.plan, {})}, self.artefacts) as daemon:
            candidates = self._candidates(daemon)
            bytes_per_token = identify_model(self.model).kv_bytes_per_token
            statics = choose_statics(candidates, self.plan, bytes_per_token)
            pinned = pinned_arms(statics)
            daemon.write_policies({"demo.yaml": policy_text(self.plan, pinned)})
            daemon.reload()
            (self.out / "candidates.json").write_text(json.dumps(candidates, indent=1))
            setup = {
                "static_configurations": {arm: candidate["configuration"] for arm, candidate in statics.items()},
                "separating_phase": choose_separating_phase(candidates, statics, self.plan, bytes_per_token),
                "pinned": pinned,
                "seed": self.plan.seed,
                "max_quality_loss_nats": self.plan.max_quality_loss_nats,
                "machine": machine_facts(),
            }
            (self.out / "setup.json").write_text(json.dumps(setup, indent=1))
            yield daemon

    def _candidates(self, daemon: Daemon) -> list[dict[str, Any]]:
        fingerprint = identify_model(self.model).fingerprint
        if any(self._is_finished(study, fingerprint) for study in daemon.get("/v1/studies")["studies"]):
            return self._profiles(daemon, fingerprint)
        command = [sys.executable, "-m", "dataplanes.sglang.profiler", "--model", str(self.model)]
        command += ["--address", daemon.fleet_address, "--deployment", DEPLOYMENT]
        command += ["--codec-threads", str(SERVER_THREADS)]
        command += ["--artefacts", str(self.artefacts)] if self.artefacts else []
        with (self.out / "profiler.log").open("wb") as log:
            worker = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            daemon.attached_agents(["profiler"], _ATTACH_DEADLINE_S)
            wanted = {"grid": self.plan.grid, "segments": self.plan.segments_per_length}
            study = daemon.request("POST", "/v1/studies", {"plane": "sglang", "workload": "general", **wanted})
            self._follow(daemon, study["id"])
        finally:
            worker.terminate()
            worker.wait()
        return self._profiles(daemon, fingerprint)

    def _is_finished(self, study: Mapping[str, Any], fingerprint: str) -> bool:
        """Whether an earlier run measured this grid, at least as closely; one that was interrupted did not."""
        same = (study["state"], study["model"], study["grid"]) == ("finished", fingerprint, self.plan.grid)
        return same and int(study["segments"]) >= self.plan.segments_per_length

    @staticmethod
    def _profiles(daemon: Daemon, fingerprint: str) -> list[dict[str, Any]]:
        listed = daemon.get("/v1/candidates?workload=general")["candidates"]
        return [candidate for candidate in listed if candidate["model_fingerprint"] == fingerprint]

    def _follow(self, daemon: Daemon, study_id: str) -> None:
        state = daemon.get(f"/v1/studies/{study_id}")
        self.progress.stage("profiling the model", state["trials_total"])
        done = 0
        while True:
            state = daemon.get(f"/v1/studies/{study_id}")
            for _ in range(state["trials_done"] - done):
                self.progress.step()
            done = state["trials_done"]
            if state["state"] not in ("pending", "running"):
                break
            time.sleep(0.5)
        if state["state"] != "finished":
            raise DaemonError(f"the study ended as {state['state']}: {state}", code="demo.study_failed")

    def run(self) -> None:
        """Profile, start the pair, and do all phases.

        Raises:
            ControldError: something of the set-up does not come up, or the plane is not attached.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            daemon = stack.enter_context(self.daemon())
            link = stack.enter_context(ShapedLink(self.plan.phases[0].rates_bits_per_s[0]))
            self.progress.stage("starting prefill, decode and router", 1)
            pair = stack.enter_context(SglangPair(self._pair_settings(daemon, link)))
            agents = daemon.attached_agents(["prefill", "decode"], _ATTACH_DEADLINE_S)
            # Calibrated artefacts reach the servers first, then the tables that name them.
            daemon.wait_until_settled(["prefill", "decode"], _QUIET_S, _ATTACH_DEADLINE_S)
            self.progress.step()
            client_log, link_log = Log(self.out / "client.jsonl"), Log(self.out / "link.jsonl")
            client_log.write({"kind": "attached", "agents": [agent["agent_id"] for agent in agents]})
            prompts = Prompts(self.model, self.plan.seed)
            self._warm_up(pair.client(), prompts)
            for phase in self.plan.phases:
                self._phase(phase, daemon, link, pair.client(), prompts, client_log, link_log)
            if self.plan.loaded_requests:
                self._loaded(daemon, link, pair, prompts, client_log, link_log)

    def _pair_settings(self, daemon: Daemon, link: ShapedLink) -> PairSettings:
        environment = {"CONTROLD_ADDRESS": daemon.fleet_address, "CONTROLD_DEPLOYMENT": DEPLOYMENT}
        server = ServerSettings(
            model=self.model, radix_cache=False, torch_threads=SERVER_THREADS, environment=environment
        )
        return PairSettings(server=server, log_dir=self.out / "servers").over_link(link)

    def _warm_up(self, client: SglangClient, prompts: Prompts) -> None:
        self.progress.stage("warming up", self.plan.warm_up_prompts * len(ARMS))
        for pair in range(self.plan.warm_up_prompts):
            for arm in ARMS:
                prompt = prompts.get("warm-up", pair, 256)
                client.generate(prompt.token_ids, max_new_tokens=4, extra_key=extra_key_of(arm))
                self.progress.step(arm)

    def _phase(
        self,
        phase: Phase,
        daemon: Daemon,
        link: ShapedLink,
        client: SglangClient,
        prompts: Prompts,
        client_log: Log,
        link_log: Log,
    ) -> None:
        plan = self.plan
        self.progress.stage(f"phase {phase.name}", plan.min_pairs * len(ARMS))
        samples: list[Sample] = []
        rate, began_s = 0, self._now_s()
        for pair in range(plan.max_pairs):
            wanted = phase.rate_at(pair, plan.min_pairs)
            if wanted != rate:
                rate = wanted
                link.set_rate(rate)
                link_log.write({"second": self._now_s(), "rate_bits_per_s": rate, "phase": phase.name})
            prompt = prompts.get(phase.name, pair, plan.tokens_of(pair))
            for arm in plan.arm_order(phase.name, pair):
                samples.append(self._request(client, daemon, prompt, arm, client_log))
                self.progress.step(f"{phase.name}: {arm} {samples[-1].ttft_s:.2f} s")
            limits = {"min_pairs": plan.min_pairs, "max_pairs": plan.max_pairs, "half_width": plan.half_width}
            if enough_pairs(samples, phase.name, seed=plan.seed, **limits):  # type: ignore[arg-type]
                break
            if pair + 1 >= plan.min_pairs and self._now_s() - began_s > plan.phase_limit_s:
                break

    def _request(self, client: SglangClient, daemon: Daemon, prompt: Prompt, arm: str, log: Log) -> Sample:
        second = self._now_s()
        request_id = f"{self._run_id}-{prompt.phase}-{prompt.pair}-{arm}"
        answer = client.generate(
            prompt.token_ids,
            max_new_tokens=self.plan.output_tokens,
            extra_key=extra_key_of(arm),
            request_id=request_id,
        )
        sample = Sample(
            phase=prompt.phase,
            pair=prompt.pair,
            arm=arm,
            prompt_tokens=len(prompt.token_ids),
            ttft_s=answer.ttft_s,
            jct_s=answer.jct_s,
        )
        effect = self._effect(daemon, service_class_of(arm), request_id)
        log.write(
            {
                "kind": "request",
                "second": second,
                "sample": asdict(sample),
                "effect": effect,
                "output_ids": answer.token_ids,
            }
        )
        return sample

    def _effect(self, daemon: Daemon, service_class: str, request_id: str) -> dict[str, Any]:
        """The sender's half of the transfer of a request, whose id begins the transfer's."""
        deadline = time.monotonic() + _EFFECT_DEADLINE_S
        while time.monotonic() < deadline:
            listed = daemon.get(f"/v1/decisions?limit=8&class={service_class}")["decisions"]
            for effect in listed:
                if effect["half"] == "sender" and str(effect["transfer_id"]).startswith(request_id):
                    return dict(effect)
            time.sleep(0.03)
        raise ControldError(
            f"no effect of class {service_class} reached the daemon in {_EFFECT_DEADLINE_S} s", code="demo.no_effect"
        )

    def _loaded(
        self,
        daemon: Daemon,
        link: ShapedLink,
        pair: SglangPair,
        prompts: Prompts,
        client_log: Log,
        link_log: Log,
    ) -> None:
        """Several requests in flight on the medium link, arm after arm, with the same arrivals."""
        rate = next(phase for phase in self.plan.phases if phase.name == "medium").rates_bits_per_s[0]
        link.set_rate(rate)
        link_log.write({"second": self._now_s(), "rate_bits_per_s": rate, "phase": "loaded"})
        count = self.plan.loaded_requests
        self.progress.stage("loaded run", count * len(ARMS))
        gaps = random.Random(f"{self.plan.seed}/loaded")
        starts, now = [], 0.0
        for _ in range(count):
            starts.append(now)
            now += gaps.expovariate(1 / LOADED_GAP_S)
        for arm in ARMS:
            begin = time.monotonic()
            threads = [
                threading.Thread(
                    target=self._loaded_request, args=(pair.client(), prompts, arm, index, begin + start, client_log)
                )
                for index, start in enumerate(starts)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
                self.progress.step(f"loaded: {arm}")

    def _loaded_request(
        self, client: SglangClient, prompts: Prompts, arm: str, index: int, at_s: float, log: Log
    ) -> None:
        prompt = prompts.get("loaded", index, self.plan.tokens_of(index))
        time.sleep(max(0.0, at_s - time.monotonic()))
        second = self._now_s()
        record: dict[str, Any] = {"kind": "loaded", "second": second, "arm": arm, "index": index}
        try:
            answer = client.generate(
                prompt.token_ids, max_new_tokens=self.plan.output_tokens, extra_key=extra_key_of(arm)
            )
        except ControldError as error:
            log.write({**record, "error": str(error)})
        else:
            log.write({**record, "ttft_s": answer.ttft_s, "jct_s": answer.jct_s})


LOADED_GAP_S = 2.0
"""Mean gap between arrivals of the loaded run: about half of what prefill can do."""


def read_log(out: Path) -> tuple[list[Sample], list[dict[str, Any]], list[dict[str, Any]], bool]:
    """Samples, their effects (with `phase` and `arm`), the other records, and whether the plane was attached."""
    samples: list[Sample] = []
    effects: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    for line in (out / "client.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] != "request":
            others.append(record)
            continue
        sample = Sample(**record["sample"])
        samples.append(sample)
        effects.append({**record["effect"], "phase": sample.phase, "arm": sample.arm, "second": record["second"]})
    return samples, effects, others, any(record["kind"] == "attached" for record in others)


def served_prompts(
    samples: Sequence[Sample], effects: Sequence[Mapping[str, Any]]
) -> dict[tuple[str, int], dict[str, str]]:
    """For every prompt, the arm id that each arm of the experiment really used."""
    used: dict[tuple[str, int], dict[str, str]] = {}
    for sample, effect in zip(samples, effects, strict=True):
        # What a fall-back had sent coded stays coded, so all of it counts as coded.
        taken = "raw" if effect["path"] == "raw" else effect["arm_id"]
        used.setdefault((sample.phase, sample.pair), {})[sample.arm] = taken
    return used


__all__ = [
    "CONTROLD",
    "Experiment",
    "Log",
    "Progress",
    "Prompt",
    "Prompts",
    "machine_facts",
    "read_log",
    "served_prompts",
]
