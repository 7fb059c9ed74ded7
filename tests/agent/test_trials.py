"""Trials: asked for on the stream, measured in a worker thread, answered once and again where asked again."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from controld.contract.configuration import Configuration
from controld.contract.rpc.convert_trial import trial_outcome_from_proto, trial_task_to_proto
from controld.contract.trial import SegmentLoss, TrialOutcome, TrialStatus, TrialTask


def task(trial_id="t1", study_id="s1"):
    return TrialTask(
        study_id=study_id,
        trial_id=trial_id,
        workload="dialogue",
        lossy=Configuration({"transform": "hadamard", "key_levels": 8}),
        coders=("bits", "entropy"),
        prompt_tokens=(256, 1024),
        segments_per_length=2,
    )


def measured(asked, loss_nats=0.01, status=TrialStatus.MEASURED):
    loss = SegmentLoss(prompt_tokens=256, segment=0, loss_nats=loss_nats, top1_agreement=0.9)
    return TrialOutcome(study_id=asked.study_id, trial_id=asked.trial_id, status=status, losses=(loss,), seconds=1.0)


@pytest.fixture
def worker(daemon, make_agent):
    agent = make_agent(daemon.address)
    stream_of = daemon.stream

    def start(handler, run_in_thread=None):
        if handler is not None:
            agent.on_trial(handler, run_in_thread)
        agent.start()
        return agent, stream_of()

    return start


def outcomes(stream, count):
    return [trial_outcome_from_proto(result) for result in stream.wait_for("trial_result", count)]


def final(stream, until):
    until(lambda: any(r.status != "progress" for r in stream.of_kind("trial_result")), "the trial has ended")
    return [o for o in outcomes(stream, 1) if o.status is not TrialStatus.PROGRESS]


def test_a_trial_is_measured_off_the_stream_with_progress_and_result(worker):
    threads = []
    told = threading.Event()

    def handler(asked, progress, cancelled):
        threads.append(threading.current_thread().name)
        assert not cancelled()
        progress(measured(asked, 0.5, TrialStatus.PROGRESS))
        told.wait(10)
        return measured(asked)

    _, stream = worker(handler)
    stream.send(trial_request=trial_task_to_proto(task()))
    assert outcomes(stream, 1)[0].status is TrialStatus.PROGRESS
    told.set()
    assert outcomes(stream, 2)[1] == measured(task())
    assert threads == ["controld-trials"]


def test_the_handler_gets_the_task_as_it_was_asked(worker):
    got = []
    _, stream = worker(lambda asked, progress, cancelled: got.append(asked) or measured(asked))
    stream.send(trial_request=trial_task_to_proto(task()))
    outcomes(stream, 1)
    assert got == [task()]


def test_trials_run_in_the_threads_of_the_callers_choice(worker):
    names = []
    with ThreadPoolExecutor(1, thread_name_prefix="mine") as executor:
        _, stream = worker(
            lambda asked, progress, cancelled: names.append(threading.current_thread().name) or measured(asked),
            executor.submit,
        )
        stream.send(trial_request=trial_task_to_proto(task()))
        outcomes(stream, 1)
    assert names[0].startswith("mine")
    stream.send(trial_request=trial_task_to_proto(task("t2")))  # the executor takes nothing any more
    answer = outcomes(stream, 2)[1]
    assert (answer.status, answer.trial_id) == (TrialStatus.FAILED, "t2")


@pytest.mark.parametrize(
    "handler",
    [
        lambda asked, progress, cancelled: 1 / 0,
        lambda asked, progress, cancelled: None,
        lambda asked, progress, cancelled: measured(task("another")),
    ],
)
def test_a_handler_that_fails_is_a_failed_trial_and_the_worker_goes_on(worker, handler, until):
    handlers = [handler, lambda asked, progress, cancelled: measured(asked)]
    agent, stream = worker(lambda *arguments: handlers.pop(0)(*arguments))
    stream.send(trial_request=trial_task_to_proto(task("t1")))
    failed = outcomes(stream, 1)[0]
    assert (failed.status, failed.trial_id) == (TrialStatus.FAILED, "t1")
    assert failed.detail
    stream.send(trial_request=trial_task_to_proto(task("t2")))
    assert outcomes(stream, 2)[1].status is TrialStatus.MEASURED
    assert agent.snapshot().counters["internal_error.trial"] == 1


def test_a_malformed_request_is_answered_and_not_run(worker):
    calls = []
    _, stream = worker(lambda *arguments: calls.append(arguments))
    request = trial_task_to_proto(task())
    request.lossy_json = "{"
    stream.send(trial_request=request)
    answer = outcomes(stream, 1)[0]
    assert (answer.status, answer.trial_id) == (TrialStatus.FAILED, "t1")
    assert "configuration" in answer.detail
    assert not calls


def test_an_agent_that_measures_nothing_says_so(worker):
    _, stream = worker(None)
    stream.send(trial_request=trial_task_to_proto(task()))
    assert outcomes(stream, 1)[0].status is TrialStatus.FAILED


@pytest.mark.parametrize("trial_id", ["t1", ""])
def test_a_cancelled_trial_learns_of_it(worker, until, trial_id):
    running = threading.Event()

    def handler(asked, progress, cancelled):
        running.set()
        until(cancelled, "it is cancelled")
        return TrialOutcome(study_id=asked.study_id, trial_id=asked.trial_id, status=TrialStatus.CANCELLED)

    _, stream = worker(handler)
    stream.send(trial_request=trial_task_to_proto(task()))
    stream.send(trial_request=trial_task_to_proto(task("t2")))  # waits in the queue
    assert running.wait(10)
    stream.send(trial_cancel={"study_id": "another", "trial_id": ""})
    stream.send(trial_cancel={"study_id": "s1", "trial_id": trial_id})
    assert outcomes(stream, 1)[0].status is TrialStatus.CANCELLED
    if trial_id:
        stream.send(trial_cancel={"study_id": "s1", "trial_id": "t2"})
    assert outcomes(stream, 2)[1].status is TrialStatus.CANCELLED


def test_a_trial_asked_for_again_is_not_measured_again(worker, daemon, until):
    calls = []
    go_on = threading.Event()

    def handler(asked, progress, cancelled):
        calls.append(asked.trial_id)
        go_on.wait(10)
        return measured(asked)

    _, stream = worker(handler)
    stream.send(trial_request=trial_task_to_proto(task()))
    until(lambda: calls == ["t1"], "it runs")
    daemon.stop()
    daemon.start()  # a new daemon asks for what has no result
    again = daemon.stream(1)
    again.wait_for("telemetry")
    again.send(trial_request=trial_task_to_proto(task()))
    go_on.set()
    assert set(final(again, until)) == {measured(task())}
    answers = len(again.of_kind("trial_result"))
    again.send(trial_request=trial_task_to_proto(task()))
    assert outcomes(again, answers + 1)[-1] == measured(task())
    assert calls == ["t1"]


def test_a_result_made_while_the_daemon_is_away_waits_for_it(worker, daemon, until):
    go_on = threading.Event()
    done = threading.Event()

    def handler(asked, progress, cancelled):
        go_on.wait(10)
        for _ in range(50):
            progress(measured(asked, 0.5, TrialStatus.PROGRESS))
        done.set()
        return measured(asked)

    agent, stream = worker(handler)
    stream.send(trial_request=trial_task_to_proto(task()))
    until(lambda: agent.snapshot().counters.get("trials_started") == 1, "it runs")
    daemon.stop()
    until(lambda: not agent.snapshot().connected, "the stream has ended")
    go_on.set()
    assert done.wait(10)
    daemon.start()
    again = daemon.stream(1)
    assert final(again, until) == [measured(task())]
    assert len(again.of_kind("trial_result")) <= 2  # newer progress has replaced older


def test_a_failed_trial_may_be_tried_again(worker):
    handlers = [lambda asked, progress, cancelled: 1 / 0, lambda asked, progress, cancelled: measured(asked)]
    _, stream = worker(lambda *arguments: handlers.pop(0)(*arguments))
    stream.send(trial_request=trial_task_to_proto(task()))
    assert outcomes(stream, 1)[0].status is TrialStatus.FAILED
    stream.send(trial_request=trial_task_to_proto(task()))
    assert outcomes(stream, 2)[1].status is TrialStatus.MEASURED
