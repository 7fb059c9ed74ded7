"""`python -m dataplanes.sglang.profiler`: a profiling worker for one model, or one grid from a file."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from controld.contract.errors import ControldError
from controld.contract.trial import TrialOutcome, TrialTask

if TYPE_CHECKING:
    from dataplanes.sglang.profiler.worker import WorkerSettings


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataplanes.sglang.profiler",
        description="Measure KV configurations on a model: quality loss, bytes and codec seconds.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face model folder")
    parser.add_argument("--texts", type=Path, metavar="DIR", help="texts by workload: DIR/<workload>.jsonl, .txt")
    parser.add_argument(
        "--artefacts",
        type=Path,
        metavar="DIR",
        help="calibrated artefacts, made by dataplanes.sglang.profiler.calibrate",
    )
    parser.add_argument(
        "--space",
        type=Path,
        metavar="FILE",
        help="advertise this part of the space only (`space` in `controld space --json`, fewer values or more rules)",
    )
    parser.add_argument("--address", help="the daemon's fleet address (default: CONTROLD_ADDRESS)")
    parser.add_argument(
        "--deployment", default="default", help="deployment that the measurements are for (default: default)"
    )
    parser.add_argument("--agent-id", help="name of this worker (default: profiler-<host>-<model>)")
    parser.add_argument("--page-tokens", type=int, default=64, help="page size of the KV pools (default: 64)")
    parser.add_argument(
        "--frame-bytes",
        type=int,
        default=1_500_000,
        help="raw bytes of a frame, as the data plane cuts transfers (default: 1500000)",
    )
    parser.add_argument(
        "--codec-threads", type=int, default=1, help="threads for codecs, as a serving process gives them (default: 1)"
    )
    parser.add_argument(
        "--evaluation-threads", type=int, help="threads for the model (default: all, on Ray the actor's num_cpus)"
    )
    parser.add_argument("--once", type=Path, metavar="GRID.json", help="measure this grid without a daemon")
    parser.add_argument("--out", type=Path, metavar="RESULTS.json", help="where --once writes")
    parser.add_argument(
        "--executor", choices=("process", "ray"), default="process", help="where trials run (default: in this process)"
    )
    ray = parser.add_argument_group(
        "--executor ray", "one agent of the daemon, and one Ray actor, for each trial at once"
    )
    ray.add_argument(
        "--ray-address", metavar="ADDRESS", help="auto (default): the Ray that runs; local: one of our own"
    )
    ray.add_argument("--trials-at-once", type=int, metavar="N", help="how many actors (default: 1)")
    ray.add_argument(
        "--resources",
        metavar="JSON",
        help="""of each actor (default: '{"num_cpus": 1}'; also num_gpus, memory, resources)""",
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if (options.once is None) != (options.out is None):
        parser.error("--once and --out go together")
    if options.executor == "ray" and options.once is not None:
        parser.error("--once runs in this process")
    given = [options.ray_address, options.trials_at_once, options.resources]
    if options.executor != "ray" and any(value is not None for value in given):
        parser.error("--ray-address, --trials-at-once and --resources go with --executor ray")


def _report(task: TrialTask, outcome: TrialOutcome) -> None:
    losses = [loss.loss_nats for loss in outcome.losses]
    mean = f"{sum(losses) / len(losses):.5f} nats" if losses else "no loss"
    print(
        f"{task.trial_id} {outcome.status.value:10} {outcome.seconds:6.1f} s  {mean}  "
        f"{task.lossy.canonical_json} {outcome.detail}",
        flush=True,
    )


def _all_threads() -> int:
    return os.cpu_count() or 1


def _serve_on_ray(options: argparse.Namespace, settings: WorkerSettings) -> NoReturn:
    from dataplanes.sglang.profiler.ray_executor import AUTO, BenchSettings, Cluster, RayResources, serve_on_ray
    from dataplanes.sglang.profiler.trial import TimingPlan

    resources = RayResources.parse(options.resources or "{}")
    timing = TimingPlan(
        codec_threads=options.codec_threads,
        evaluation_threads=options.evaluation_threads or max(1, int(resources.num_cpus)),
    )
    bench = BenchSettings(
        # Actors have working directories of their own.
        model_dir=options.model.absolute(),
        texts_dir=options.texts.absolute() if options.texts else None,
        page_tokens=options.page_tokens,
        frame_bytes=options.frame_bytes,
        artefacts_dir=options.artefacts.absolute() if options.artefacts else None,
        space_file=options.space.absolute() if options.space else None,
        timing=timing,
    )
    slots = 1 if options.trials_at_once is None else options.trials_at_once
    serve_on_ray(lambda: Cluster(options.ray_address or AUTO, resources), bench, settings, slots=slots)


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    # Codecs run native code: a crash should leave the place where it happened in the log.
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        # torch and transformers take seconds to import: bad arguments are refused before that.
        from dataplanes.sglang.profiler.model_bench import ModelBench
        from dataplanes.sglang.profiler.trial import TimingPlan, TrialRunner
        from dataplanes.sglang.profiler.worker import WorkerSettings, serve

        settings = WorkerSettings(
            address=options.address or os.environ.get("CONTROLD_ADDRESS", ""),
            deployment=options.deployment,
            agent_id=options.agent_id,
            codec_threads=options.codec_threads,
        )
        if options.executor == "ray":
            _serve_on_ray(options, settings)
        bench = ModelBench(
            options.model,
            options.texts,
            page_tokens=options.page_tokens,
            frame_bytes=options.frame_bytes,
            artefacts_dir=options.artefacts,
            space_file=options.space,
        )
        timing = TimingPlan(
            codec_threads=options.codec_threads, evaluation_threads=options.evaluation_threads or _all_threads()
        )
        runner = TrialRunner(bench.space, bench.bank_for, bench.codec_for, timing)
        if options.once is not None:
            from dataplanes.sglang.profiler.once import read_tasks, run_once

            return 0 if run_once(read_tasks(options.once), runner, options.out, _report) else 1
        serve(bench, runner, settings)
    except ControldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
