"""Start the pair (or the unsplit server), print where it listens as one JSON line, and stop it on SIGINT or SIGTERM."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

from controld.contract.errors import ControldError
from dataplanes.sglang.launcher.pair import SglangPair, UnsplitServer
from dataplanes.sglang.launcher.settings import DEFAULT_PAGE_TOKENS, PairSettings, RouterKind, ServerSettings

_WATCH_INTERVAL_S = 1.0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m dataplanes.sglang.launcher",
        description="Start real SGLang servers. CONTROLD_ADDRESS and the other CONTROLD_ variables pass through.",
    )
    parser.add_argument("what", choices=("pair", "unsplit"), nargs="?", default="pair")
    parser.add_argument("--model", type=Path, default=Path("build/models/smollm2-135m-instruct"))
    parser.add_argument("--log-dir", type=Path, default=Path("build/logs"))
    parser.add_argument("--router", choices=[kind.value for kind in RouterKind], default=RouterKind.MINI_LB.value)
    parser.add_argument("--page-tokens", type=int, default=DEFAULT_PAGE_TOKENS)
    parser.add_argument("--context-tokens", type=int, default=2560)
    parser.add_argument("--pool-tokens", type=int, default=16384)
    parser.add_argument("--chunked-prefill-tokens", type=int, default=4096)
    parser.add_argument("--no-radix-cache", action="store_true", help="forget prefixes after each request")
    parser.add_argument("--ready-deadline", type=float, default=420.0, metavar="SECONDS")
    parser.add_argument("extra", nargs="*", help="arguments for every SGLang server, after --")
    return parser.parse_args()


def _stop_requested() -> threading.Event:
    stop = threading.Event()

    def request_stop(number: int, frame: FrameType | None) -> None:
        stop.set()
        # Also breaks off a start that is still waiting; the context manager then cleans up.
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, request_stop)
    return stop


def main() -> int:
    """Run until told to stop; status 1 if a server dies."""
    arguments = _arguments()
    stop = _stop_requested()
    try:
        server = ServerSettings(
            model=arguments.model,
            page_tokens=arguments.page_tokens,
            context_tokens=arguments.context_tokens,
            pool_tokens=arguments.pool_tokens,
            chunked_prefill_tokens=arguments.chunked_prefill_tokens,
            radix_cache=not arguments.no_radix_cache,
            extra_arguments=arguments.extra,
        )
        running: SglangPair | UnsplitServer
        if arguments.what == "pair":
            running = SglangPair(
                PairSettings(
                    server=server,
                    log_dir=arguments.log_dir,
                    router=RouterKind(arguments.router),
                    ready_deadline_s=arguments.ready_deadline,
                )
            )
        else:
            running = UnsplitServer(server, log_dir=arguments.log_dir, ready_deadline_s=arguments.ready_deadline)
        with running:
            where = {process.name: process.url for process in running.servers}
            ready = {process.name: process.ready_after_s for process in running.servers}
            print(json.dumps({"url": where, "ready_after_s": ready, "logs": str(arguments.log_dir)}), flush=True)
            while not stop.wait(_WATCH_INTERVAL_S):
                running.check_running()
    except KeyboardInterrupt:
        return 0
    except ControldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
