"""The search process: a request holds everything, and a bad one is answered."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from controld.contract.space import Parameter, StrategySpace
from controld.profiling.worker.bayesian import BayesianSearcher
from controld.profiling.worker.protocol import SearchKey, answer

SPACE = StrategySpace(
    parameters=(
        Parameter(name="levels", values=(4, 8, 16), ordered=True),
        Parameter(name="code", values=("bitpack",), lossy=False),
    )
)


def request(**changes: Any) -> dict[str, Any]:
    return {
        "id": 7, "study": "s", "space": SPACE.to_json(), "seed": 1, "count": 1, "segments": 2, "observations": [],
        "pending": [], **changes,
    }  # fmt: skip


def ask(**changes: Any) -> dict[str, Any]:
    return answer(json.dumps(request(**changes)), {})


def observation(levels: int, **changes: Any) -> dict[str, Any]:
    costs = [{"variant": "bitpack", "size_ratio": 0.3, "seconds_per_unit": 1e-9}]
    return {
        "lossy": {"levels": levels}, "loss": 0.1, "loss_se": 0.01, "segments": 2, "costs": costs, **changes
    }  # fmt: skip


def test_a_part_is_proposed_that_is_neither_measured_nor_pending() -> None:
    reply = ask(observations=[observation(4)], pending=[{"levels": 8}])
    assert [one["lossy"] for one in reply["proposals"]] == [{"levels": 16}]
    assert reply["id"] == 7 and reply["seconds"] >= 0


def test_a_kept_search_forgets_what_is_not_in_the_request() -> None:
    kept: dict[SearchKey, BayesianSearcher] = {}
    everything = [observation(levels) for levels in (4, 8, 16)]
    assert answer(json.dumps(request(observations=everything)), kept)["proposals"] == []
    assert len(answer(json.dumps(request()), kept)["proposals"]) == 1


def test_studies_that_differ_in_fidelity_share_no_search() -> None:
    kept: dict[SearchKey, BayesianSearcher] = {}
    for max_segments in (2, 8):
        assert "error" not in answer(json.dumps(request(max_segments=max_segments)), kept)
    assert len(kept) == 2


def test_studies_over_one_space_with_one_seed_share_no_search() -> None:
    kept: dict[SearchKey, BayesianSearcher] = {}
    for study in ("one", "other", "one"):
        assert "error" not in answer(json.dumps(request(study=study)), kept)
    one, other = kept.values()
    assert one is not other


def test_an_infeasible_part_has_no_loss() -> None:
    assert "error" not in ask(observations=[observation(4, loss=None)])


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "no request"),
        ("[]", "no request"),
        (json.dumps({**request(), "space": "{}"}), "space_json"),
        (json.dumps({name: value for name, value in request().items() if name != "study"}), "study"),
        (json.dumps(request(observations=[observation(5)])), "levels"),
        (json.dumps(request(observations=[observation(4, loss="x")])), "loss"),
        (json.dumps(request(observations=[observation(4, segments=-1)])), "segments"),
    ],
)
def test_a_bad_request_is_answered_with_what_is_wrong(line: str, named: str) -> None:
    assert named in answer(line, {})["error"]


@pytest.mark.slow
def test_the_process_answers_line_by_line_and_ends_with_its_input() -> None:
    lines = [json.dumps(request()), "nonsense", json.dumps(request(id=9))]
    done = subprocess.run(
        [sys.executable, "-m", "controld.profiling.worker"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    ready, first, refused, last = (json.loads(line) for line in done.stdout.splitlines())
    assert ready == {"ready": True}
    assert (first["id"], last["id"]) == (7, 9) and "error" in refused
    assert first["proposals"] == last["proposals"]
