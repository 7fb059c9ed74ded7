"""`python -m dataplanes.longlive.profiler`: a profiling worker for the CPU reference engine."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
from pathlib import Path

from controld.contract.errors import ControldError
from controld.contract.space import StrategySpace
from dataplanes.agent.profiling_worker import require_address

EXAMPLES = """\
examples:
  python -m dataplanes.longlive.profiler --address unix:///run/controld/fleet.sock
  controld profile --plane longlive --budget 60     and then, elsewhere: search its settings
  controld profile --plane longlive --grid --quick  or measure twelve of them

The advertised space has one rank: with more, times are those of cores that share one memory, and quality is the same.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataplanes.longlive.profiler",
        description="Measure settings of the CPU reference engine: what they lose on held-out clips, take and hold.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", default=os.environ.get("CONTROLD_ADDRESS", ""), help="the daemon's fleet address")
    parser.add_argument("--deployment", default="default", help="that the measurements are for (default: default)")
    parser.add_argument("--agent-id", default="", help="name of this worker (default: profiler-<host>-reference)")
    parser.add_argument("--checkpoint", default="trained", help="trained (default), untrained, or a folder")
    parser.add_argument(
        "--space", type=Path, metavar="FILE", help="advertise this part of the space only (JSON, fewer values)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of the engine (default: 1, as it serves)")
    return parser


def _read_space(file: Path) -> StrategySpace:
    try:
        return StrategySpace.from_json(file.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ControldError(f"no space: {error}", code="profiler.space") from error


def _space(part: StrategySpace | None) -> StrategySpace:
    from dataplanes.longlive import settings
    from dataplanes.longlive.reference.setting import SPACE

    if part is None:
        return SPACE.restrict({settings.RANKS: (1,)})
    part.require_part_of(SPACE)
    return part


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.threads < 1:
        parser.error("--threads is at least 1")
    # Kernels are native code: a crash should leave the place where it happened in the log.
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        require_address(options.address)
        part = None if options.space is None else _read_space(options.space)
        # torch takes seconds to import: bad arguments are refused before that.
        import torch

        from dataplanes.longlive.profiler.trial import VideoTrialRunner
        from dataplanes.longlive.profiler.worker import WorkerSettings, serve
        from dataplanes.longlive.reference.engine import ReferenceEngine
        from dataplanes.longlive.reference.quality import QualityMeter

        torch.set_num_threads(options.threads)
        space = _space(part)
        runner = VideoTrialRunner(space, ReferenceEngine, QualityMeter(options.checkpoint), options.checkpoint)
        settings = WorkerSettings(
            address=options.address,
            deployment=options.deployment,
            agent_id=options.agent_id,
            checkpoint=options.checkpoint,
            device=ReferenceEngine().capabilities().device,
        )
        serve(runner, settings)
    except ControldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
