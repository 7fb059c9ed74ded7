"""Sequence parallelism over gloo: one process a rank, each with the whole weights, some tokens and some heads.

`RankGroup` has the functions of `Generator` and runs each of them on every rank at once; rank 0 is this process.
Latents are the same bits as on one rank where arithmetic is exact (a test runs it in float64); the block's linear
layers below bf16 are so always, see `torch_emulated`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroupGloo, ReduceOp  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllreduceOptions

from dataplanes.longlive.engine import EngineError
from dataplanes.longlive.linear.precision import LinearPrecision
from dataplanes.longlive.reference.checkpoint import build_transformer, full_transformer
from dataplanes.longlive.reference.generator import Generator, MadeChunk
from dataplanes.longlive.reference.kv_tensor import KvRule
from dataplanes.longlive.reference.model import ModelShape
from dataplanes.longlive.reference.rolling_cache import CacheLimits, ChunkPlace
from dataplanes.longlive.reference.shapes import Prompt

_WAIT = timedelta(seconds=60)
_JOIN_S = 5.0

P = ParamSpec("P")
T = TypeVar("T")


class GlooExchange:
    """Exchange over a process group of gloo.

    Args:
        store: a file that all ranks share.
        rank: this one.
        ranks: how many there are.
    """

    def __init__(self, store: Path, rank: int, ranks: int) -> None:
        self.rank = rank
        self.ranks = ranks
        self.sent_bytes = 0
        # Typed as what it is at run time: its stub leaves the functions out.
        self._group: Any = ProcessGroupGloo(FileStore(str(store), ranks), rank, ranks, _WAIT)

    def to_heads(self, x: Tensor) -> Tensor:
        """See `Exchange`."""
        return torch.cat(self._swap(torch.stack(x.chunk(self.ranks, dim=2))), dim=1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """See `Exchange`."""
        return torch.cat(self._swap(torch.stack(x.chunk(self.ranks, dim=1))), dim=2)

    def gather_tokens(self, x: Tensor) -> Tensor:
        """See `Exchange`."""
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        self.sent_bytes += x.nbytes * (self.ranks - 1)
        return torch.cat(parts)

    def largest(self, x: Tensor) -> Tensor:
        """See `Exchange`."""
        result, options = x.clone(), AllreduceOptions()
        options.reduceOp = ReduceOp.MAX  # type: ignore[assignment]
        self._group.allreduce([result], options).wait()
        self.sent_bytes += x.nbytes * (self.ranks - 1)
        return result

    def _swap(self, parts: Tensor) -> list[Tensor]:
        """Part r of every rank goes to rank r."""
        received = torch.empty_like(parts)
        self._group.alltoall_base(received, parts, [], []).wait()
        self.sent_bytes += parts.nbytes // self.ranks * (self.ranks - 1)
        return list(received.unbind(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankModel:
    """The model that every rank builds for itself.

    Args:
        checkpoint: as for `LoadSpec`.
        shape: of the transformer; heads are a multiple of the ranks.
        precisions: see `build_transformer`; none: float64 throughout, in which a test compares bits.
    """

    checkpoint: str
    shape: ModelShape
    precisions: tuple[LinearPrecision, ...]

    def generator(self, exchange: GlooExchange) -> Generator:
        """One rank's."""
        if not self.precisions:
            return Generator(full_transformer(self.checkpoint, self.shape).double(), exchange)
        return Generator(build_transformer(self.checkpoint, self.shape, self.precisions), exchange)


