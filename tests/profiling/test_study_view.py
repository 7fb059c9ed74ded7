"""What a study shows of its trials."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

REQUEST: dict[str, Any] = {
    "plane": "sglang",
    "workload": "general",
    "grid": "quick",
    "segments": 3,
    "lengths": [256, 1024],
}


async def test_answer_losses_are_shown_by_length_with_their_standard_error(bench: Any) -> None:
    """Of segments 0 to 2; a worker that does not measure them leaves them out."""
    answers = {(256, 0): 0.1, (256, 1): -0.1, (256, 2): 0.3, (1024, 1): 0.2}
    study = await bench.service.begin(REQUEST)
    await bench.review()
    agent_id, task = bench.fleet.requests.pop(0)
    plain = bench.outcome_of(task)
    losses = tuple(replace(loss, answer_nats=answers.get((loss.prompt_tokens, loss.segment))) for loss in plain.losses)
    await bench.service.trials.on_trial_result(bench.session(agent_id), replace(plain, losses=losses))

    (shown,) = [t for t in (await bench.service.get(study["id"]))["trials"] if t["id"] == task.trial_id]
    short, long = shown["lengths"]
    assert short["answer_nats"] == pytest.approx(0.1)
    assert short["answer_se_nats"] == pytest.approx(0.2 / 3**0.5)
    assert (long["answer_nats"], long["answer_se_nats"]) == (0.2, None)

    restarted = bench.make_service()
    await restarted.start()
    await restarted.stop()
    (again,) = [t for t in (await restarted.get(study["id"]))["trials"] if t["id"] == task.trial_id]
    assert again["lengths"] == shown["lengths"]


async def test_nothing_is_shown_where_nothing_was_measured(bench: Any) -> None:
    study = await bench.service.begin(REQUEST)
    await bench.answer_all()
    for trial in (await bench.service.get(study["id"]))["trials"]:
        for length in trial["lengths"]:
            assert (length["answer_nats"], length["answer_se_nats"]) == (None, None)
            assert length["loss_se_nats"] > 0
