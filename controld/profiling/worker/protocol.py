"""The search as a process: a request holds all that was measured, so that a process that died is simply replaced.

    -> {"id": 1, "study": "...", "space": "...", "seed": 7, "count": 2, "segments": 2, "observations": [...],
        "pending": [...], "max_segments": 8, "loss_floor": 1e-06}
    <- {"id": 1, "proposals": [{"lossy": {...}, "segments": 2, "source": "model"}], "seconds": 0.4, "detail": ""}
    <- {"id": 1, "error": "observation.loss: is infinite"}

What a process keeps of a study between its requests (hyperparameters, the encoded space) only saves time. Studies share
nothing: two of them over one space with one seed do not shift each other's models.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, TextIO

from controld.candidates.pareto import LOSS_FLOOR_NATS
from controld.contract.configuration import Configuration
from controld.contract.errors import ControldError, FieldError
from controld.contract.space import StrategySpace
from controld.profiling.search.observation import Observation, VariantCost
from controld.profiling.worker.bayesian import BayesianSearcher

_KEPT_SEARCHES = 4

SearchKey = tuple[str, str, int, int, int, float]


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the input ends."""
    kept: dict[SearchKey, BayesianSearcher] = {}
    # Whoever asked may be gone.
    with contextlib.suppress(BrokenPipeError):
        _write(answers, {"ready": True})
        for line in requests:
            _write(answers, answer(line, kept))


def answer(line: str, kept: dict[SearchKey, BayesianSearcher]) -> dict[str, Any]:
    """One answer. Whatever is wrong with a request is said in it.

    Args:
        line: the request.
        kept: searches by study, space, seed, `segments`, `max_segments` and `loss_floor`; the oldest goes.
    """
    started_s = time.monotonic()
    identity: Any = None
    try:
        request = json.loads(line)
        identity = request["id"]
        searcher = _searcher(request, kept)
        searcher.restart([_observation(item) for item in request["observations"]])
        pending = [Configuration(values) for values in request["pending"]]
        proposals = searcher.ask(int(request["count"]), pending)
    except ControldError as error:
        return {"id": identity, "error": str(error)}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {"id": identity, "error": f"no request: {error!r}"}
    return {
        "id": identity,
        "proposals": [{"lossy": dict(one.lossy), "segments": one.segments, "source": one.source} for one in proposals],
        "seconds": time.monotonic() - started_s,
        "detail": searcher.detail,
    }


def _searcher(request: Mapping[str, Any], kept: dict[SearchKey, BayesianSearcher]) -> BayesianSearcher:
    study_id = str(request["study"])
    space_json, seed, segments = str(request["space"]), int(request["seed"]), int(request["segments"])
    max_segments = int(request.get("max_segments", segments))
    loss_floor = float(request.get("loss_floor", LOSS_FLOOR_NATS))
    if not 0 < loss_floor < 1:
        raise FieldError("loss_floor", f"{loss_floor} is not between 0 and 1")
    key = (study_id, space_json, seed, segments, max_segments, loss_floor)
    if key not in kept:
        space = StrategySpace.from_json(space_json)
        kept[key] = BayesianSearcher(
            space, seed=seed, segments=segments, max_segments=max_segments, loss_floor=loss_floor
        )
        if len(kept) > _KEPT_SEARCHES:
            del kept[next(iter(kept))]
    return kept[key]


def _observation(item: Mapping[str, Any]) -> Observation:
    loss = item["loss"]
    if loss is not None and not isinstance(loss, int | float):
        raise FieldError("observation.loss", f"{loss!r} is no number")
    return Observation(
        lossy=Configuration(item["lossy"]),
        loss=float("nan") if loss is None else float(loss),
        loss_se=float(item["loss_se"]),
        segments=int(item["segments"]),
        costs=tuple(VariantCost(**cost) for cost in item["costs"]),
    )


def _write(answers: TextIO, document: Mapping[str, Any]) -> None:
    answers.write(json.dumps(document) + "\n")
    answers.flush()
