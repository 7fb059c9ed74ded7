"""What to start and how: pure functions from settings to command lines and environments."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Self

from controld.contract.errors import ControldError
from dataplanes.sglang import cpu_support
from dataplanes.sglang.link import ShapedLink

# One page of SmolLM2 is 64 tokens x 3 heads x 64 values x 2 bytes = 24,576 bytes in each of its 60 layer buffers.
DEFAULT_PAGE_TOKENS = 64
ADMIN_KEY = "controld"


class SettingsError(ControldError):
    """The launcher was asked for something that cannot be started."""


class Role(Enum):
    """What a server does; the value is SGLang's name for the mode."""

    PREFILL = "prefill"
    DECODE = "decode"
    UNSPLIT = "null"


class RouterKind(Enum):
    """Which router stands in front of the pair."""

    MINI_LB = "mini_lb"  # sglang-router's Python load balancer
    GATEWAY = "gateway"  # sglang-router's Rust gateway; drops extra_key and priority of chat completions

    @property
    def ready_path(self) -> str:
        """Answers 200 once requests can be routed; the gateway is healthy before it knows its servers."""
        return "/readiness" if self is RouterKind.GATEWAY else "/health"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings that the servers of one set-up share.

    Args:
        model: folder in Hugging Face layout.
        page_tokens: SGLang's page size in tokens; groups of tokens that a codec forms divide it or are divided by it.
        context_tokens: longest prompt plus answer.
        pool_tokens: tokens that the KV pool holds.
        max_running_requests: requests that run at once in each server.
        chunked_prefill_tokens: longer prompts are prefilled (and sent) in pieces of this size; a multiple of the page.
        radix_cache: keep prefixes between requests.
        transfer_timeout_s: how long Mooncake waits for one batch of writes before it fails the session.
        torch_threads: threads each server computes with.
        compute_dtype: dtype of weights and activations. Matrix products in bfloat16 run five times slower than in
            float32 on x86 without bfloat16 instructions.
        kv_dtype: dtype of the KV pool, and so of what is transferred.
        extra_arguments: passed to every server as they are.
        environment: added to every server's environment.
    """

    model: Path
    page_tokens: int = DEFAULT_PAGE_TOKENS
    context_tokens: int = 2560
    pool_tokens: int = 16384
    max_running_requests: int = 8
    chunked_prefill_tokens: int = 4096
    radix_cache: bool = True
    transfer_timeout_s: int = 300
    torch_threads: int = 1
    compute_dtype: str = "float32"
    kv_dtype: str = "bfloat16"
    extra_arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (self.model / "config.json").is_file():
            raise SettingsError(
                f"no model in {self.model}", code="launcher.no_model", hint="make setup converts the small model"
            )
        for name in ("page_tokens", "context_tokens", "pool_tokens", "max_running_requests", "torch_threads"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: must be at least 1", code="launcher.bad_setting")
        if self.chunked_prefill_tokens % self.page_tokens:
            raise SettingsError(
                f"chunked_prefill_tokens: {self.chunked_prefill_tokens} is no multiple of "
                f"page_tokens {self.page_tokens}",
                code="launcher.bad_setting",
            )
        if self.pool_tokens < self.context_tokens:
            raise SettingsError(
                f"pool_tokens: {self.pool_tokens} is less than context_tokens {self.context_tokens}",
                code="launcher.bad_setting",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSettings:
    """A prefill server, a decode server and a router.

    Args:
        server: what both servers share.
        log_dir: folder for one log file per process; created.
        prefill_host, decode_host: address that each server listens on and advertises to its peer.
        prefill_prefix: command that the prefill server is run under, to enter a network namespace.
        router: which router; it and the decode server run in the caller's network.
        prefill_environment, decode_environment: added to one server's environment.
        ready_deadline_s: the whole set must answer within this time.
    """

    server: ServerSettings
    log_dir: Path
    prefill_host: str = "127.0.0.1"
    decode_host: str = "127.0.0.1"
    prefill_prefix: Sequence[str] = ()
    router: RouterKind = RouterKind.MINI_LB
    prefill_environment: Mapping[str, str] = field(default_factory=dict)
    decode_environment: Mapping[str, str] = field(default_factory=dict)
    ready_deadline_s: float = 420.0

    def over_link(self, link: ShapedLink) -> Self:
        """The same pair with the prefill server at the far end of `link`, which must be up."""
        return replace(
            self,
            prefill_host=link.inside_address,
            decode_host=link.outside_address,
            prefill_prefix=tuple(link.inside),
        )


def server_command(settings: ServerSettings, role: Role, *, host: str, port: int, bootstrap_port: int) -> list[str]:
    """Command line of one SGLang server."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(settings.model.resolve())]
    command += ["--host", host, "--port", str(port)]
    command += ["--context-length", str(settings.context_tokens), "--page-size", str(settings.page_tokens)]
    command += ["--max-total-tokens", str(settings.pool_tokens)]
    command += ["--max-running-requests", str(settings.max_running_requests)]
    command += ["--chunked-prefill-size", str(settings.chunked_prefill_tokens)]
    command += ["--max-prefill-tokens", str(max(settings.chunked_prefill_tokens, settings.context_tokens))]
    command += ["--dtype", settings.compute_dtype, "--kv-cache-dtype", settings.kv_dtype]
    # The pool's size is fixed above. The fraction only decides when SGLang refuses to start for lack of memory, and
    # what it compares is the whole machine's, so that neighbours count against a small one.
    command += ["--mem-fraction-static", "0.9", "--random-seed", "0", "--grammar-backend", "none"]
    # Left to itself the decode server's host pool wants 10 GiB of free memory beside it.
    command += ["--hicache-ratio", "0.2"]
    command += ["--enable-metrics", "--enable-cache-report", "--admin-api-key", ADMIN_KEY, "--sleep-on-idle"]
    if cpu_support.needed():
        command += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        # With overlap a prefix hit records a CUDA event.
        command += ["--disable-overlap-schedule"]
    if not settings.radix_cache:
        command += ["--disable-radix-cache"]
    if role is not Role.UNSPLIT:
        command += ["--disaggregation-mode", role.value, "--disaggregation-transfer-backend", "mooncake_tcp"]
        command += ["--disaggregation-bootstrap-port", str(bootstrap_port)]
    return [*command, *settings.extra_arguments]


