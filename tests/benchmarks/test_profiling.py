"""The comparison of search engines: what it counts, that rivals play by the rules, and what is kept."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from controld.candidates.pareto import hypervolume, log_objectives
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import Condition, Forbidden, Parameter, StrategySpace
from controld.profiling.search.observation import VariantCost

# Not imported here: scikit-learn takes over a second in every test worker, and few tests need it.
for rival in ("optuna", "sklearn"):
    if importlib.util.find_spec(rival) is None:
        pytest.skip(f"{rival} is not installed", allow_module_level=True)
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import profiling  # noqa: E402 - benchmarks are scripts, not a package
import profiling_kvserve  # noqa: E402
import profiling_report  # noqa: E402
import profiling_rivals  # noqa: E402
import profiling_truth  # noqa: E402

SPACE = StrategySpace(
    parameters=(
        Parameter(name="transform", values=("none", "hadamard")),
        Parameter(name="quantise", values=("none", "levels", "fp8_e4m3")),
        Parameter(name="sink_tokens", values=(0, 1), ordered=True, default=0),
        Parameter(name="key_levels", values=(4, 8, 16, 32), ordered=True),
        Parameter(name="key_axis", values=("channel", "token")),
        Parameter(name="value_levels", values=(4, 8, 16), ordered=True),
        Parameter(name="code", values=("none", "bitpack", "entropy"), lossy=False),
    ),
    conditions=(
        Condition(parameter="sink_tokens", parent="quantise", parent_values=("levels", "fp8_e4m3")),
        *(
            Condition(parameter=name, parent="quantise", parent_values=("levels",))
            for name in ("key_levels", "key_axis", "value_levels")
        ),
    ),
    forbidden=(
        Forbidden(values={"transform": ("hadamard",), "quantise": ("none",)}, reason="nothing to transform for"),
        Forbidden(values={"quantise": ("none", "fp8_e4m3"), "code": ("bitpack",)}, reason="whole bytes"),
    ),
)
SMALL = SPACE.restrict({"key_levels": (4, 16), "value_levels": (4, 16), "key_axis": ("channel",)})
RIVALS = [name for name in profiling.ENGINES if name != profiling.OURS]


def synthetic_cost(part: Configuration, code: str) -> VariantCost:
    bits = {"none": 16.0, "fp8_e4m3": 8.0}.get(str(part["quantise"]))
    if bits is None:
        bits = (math.log2(int(part["key_levels"])) + math.log2(int(part["value_levels"]))) / 2
    coded = {"none": 8 * math.ceil(bits / 8), "bitpack": math.ceil(bits), "entropy": 0.9 * bits}[code]
    seconds = (
        1e-10 * (1 + 3 * (part["transform"] == "hadamard")) + {"none": 0, "bitpack": 1, "entropy": 9}[code] * 1e-10
    )
    return VariantCost(variant=code, size_ratio=coded / 16, seconds_per_unit=seconds)


def synthetic_loss(part: Configuration) -> float:
    if part["quantise"] != "levels":
        return 0.0 if part["quantise"] == "none" else 0.002 - 0.0005 * ("sink_tokens" in part)
    loss = 4.0 / int(part["key_levels"]) ** 2 + 1.0 / int(part["value_levels"]) ** 2
    loss *= 0.6 if part["transform"] == "hadamard" else 1.0
    return loss * (0.7 if part["key_axis"] == "channel" else 1.0) * (0.8 if "sink_tokens" in part else 1.0)


def table_of(space: StrategySpace = SPACE) -> profiling.GroundTruth:
    parts = tuple(space.enumerate(lossy_only=True))
    return profiling.GroundTruth(
        space=space,
        parts=parts,
        loss_nats=np.array([synthetic_loss(part) for part in parts]),
        loss_se_nats=np.full(len(parts), 1e-4),
        costs=tuple(
            tuple(synthetic_cost(part, str(full["code"])) for full in space.coders(part)) for part in parts
        ),
        seconds_per_part=0.5,
        fingerprint="synthetic",
    )  # fmt: skip


@pytest.fixture(scope="module")
def problem() -> profiling.Problem:
    return profiling.Problem.of(table_of())


@pytest.fixture(scope="module")
def small() -> profiling.Problem:
    return profiling.Problem.of(table_of(SMALL))


def test_the_share_is_the_hypervolume_of_what_was_measured_over_that_of_the_table(problem: profiling.Problem) -> None:
    points = [
        [(loss, cost.seconds_per_unit, cost.size_ratio) for cost in found]
        for loss, found in zip(problem.truth.loss_nats, problem.truth.costs, strict=True)
    ]
    axes = log_objectives(np.concatenate(points))
    ends = {"ideal": axes.min(axis=0), "nadir": axes.max(axis=0)}
    order = np.random.default_rng(3).permutation(len(problem.pool))
    incumbents = profiling.Incumbents(problem.yardstick)
    for count, number in enumerate(order, start=1):
        share = incumbents.add(int(number))
        measured = log_objectives(np.concatenate([points[n] for n in order[:count]]))
        assert share == pytest.approx(hypervolume(measured, **ends) / hypervolume(axes, **ends))
    assert share == pytest.approx(1.0)


def test_infeasible_parts_are_in_the_pool_and_bring_nothing(small: profiling.Problem) -> None:
    truth = small.truth
    losses, costs = truth.loss_nats.copy(), list(truth.costs)
    losses[5], costs[5] = np.nan, ()
    broken = profiling.Problem.of(replace(truth, loss_nats=losses, costs=tuple(costs)))
    assert profiling.Incumbents(broken.yardstick).add(5) == 0.0
    for name in RIVALS:
        run = profiling.replay(broken, name, 0, trials=len(truth.parts))
        assert len(run.shares) == len(truth.parts)
        assert run.shares[-1] == pytest.approx(1.0)


def test_the_start_is_the_same_for_every_engine_and_differs_by_seed(problem: profiling.Problem) -> None:
    starts = [profiling.replay(problem, name, 4, trials=profiling.START_TRIALS + 1).shares for name in RIVALS]
    assert len({shares[: profiling.START_TRIALS] for shares in starts}) == 1
    first, second = (problem.pool.start_design(profiling.START_TRIALS, seed) for seed in (4, 5))
    assert len(set(first)) == profiling.START_TRIALS
    assert first != second


def test_a_start_holds_every_format_although_some_have_few_parts(problem: profiling.Problem) -> None:
    formats = {problem.pool.parts[number]["quantise"] for number in problem.pool.start_design(20, 0)}
    assert formats == {"none", "levels", "fp8_e4m3"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_measures_every_part_once_and_then_says_that_nothing_is_left(
    small: profiling.Problem, name: str
) -> None:
    searcher = profiling.ENGINES[name](small, 1)
    start = small.pool.start_design(10, 1)
    for number in start:
        searcher.tell(small.truth.observation(number))
    left = set(small.truth.parts) - {small.truth.parts[number] for number in start}
    while left:
        (proposal,) = searcher.ask(1)
        left.remove(proposal.lossy)
        searcher.tell(small.truth.observation(small.pool.place(proposal.lossy)))
    assert searcher.ask(1) == []


@pytest.mark.parametrize("name", RIVALS)
def test_what_is_pending_is_not_proposed(problem: profiling.Problem, name: str) -> None:
    searcher = profiling.ENGINES[name](problem, 1)
    for number in range(6):
        searcher.tell(problem.truth.observation(number))
    pending = problem.truth.parts[6:-3]
    proposals = searcher.ask(9, pending)
    assert {proposal.lossy for proposal in proposals} == set(problem.truth.parts[-3:])


@pytest.mark.parametrize("name", RIVALS)
def test_the_same_seed_gives_the_same_run(problem: profiling.Problem, name: str) -> None:
    first, second = (profiling.replay(problem, name, 2, trials=23).shares for _ in range(2))
    assert first == second


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_optuna_is_told_a_trial_for_each_coder(problem: profiling.Problem, sampler: Any) -> None:
    searcher = profiling_rivals.OptunaSearcher(problem.pool, seed=0, sampler=sampler)
    number = next(n for n, part in enumerate(problem.pool.parts) if part["quantise"] == "levels")
    searcher.tell(problem.truth.observation(number))
    told = [(trial.params["code"], trial.values) for trial in searcher.study.get_trials()]
    costs = problem.truth.costs[number]
    axes = log_objectives([(problem.truth.loss_nats[number], c.seconds_per_unit, c.size_ratio) for c in costs])
    assert told == [(cost.variant, pytest.approx(axis)) for cost, axis in zip(costs, axes, strict=True)]


def test_nsga2_breeds_from_what_it_was_told(problem: profiling.Problem) -> None:
    searcher = profiling_rivals.OptunaSearcher(problem.pool, seed=0, sampler="nsga2")
    for number in range(40):
        searcher.tell(problem.truth.observation(number))
    # A mutated gene is drawn afresh and so is not among a child's inherited ones.
    inherited = set().union(*(searcher.study.ask().relative_params for _ in range(6)))
    assert inherited == {parameter.name for parameter in SPACE.parameters}


def test_a_forbidden_wish_becomes_the_nearest_free_part(problem: profiling.Problem) -> None:
    pool = problem.pool
    free = np.ones(len(pool), dtype=np.bool_)
    wish = {"transform": "hadamard", "quantise": "none"}
    nearest = pool.nearest(wish, free)
    distances = [
        sum(wish.get(name) != pool.space.value_of(name, part) for name in ("transform", "quantise"))
        for part in pool.parts
    ]
    assert distances[nearest] == min(distances)
    free[nearest] = False
    assert pool.nearest(wish, free) != nearest


def test_a_part_outside_the_pool_is_refused(problem: profiling.Problem) -> None:
    with pytest.raises(FieldError, match="not in the pool"):
        problem.pool.place(Configuration({"transform": "none", "quantise": "nvfp4"}))


@pytest.fixture(scope="module")
def levels() -> profiling.Problem:
    space = SPACE.restrict({"transform": ("hadamard",), "quantise": ("levels",)})
    truth = table_of(space)
    bits = [math.log2(int(part["key_levels"])) + math.log2(int(part["value_levels"])) for part in truth.parts]
    worse = [(part["key_axis"] == "token") + ("sink_tokens" not in part) for part in truth.parts]
    return profiling.Problem.of(replace(truth, loss_nats=0.012 * (9 - np.array(bits)) + 0.01 * np.array(worse)))


def kvserve_on(problem: profiling.Problem, iterations: int) -> profiling_kvserve.KVServeSearcher:
    compression = profiling_kvserve.known_compression(problem.truth.costs)
    searcher = profiling_kvserve.KVServeSearcher(
        problem.pool, compression, seed=0, threshold=97.0, iterations=iterations
    )
    for number in searcher.cold_start(4):
        searcher.tell(problem.truth.observation(number))
    return searcher


@pytest.mark.slow
def test_kvserve_finds_the_most_compression_within_its_tolerance(levels: profiling.Problem) -> None:
    searcher = kvserve_on(levels, iterations=200)
    feasible = 100 * np.exp(-levels.truth.loss_nats) >= 97.0
    for _ in range(8):
        searcher.tell(levels.truth.observation(levels.pool.place(searcher.ask(1)[0].lossy)))
    best = searcher.compression[feasible].max()
    assert (feasible & (searcher.compression == best)).sum() <= 3
    assert searcher.compression[feasible & searcher.measured].max() == best


@pytest.mark.slow
def test_kvserve_stops_when_pruning_left_nothing(levels: profiling.Problem) -> None:
    searcher = kvserve_on(levels, iterations=4)
    while not searcher.stopped:
        (proposal,) = searcher.ask(1)
        searcher.tell(levels.truth.observation(levels.pool.place(proposal.lossy)))
    assert not searcher.measured.all()


def run_of(engine: str, seed: int, *shares: float) -> profiling.Run:
    return profiling.Run(engine=engine, seed=seed, shares=shares, search_s=0.25)


def test_trials_are_counted_from_one_and_a_miss_is_infinite() -> None:
    run = run_of("random", 0, 0.5, 0.95, 0.96)
    assert profiling_report.trials_to(run, 0.95) == 2
    assert profiling_report.trials_to(run, 0.99) == math.inf


def test_the_last_line_names_medians_and_misses() -> None:
    ours = [run_of("controld", seed, *[0.9] * (seed + 1), 0.99, 1.0) for seed in range(3)]
    missed = [run_of("random", seed, *[0.9] * 8) for seed in range(3)]
    tpe = [run_of("tpe", 0, *[0.9] * 6, 0.995), *(run_of("tpe", seed, *[0.9] * 8) for seed in (1, 2))]
    assert profiling_report.last_line([*ours, *missed], 9000) == "space=9000 trials_to_99=3 best_other=>8"
    assert profiling_report.last_line([*ours, *missed, *tpe], 9000) == "space=9000 trials_to_99=3 best_other=>8"
    assert profiling_report.last_line([*ours, tpe[0]], 9000) == "space=9000 trials_to_99=3 best_other=7"


def test_an_engine_that_stops_keeps_what_it_has() -> None:
    assert profiling_report.curves([run_of("kvserve", 0, 0.5, 0.75)], 4).tolist() == [[0.5, 0.75, 0.75, 0.75]]


def test_kept_runs_are_of_one_table_and_survive_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    kept = profiling.RunFile(path, "a", 3)
    kept.append(run_of("random", 0, 0.5, 0.75))
    with path.open("a") as file:
        file.write('{"table": "a", "tri')
    kept.append(run_of("random", 1, 0.25))
    kept.append(run_of("random", 0, 0.625))
    profiling.RunFile(path, "b", 3).append(run_of("tpe", 7, 0.5))
    profiling.RunFile(path, "a", 4).append(run_of("tpe", 8, 0.5))
    assert kept.read() == {("random", 0): run_of("random", 0, 0.625), ("random", 1): run_of("random", 1, 0.25)}


def test_saved_curves_read_back(tmp_path: Path) -> None:
    runs = [run_of("random", 0, 0.5, 0.75), run_of("controld", 1, 0.25, 0.5)]
    path = tmp_path / "curves.json"
    profiling.save_curves(runs, table_of(), path)
    document, found = profiling.load_curves(path)
    assert found == [runs[1], runs[0]]
    assert (document["table"], document["parts"], document["seconds_per_part"]) == (
        "synthetic",
        len(table_of().parts),
        0.5,
    )


def test_engines_are_shown_ours_first() -> None:
    runs = [run_of(name, 0, 0.5) for name in ("tpe", "random", "controld", "tpe")]
    assert [(name, len(found)) for name, found in profiling_report.by_engine(runs).items()] == [
        ("controld", 1),
        ("random", 1),
        ("tpe", 2),
    ]


@pytest.fixture
def write_table(tmp_path: Path) -> Callable[[StrategySpace], Path]:
    def write(space: StrategySpace) -> Path:
        truth = table_of()
        header = {
            "raw_bytes": 16_000, "parts": len(truth.parts), "segments": 2, "shard": "1/1", "started_unix_s": 0,
            "space_sha256": hashlib.sha256(space.to_json().encode()).hexdigest(),
        }  # fmt: skip
        lines: list[dict[str, Any]] = [{"header": header}]
        for part, loss, costs in zip(truth.parts, truth.loss_nats, truth.costs, strict=True):
            coders = {c.variant: (round(16_000 * c.size_ratio), 1e-6, 2e-6) for c in costs}
            infeasible = "no" if part == truth.parts[3] else ""
            lines.append({"lossy": dict(part), "losses": (loss, loss), "infeasible": infeasible, "coders": coders})
        measured = tmp_path / "truth.jsonl"
        measured.write_text("".join(json.dumps(line) + "\n" for line in lines))
        profiling_truth.write_table([measured], tmp_path / "truth.csv.gz")
        (tmp_path / "space.json").write_text(SPACE.to_json())
        return tmp_path / "truth.csv.gz"

    return write


def test_a_table_is_read_with_its_space(write_table: Callable[[StrategySpace], Path], tmp_path: Path) -> None:
    truth = profiling.load_ground_truth(write_table(SPACE), tmp_path / "space.json")
    expected = table_of()
    assert truth.parts == expected.parts
    assert np.flatnonzero(np.isnan(truth.loss_nats)).tolist() == [3]
    assert truth.costs[3] == ()
    feasible = np.arange(len(truth.parts)) != 3
    np.testing.assert_allclose(truth.loss_nats[feasible], expected.loss_nats[feasible], rtol=1e-6)
    assert {c.variant for c in truth.costs[0]} == {c.variant for c in expected.costs[0]}


def test_a_table_of_another_space_is_refused(write_table: Callable[[StrategySpace], Path], tmp_path: Path) -> None:
    table = write_table(SPACE.restrict({"transform": ("none",)}))
    with pytest.raises(SystemExit, match="another space"):
        profiling.load_ground_truth(table, tmp_path / "space.json")


def test_curves_are_saved_although_the_plot_cannot_be_drawn(
    write_table: Callable[[StrategySpace], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--seeds", "1", "--trials", "22", "--engine", "random", "--save", "--table", str(write_table(SPACE))]
    for name in ("space", "curves", "runs", "plot"):
        options += [f"--{name}", str(tmp_path / f"{name}.json")]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(sys, "argv", ["profiling.py", *options])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match="matplotlib"):
        profiling.main()
    _, (run,) = profiling.load_curves(tmp_path / "curves.json")
    assert (run.engine, len(run.shares)) == ("random", 22)


def test_the_ground_truth_is_made_by_this_command_too(
    write_table: Callable[[StrategySpace], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = write_table(SPACE)
    again = tmp_path / "again.csv.gz"
    options = ["--table", str(again), str(tmp_path / "truth.jsonl")]
    monkeypatch.setattr(sys, "argv", ["profiling.py", "--ground-truth", *options])
    profiling.main()
    assert again.read_bytes() == made.read_bytes()
    assert f"rows={len(table_of().parts) - 1} infeasible=1" in capsys.readouterr().out


@pytest.mark.slow
def test_our_engine_runs_on_the_table(problem: profiling.Problem) -> None:
    run = profiling.replay(problem, profiling.OURS, 0, trials=30)
    assert len(run.shares) == 30
    assert run.shares[-1] > run.shares[profiling.START_TRIALS - 1]


@pytest.mark.slow
def test_the_plot_is_drawn(tmp_path: Path) -> None:
    runs = [run_of(name, seed, *np.linspace(0.5, 0.9 + seed / 20, 40)) for name in RIVALS for seed in range(2)]
    profiling_report.plot(runs, parts=1000, path=tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_published_grid_has_its_optimum_where_its_authors_say() -> None:
    folder = Path(os.environ.get("CONTROLD_KVSERVE_DATA", "data/kvserve"))
    if not (folder / profiling_kvserve.GRID_FILE).exists():
        pytest.skip("KVServe's published figures are not here (CONTROLD_KVSERVE_DATA)")
    grid = profiling_kvserve.load_grid(folder)
    assert len(grid.parts) == 144
    assert set(grid.parts) == set(grid.space.enumerate(lossy_only=True))
    assert grid.compression[grid.optimum] == pytest.approx(9.7, abs=0.1)
    assert grid.share(range(144)) == pytest.approx(1.0)