class RankGroup:
    """Ranks that generate together. After an error of code `engine.worker_died` it is of no further use but to stop.

    Args:
        model: that every rank builds.
        ranks: at least 2; divides the heads and a chunk's tokens.

    Raises:
        EngineError: a rank did not start, or the checkpoint is refused.
    """

    def __init__(self, model: RankModel, ranks: int) -> None:
        if ranks < 2 or model.shape.heads % ranks or model.shape.chunk_tokens % ranks:
            raise EngineError(f"ranks: {ranks} does not divide {model.shape.heads} heads and a chunk's tokens")
        self._folder = tempfile.TemporaryDirectory(prefix="controld-ranks-")
        store = Path(self._folder.name) / "store"
        context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[BaseProcess, Connection]] = []
        for rank in range(1, ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, store, rank, ranks, model), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        try:
            self._local = model.generator(GlooExchange(store, 0, ranks))
            self._collect()
        except RuntimeError as error:
            self.stop()
            raise _died(error) from error
        except EngineError:
            self.stop()
            raise

    @property
    def shape(self) -> ModelShape:
        return self._local.shape

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the other ranks."""
        return tuple(process.pid for process, _ in self._workers if process.pid is not None)

    def is_whole(self) -> bool:
        """Whether no rank ended by itself; from any thread."""
        return not wait([process.sentinel for process, _ in self._workers], timeout=0)

    def stop(self) -> None:
        """End the other ranks, whatever state they are in."""
        workers, self._workers = self._workers, []
        for process, connection in workers:
            with suppress(OSError):
                connection.send(None)
            connection.close()
            process.join(_JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def reload(self, checkpoint: str, precisions: tuple[LinearPrecision, ...]) -> None:
        """See `Generator`."""
        self._everywhere(self._local.reload, checkpoint, precisions)

    def set_precision(self, precision: LinearPrecision) -> None:
        """See `Generator`."""
        self._everywhere(self._local.set_precision, precision)

    def weight_bytes(self) -> int:
        """Over all ranks: each has all weights."""
        return self._local.weight_bytes() * (len(self._workers) + 1)

    def open(self, session_id: str, limits: CacheLimits, rule: KvRule) -> None:
        """See `Generator`."""
        self._everywhere(self._local.open, session_id, limits, rule)

    def close(self, session_id: str) -> None:
        """See `Generator`."""
        self._everywhere(self._local.close, session_id)

    def limit(self, limits: CacheLimits) -> None:
        """See `Generator`."""
        self._everywhere(self._local.limit, limits)

    def convert(self, rule: KvRule) -> None:
        """See `Generator`."""
        self._everywhere(self._local.convert, rule)

    def cache_bytes(self) -> int:
        """Over all ranks: each has as much as this one."""
        return self._local.cache_bytes() * (len(self._workers) + 1)

    def kept(self, session_id: str) -> tuple[int, ...]:
        """See `Generator`."""
        return self._local.kept(session_id)

    def make(self, session_id: str, place: ChunkPlace, prompt: Prompt, seed: int, steps: int) -> MadeChunk:
        """See `Generator`; times and sent bytes are this rank's."""
        return self._everywhere(self._local.make, session_id, place, prompt, seed, steps)

    def remember(self, session_id: str, place: ChunkPlace, prompt: Prompt, latents: Tensor) -> float | None:
        """See `Generator`."""
        return self._everywhere(self._local.remember, session_id, place, prompt, latents)

    def _everywhere(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one function of the generator on every rank.

        Raises:
            EngineError: every rank refused, or one died.
        """
        try:
            for _, connection in self._workers:
                connection.send((function.__name__, args))
        except OSError as error:
            raise _died(error) from error
        try:
            result = function(*args, **kwargs)
        except EngineError:
            self._collect(refused=True)
            raise
        except RuntimeError as error:
            # gloo says so when another rank is gone.
            raise _died(error) from error
        self._collect()
        return result

    def _collect(self, *, refused: bool = False) -> None:
        """Wait until every other rank has answered."""
        errors = []
        try:
            for _, connection in self._workers:
                if not connection.poll(_WAIT.total_seconds()):
                    raise EOFError("no answer")
                errors.append(connection.recv())
        except (OSError, EOFError) as error:
            raise _died(error) from error
        found = [error for error in errors if error is not None]
        if found and not refused:
            raise EngineError(f"another rank failed: {found[0]}", code="engine.worker_died")


def _died(error: Exception) -> EngineError:
    return EngineError(f"a rank died: {error}", code="engine.worker_died", hint="load the engine again")


def _work(connection: Connection, store: Path, rank: int, ranks: int, model: RankModel) -> None:
    """Another rank: does what rank 0 says until it says no more or is gone."""
    torch.set_num_threads(1)
    generator: Any = None
    with suppress(EOFError, OSError):
        while True:
            try:
                if generator is None:
                    generator = model.generator(GlooExchange(store, rank, ranks))
                else:
                    command = connection.recv()
                    if command is None:
                        return
                    name, args = command
                    getattr(generator, name)(*args)
                connection.send(None)
            except EngineError as error:
                connection.send(str(error))
                if generator is None:
                    return
            except RuntimeError:
                # Another rank is gone, and with it the group.
                return
