"""Bandwidth and load as a data plane sees them, against links whose true rate is known."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controld.contract.errors import FieldError
from controld.contract.estimators import (
    LEAST_SET_UP_BYTES,
    SET_UP_MARGIN,
    BandwidthEstimator,
    LoadEstimator,
    first_guess_bytes_per_s,
)

RATE = 1e8
MB = 1_000_000


def warmed_up(**options):
    """An estimator that has seen its set-up, a second before time zero."""
    estimator = BandwidthEstimator(**options)
    estimator.observe(-2.0, -1.0, 1000)
    return estimator


def fair_link(rate, sizes, concurrency):
    """Spans of a link that `concurrency` transfers share equally, each followed by the next; in order of their ends."""
    waiting = list(sizes)
    under_way: list[list[float]] = []  # bytes left, start, bytes
    now = 0.0
    while waiting or under_way:
        while waiting and len(under_way) < concurrency:
            size = waiting.pop(0)
            under_way.append([size, now, size])
        least = min(left for left, _, _ in under_way)
        now += least * len(under_way) / rate
        for transfer in under_way:
            transfer[0] -= least
        for transfer in [t for t in under_way if t[0] < 1e-6]:
            under_way.remove(transfer)
            yield transfer[1], now, transfer[2]


def observe_in_turn(estimator, start, seconds_and_bytes, gap=0.05):
    """Transfers one after another; the time at the end."""
    now = start
    for seconds, wire_bytes in seconds_and_bytes:
        estimator.observe(now, now + seconds, wire_bytes)
        now += seconds + gap
    return now


# ------------------------------------------------------------------------------------- never more than the link


@pytest.mark.parametrize("concurrency", [1, 2, 3, 8, 16, 64])
def test_overlapping_transfers_add_up_to_the_link_and_never_to_more(concurrency):
    random_sizes = random.Random(concurrency)
    sizes = [random_sizes.uniform(0.1, 20) * MB for _ in range(30 * concurrency)]
    estimator = BandwidthEstimator()
    means = []
    for start, end, wire_bytes in fair_link(RATE, sizes, concurrency):
        estimator.observe(start, end, wire_bytes)
        estimate = estimator.estimate(end)
        if estimate is not None:
            means.append(estimate.mean)
    assert max(means) <= RATE * 1.001
    assert min(means[len(means) // 4 :]) >= RATE * 0.85
    assert means[-1] == pytest.approx(RATE, rel=0.05)


@pytest.mark.parametrize("concurrency", [2, 8, 64])
def test_simultaneous_batches_are_the_link_once_each_is_reported(concurrency):
    estimator = warmed_up()
    now = 0.0
    for _ in range(10):
        for _ in range(concurrency):
            estimator.observe(now, now + 1.0, RATE / concurrency)
        now += 1.5
        assert estimator.estimate(now).mean == pytest.approx(RATE)


@settings(max_examples=60, deadline=None)
@given(
    spans=st.lists(st.tuples(st.floats(0, 50), st.floats(0.01, 5), st.floats(0.05, 1.0)), min_size=1, max_size=40),
    shuffled=st.randoms(use_true_random=False),
)
def test_whatever_the_spans_the_estimate_lies_between_their_slowest_and_their_sum(spans, shuffled):
    """Each span moves at a share of the link; at no time can more be seen than all of them at once."""
    estimator = warmed_up()
    shuffled.shuffle(spans)
    shares = [share for _, _, share in spans]
    for start, seconds, share in spans:
        estimator.observe(start, start + seconds, share * RATE * seconds)
    mean = estimator.estimate(60.0).mean
    assert min(shares) * RATE * 0.999 <= mean <= sum(shares) * RATE * 1.001


def test_a_span_that_is_reported_late_joins_the_time_it_belongs_to():
    estimator = warmed_up()
    now = 0.0
    for _ in range(10):  # half of the link, in short spans
        estimator.observe(now, now + 1.0, RATE / 2)
        now += 1.0
    estimator.observe(0.0, now, now * RATE / 2)  # the other half, in one
    assert estimator.estimate(now).mean == pytest.approx(RATE)


def test_chunks_count_over_their_own_time_not_over_the_last_ones():
    whole, chunked = warmed_up(), warmed_up()
    whole.observe(0.0, 0.7, 70 * MB)
    for chunk in range(7):
        chunked.observe(chunk * 0.1, (chunk + 1) * 0.1, 10 * MB)
    assert chunked.estimate(1.0).mean == pytest.approx(whole.estimate(1.0).mean)
    pipelined = warmed_up()
    for chunk in range(7):  # each chunk's acknowledgement comes while the next one is on its way
        pipelined.observe(max(0.0, chunk * 0.1 - 0.05), (chunk + 1) * 0.1, 10 * MB)
    assert pipelined.estimate(1.0).mean == pytest.approx(RATE, rel=0.05)
    assert pipelined.estimate(1.0).mean <= RATE * 1.001


def test_the_same_spans_in_any_order_make_nearly_the_same_estimate():
    spans = [(start, start + 0.5, 40 * MB) for start in (0.0, 0.6, 1.2, 1.5, 1.8, 2.6)]
    forwards, backwards = warmed_up(), warmed_up()
    for span in spans:
        forwards.observe(*span)
    for span in reversed(spans):
        backwards.observe(*span)
    assert backwards.estimate(4.0).mean == pytest.approx(forwards.estimate(4.0).mean, rel=1e-6)


# ------------------------------------------------------------------------------------- set-up


def test_the_connections_set_up_is_left_out():
    estimator = BandwidthEstimator()
    estimator.observe(0.0, 3.0, 10 * MB)
    assert estimator.estimate(3.0) is None
    estimator.observe(4.0, 4.1, 10 * MB)
    assert estimator.estimate(4.1).mean == pytest.approx(RATE)
    assert estimator.estimate(4.1).count == 1


def test_the_set_up_is_a_lower_bound_of_the_rate_and_kept_as_that():
    estimator = BandwidthEstimator()
    assert estimator.set_up_bytes_per_s == 0.0
    estimator.observe(0.0, 3.0, 10 * MB)
    assert estimator.set_up_bytes_per_s == pytest.approx(10 * MB / 3)
    for transfer in range(40):
        estimator.observe(4.0 + transfer, 4.1 + transfer, 10 * MB)
    assert estimator.set_up_bytes_per_s == pytest.approx(10 * MB / 3), "the period closes, what it said stays"


def test_a_set_up_of_few_bytes_says_nothing_of_the_link():
    estimator = BandwidthEstimator()
    estimator.observe(0.0, 3.0, LEAST_SET_UP_BYTES / 2)
    assert estimator.set_up_bytes_per_s == 0.0
    unset = BandwidthEstimator(exclude_setup=False)
    unset.observe(0.0, 3.0, 10 * MB)
    assert unset.set_up_bytes_per_s == 0.0


@pytest.mark.parametrize(
    ("set_up", "prior", "guess"),
    [(0.0, 0.0, 0.0), (2e6, 0.0, SET_UP_MARGIN * 2e6), (2e6, 1e7, 1e7), (2e7, 1e7, 2e7), (0.0, 1e7, 1e7)],
)
def test_the_first_guess_is_the_operators_word_unless_the_set_up_was_quicker(set_up, prior, guess):
    assert first_guess_bytes_per_s(set_up, prior) == guess


def test_chunks_that_overlap_the_set_up_are_left_out_with_it():
    estimator = BandwidthEstimator()
    for chunk in range(3):
        estimator.observe(chunk * 0.9, 3.0 + chunk * 0.1, 10 * MB)
    assert estimator.estimate(4.0) is None


def test_a_link_without_set_up_counts_from_the_first_span():
    estimator = BandwidthEstimator(exclude_setup=False)
    estimator.observe(0.0, 0.1, 10 * MB)
    assert estimator.estimate(0.1).mean == pytest.approx(RATE)


# ------------------------------------------------------------------------------------- change


@pytest.mark.parametrize("factor", [0.01, 0.1, 0.3, 3.0, 10.0, 100.0])
@pytest.mark.parametrize("before", [3, 50])
def test_a_sudden_change_is_followed_within_three_transfers(factor, before):
    estimator = warmed_up()
    now = observe_in_turn(estimator, 0.0, [(0.1, 10 * MB)] * before)
    assert estimator.estimate(now).mean == pytest.approx(RATE)
    now = observe_in_turn(estimator, now, [(0.1 / factor, 10 * MB)] * 3)
    assert estimator.estimate(now).mean == pytest.approx(RATE * factor, rel=0.25)


@pytest.mark.parametrize("concurrency", [4, 16, 64])
def test_a_sudden_drop_is_followed_under_concurrency(concurrency):
    sizes = random.Random(concurrency)
    estimator = BandwidthEstimator()
    end = 0.0
    for start, end, wire_bytes in fair_link(
        RATE, [sizes.uniform(2, 10) * MB for _ in range(20 * concurrency)], concurrency
    ):
        estimator.observe(start, end, wire_bytes)
    drop_s = end
    slow = fair_link(RATE / 100, [sizes.uniform(2, 10) * MB for _ in range(3 * concurrency)], concurrency)
    for start, end, wire_bytes in slow:
        estimator.observe(drop_s + start, drop_s + end, wire_bytes)
    assert estimator.estimate(drop_s + end).mean == pytest.approx(RATE / 100, rel=0.25)


def test_a_change_is_followed_under_noise_and_without_it_noise_averages_out():
    noise = random.Random(5)
    estimator = warmed_up()

    def noisy(rate, n):
        return [(10 * MB / rate * math.exp(noise.gauss(0, 0.25)), 10 * MB) for _ in range(n)]

    now = observe_in_turn(estimator, 0.0, noisy(RATE, 60))
    errors = []
    for transfer in noisy(RATE, 60):
        now = observe_in_turn(estimator, now, [transfer])
        errors.append(abs(math.log(estimator.estimate(now).mean / RATE)))
    assert sum(errors) / len(errors) < 0.15
    now = observe_in_turn(estimator, now, noisy(RATE / 100, 5))
    assert estimator.estimate(now).mean == pytest.approx(RATE / 100, rel=0.6)


def test_one_stall_does_not_stay():
    estimator = warmed_up()
    now = observe_in_turn(estimator, 0.0, [(0.1, 10 * MB)] * 20)
    now = observe_in_turn(estimator, now, [(10.0, 10 * MB)])
    assert estimator.estimate(now).mean > RATE / 20
    now = observe_in_turn(estimator, now, [(0.1, 10 * MB)] * 3)
    assert estimator.estimate(now).mean == pytest.approx(RATE, rel=0.2)


# ------------------------------------------------------------------------------------- weight


def test_tiny_transfers_whose_time_is_latency_do_not_spoil_the_estimate():
    estimator = warmed_up()
    now = observe_in_turn(estimator, 0.0, [(0.1, 10 * MB)] * 10)
    now = observe_in_turn(estimator, now, [(0.005, 1_000)] * 500)  # 0.2 MB/s, all of it latency
    assert estimator.estimate(now).mean == pytest.approx(RATE, rel=0.1)


def test_a_transfer_weighs_by_its_bytes():
    moved = []
    for wire_bytes in (0.1 * MB, 1 * MB, 10 * MB):
        estimator = warmed_up()
        now = observe_in_turn(estimator, 0.0, [(0.1, 10 * MB)] * 10)
        now = observe_in_turn(estimator, now, [(wire_bytes / RATE / 0.8, wire_bytes)])
        moved.append(1 - estimator.estimate(now).mean / RATE)
    assert 0 < moved[0] < moved[1] / 3
    assert moved[1] < moved[2] / 3


def test_where_all_transfers_are_small_they_are_the_usual_size():
    estimator = warmed_up()
    now = observe_in_turn(estimator, 0.0, [(0.01, 0.1 * MB)] * 30)
    assert estimator.estimate(now).mean == pytest.approx(1e7)


# ------------------------------------------------------------------------------------- age, variance, hygiene


def test_a_stale_estimate_keeps_its_mean_and_widens_and_the_next_transfer_refreshes_it():
    estimator = warmed_up()
    now = observe_in_turn(estimator, 0.0, [(0.1, 10 * MB)] * 20, gap=0.0)
    fresh = estimator.estimate(now)
    later = [estimator.estimate(now + age) for age in (1, 10, 60, 600, 6000, 60_000)]
    assert all(estimate.mean == fresh.mean for estimate in later)
    assert [estimate.age_s for estimate in later] == pytest.approx([1, 10, 60, 600, 6000, 60_000])
    sds = [fresh.sd, *(estimate.sd for estimate in later)]
    assert sds[:5] == sorted(set(sds[:5]))
    assert sds[0] < 0.2 * fresh.mean < 0.4 * fresh.mean < sds[4]
    assert sds[-1] < 3 * fresh.mean
    now += 600
    now = observe_in_turn(estimator, now, [(0.2, 10 * MB)])
    refreshed = estimator.estimate(now)
    assert refreshed.mean == pytest.approx(RATE / 2, rel=0.15)
    assert refreshed.sd < later[3].sd / 2


def test_variance_follows_the_noise_of_the_link():
    sds = []
    for noise_sd in (0.02, 0.3):
        noise = random.Random(1)
        estimator = warmed_up()
        now = observe_in_turn(estimator, 0.0, [(0.1 * math.exp(noise.gauss(0, noise_sd)), 10 * MB) for _ in range(200)])
        sds.append(estimator.estimate(now).sd)
    assert sds[0] < sds[1] / 2


def test_count_is_of_spans():
    estimator = warmed_up()
    observe_in_turn(estimator, 0.0, [(0.1, 10 * MB)] * 100)
    assert estimator.estimate(100.0).count == 100


@pytest.mark.parametrize(
    "span",
    [
        (math.nan, 1.0, 10),
        (0.0, math.inf, 10),
        (2.0, 1.0, 10),
        (0.0, 1.0, math.nan),
        (0.0, 1.0, -1),
        (0.0, 1.0, math.inf),
    ],
)
def test_what_is_no_span_is_refused_and_changes_nothing(span):
    estimator = warmed_up()
    observe_in_turn(estimator, 0.0, [(0.1, 10 * MB)] * 3)
    before = estimator.estimate(5.0)
    with pytest.raises(FieldError) as refused:
        estimator.observe(*span)
    assert refused.value.code == "estimate.span"
    assert estimator.estimate(5.0) == before


def test_a_span_without_bytes_or_time_says_nothing():
    estimator = warmed_up()
    estimator.observe(0.0, 0.0, 10)
    estimator.observe(1.0, 2.0, 0)
    assert estimator.estimate(3.0) is None


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 1e6), st.one_of(st.integers(0, 2**53), st.floats(0, 2.0**53))),
        max_size=60,
    )
)
def test_no_span_however_odd_makes_a_number_that_is_none(spans):
    estimator = BandwidthEstimator()
    for start, seconds, wire_bytes in spans:
        estimator.observe(start, start + seconds, wire_bytes)
        estimate = estimator.estimate(start + seconds)
        if estimate is not None:
            assert math.isfinite(estimate.mean) and estimate.mean > 0
            assert math.isfinite(estimate.sd) and estimate.sd >= 0
            assert estimate.age_s >= 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.floats(0.01, 5), st.floats(1, 1e8)), min_size=1, max_size=60))
def test_asking_changes_nothing(spans):
    asked, unasked = warmed_up(), warmed_up()
    for start, seconds, wire_bytes in spans:
        asked.observe(start, start + seconds, wire_bytes)
        unasked.observe(start, start + seconds, wire_bytes)
        asked.estimate(start)
    assert asked.estimate(40.0) == unasked.estimate(40.0)


# ------------------------------------------------------------------------------------- load


def test_a_steady_stream_is_its_rate():
    load = LoadEstimator(window_s=10.0)
    for second in range(100):
        load.offered(float(second), 5 * MB)
    assert load.estimate(99.5).mean == pytest.approx(5 * MB, rel=0.02)


def test_load_begins_at_zero_and_a_first_transfer_is_no_flood():
    load = LoadEstimator(window_s=10.0)
    assert load.estimate(0.0).mean == 0
    assert load.estimate(0.0).age_s == math.inf
    load.offered(0.0, 14 * MB)
    assert load.estimate(0.0).mean == pytest.approx(1.4 * MB)


def test_load_fades_when_nothing_comes():
    load = LoadEstimator(window_s=10.0)
    load.offered(0.0, 10 * MB)
    means = [load.estimate(at_s).mean for at_s in (0.0, 10.0, 100.0)]
    assert means[1] == pytest.approx(means[0] / math.e)
    assert means[2] < means[0] / 10_000


def test_the_spread_of_load_is_that_of_its_arrivals():
    """Over many seeds the standard deviation that it states is the one that it has."""
    means, sds = [], []
    for seed in range(300):
        arrivals = random.Random(seed)
        load = LoadEstimator(window_s=5.0)
        now = 0.0
        while now < 40.0:
            now += arrivals.expovariate(2.0)
            load.offered(now, 1 * MB)
        estimate = load.estimate(now)
        means.append(estimate.mean)
        sds.append(estimate.sd)
    average = sum(means) / len(means)
    spread = math.sqrt(sum((mean - average) ** 2 for mean in means) / len(means))
    assert average == pytest.approx(2 * MB, rel=0.12)
    assert sum(sds) / len(sds) == pytest.approx(spread, rel=0.25)


def test_an_arrival_out_of_order_does_not_turn_time_back():
    load = LoadEstimator()
    load.offered(10.0, MB)
    load.offered(9.0, MB)
    assert load.estimate(10.0).mean == pytest.approx(0.2 * MB)
    assert load.estimate(10.0).age_s == 0.0


@pytest.mark.parametrize("offer", [(math.nan, 1), (0.0, -1), (0.0, math.inf)])
def test_what_is_no_offer_is_refused(offer):
    with pytest.raises(FieldError):
        LoadEstimator().offered(*offer)


@pytest.mark.parametrize("window_s", [0.0, -1.0, math.nan])
def test_a_window_is_a_positive_time(window_s):
    with pytest.raises(FieldError):
        LoadEstimator(window_s)