def server_environment(
    settings: ServerSettings, *, host: str, extra: Mapping[str, str], base: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of one SGLang server: the caller's, and what SGLang, Mooncake and torch read.

    `CONTROLD_ADDRESS` and its kin pass through from the caller's environment; without them the plugin is inert.
    """
    environment = dict(os.environ if base is None else base)
    threads = str(settings.torch_threads)
    environment |= {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # Each server binds and advertises its own address, so that the pair can stand on two networks.
        "SGLANG_HOST_IP": host,
        "HOST_IP": host,
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "120",
        "MC_TRANSFER_TIMEOUT": str(settings.transfer_timeout_s),
        # A write that Mooncake reports as done has then been applied at the peer, which is what lets a message sent
        # afterwards speak of it. Its older framing ("1") reports at once what still sits in the socket's buffer.
        "MC_TCP_PROTO": "2",
        # Counts from when the last byte has entered the socket's buffer, of which a slow link drains little a second.
        "MC_TCP_STATUS_TIMEOUT_SEC": str(settings.transfer_timeout_s),
        # One write a page and layer, if a prompt's pages lie apart: 1,920 for 2,048 tokens. Mooncake queues 1,024 and
        # gives the rest one second, which a slow link needs longer than.
        "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
        "MC_TCP_ADMISSION_TIMEOUT_MS": "600000",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        # Waiting worker threads must not spin: codec threads share the cores.
        "OMP_WAIT_POLICY": "passive",
    }
    if cpu_support.needed():
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        python_path = [str(cpu_support.STAND_INS), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(python_path)
    return environment | dict(settings.environment) | dict(extra)


def router_command(
    kind: RouterKind, *, host: str, port: int, prefill_url: str, bootstrap_port: int, decode_url: str, metrics_port: int
) -> list[str]:
    """Command line of the router."""
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", prefill_url, str(bootstrap_port), "--decode", decode_url]
    command += ["--host", host, "--port", str(port), "--policy", "random", "--log-level", "warn"]
    command += ["--prometheus-host", host, "--prometheus-port", str(metrics_port)]
    command += ["--request-timeout-secs", "600"]
    if kind is RouterKind.MINI_LB:
        command += ["--mini-lb"]
    return command
