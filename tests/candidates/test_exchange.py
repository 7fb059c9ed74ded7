"""Profiles out as a document and in again: nothing is lost, and nothing wrong gets in."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from controld.candidates.exchange import IMPORTED, export_document, read_document
from controld.candidates.profile import Profile, StageTime
from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError


def profile(loss: float = 0.01, samples: int = 8, workload: str = "general") -> Profile:
    return Profile(
        configuration=Configuration({"quantise": "levels", "key_levels": 12, "step": 0.25, "code": "entropy"}),
        workload=workload,
        model_fingerprint="f" * 64,
        loss_mean_nats=loss,
        loss_se_nats=loss / 10,
        loss_samples=samples,
        worst_prompt_tokens=2048,
        ratio=4.5,
        encode=StageTime(1e-3, 2e-9),
        decode=StageTime(0.0, 1e-9),
        median_transfer_bytes=20e6,
        sender_hardware="cpu/2/1",
        receiver_hardware="cpu/2/1",
        measured_unix_s=1_700_000_000.5,
        corpus="texts#1",
        provenance="study s, trial 001",
    )


ONE = profile()
UNBOUNDED = profile(samples=1, workload="dialogue")


def exported(*profiles: Profile) -> dict[str, Any]:
    return json.loads(json.dumps(export_document(profiles, exported_unix_s=5.0)))


def test_a_profile_comes_back_as_it_was_and_says_that_it_was_imported() -> None:
    got = read_document(json.dumps(exported(ONE, UNBOUNDED)))
    for before, after in zip((ONE, UNBOUNDED), got, strict=True):
        assert after.provenance == f"{IMPORTED}{before.provenance}"
        assert {**after.to_document(), "provenance": ""} == {**before.to_document(), "provenance": ""}
    assert math.isinf(got[1].loss_upper_nats)


def test_a_second_journey_adds_nothing_to_the_provenance() -> None:
    first = read_document(json.dumps(exported(ONE)))
    assert read_document(json.dumps(exported(*first))) == first


def test_the_bound_is_worked_out_where_it_is_not_given() -> None:
    document = exported(ONE)
    del document["profiles"][0]["loss_upper_nats"]
    assert read_document(json.dumps(document))[0].loss_upper_nats == ONE.loss_upper_nats


Change = Callable[[dict[str, Any]], object]


def at(*keys: Any, value: Any) -> Change:
    def change(document: dict[str, Any]) -> None:
        target: Any = document
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (at("format", value="other"), "format"),
        (at("version", value=2), "version"),
        (at("version", value=True), "version"),
        (at("note", value="x"), "note"),
        (lambda document: document.pop("exported_unix_s"), "exported_unix_s"),
        (at("profiles", value={}), "profiles"),
        (at("profiles", 1, value=[]), "profiles[1]"),
        (at("profiles", 1, "format", value=7), "profiles[1].format"),
        (at("profiles", 1, "colour", value="red"), "profiles[1].colour"),
        (lambda document: document["profiles"][1].pop("ratio"), "profiles[1].ratio"),
        (at("profiles", 1, "ratio", value=math.nan), "profiles[1].ratio"),
        (at("profiles", 1, "ratio", value=10**400), "profiles[1].ratio"),
        (at("profiles", 1, "ratio", value="4.5"), "profiles[1].ratio"),
        (at("profiles", 1, "ratio", value=True), "profiles[1].ratio"),
        (at("profiles", 1, "ratio", value=0), "profiles[1].ratio"),
        (at("profiles", 1, "ratio", value=5e-324), "profiles[1].ratio"),
        (at("profiles", 1, "median_transfer_bytes", value=5e-324), "profiles[1].median_transfer_bytes"),
        (at("profiles", 1, "loss_samples", value=10**400), "profiles[1].loss_samples"),
        (at("profiles", 1, "measured_unix_s", value=1e308), "profiles[1].measured_unix_s"),
        (at("profiles", 1, "loss_mean_nats", value=-1e-3), "profiles[1].loss_mean_nats"),
        (at("profiles", 1, "loss_samples", value=2.5), "profiles[1].loss_samples"),
        (at("profiles", 0, "loss_upper_nats", value=0.001), "profiles[0].loss_upper_nats"),
        (at("profiles", 1, "arm_id", value="0" * 16), "profiles[1].arm_id"),
        (at("profiles", 1, "workload", value=None), "profiles[1].workload"),
        (at("profiles", 1, "corpus", value="a\ud800"), "profiles[1].corpus"),
        (at("profiles", 1, "encode", value=3e-9), "profiles[1].encode"),
        (at("profiles", 1, "encode", "a_s", value=math.inf), "profiles[1].encode.a_s"),
        (at("profiles", 1, "encode", "a_s", value=1e308), "profiles[1].encode.a_s"),
        (at("profiles", 1, "decode", "b_s_per_byte", value=1e308), "profiles[1].decode.b_s_per_byte"),
        (at("profiles", 1, "encode", "b_s_per_byte", value=-1.0), "profiles[1].encode.b_s_per_byte"),
        (at("profiles", 1, "encode", "c", value=1.0), "profiles[1].encode.c"),
        (at("profiles", 1, "configuration", value=[]), "profiles[1].configuration"),
        (at("profiles", 1, "configuration", "key_levels", value=12.0), "profiles[1].configuration.key_levels"),
        (at("profiles", 1, "configuration", "Key", value=12), "profiles[1].configuration.Key"),
        (at("profiles", 1, "configuration", "code", value="a\n"), "profiles[1].configuration.code"),
        (lambda document: document["profiles"].append(document["profiles"][0]), "profiles[2]"),
    ],
)
def test_what_is_wrong_is_refused_by_its_path(change: Change, field: str) -> None:
    document = copy.deepcopy(exported(ONE, UNBOUNDED))
    change(document)
    with pytest.raises(FieldError) as caught:
        read_document(json.dumps(document))
    assert caught.value.field == field


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"version": 1, "version": 1}'])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(FieldError):
        read_document(text)


def test_nothing_is_measured_after_the_given_date() -> None:
    text = json.dumps(exported(ONE, UNBOUNDED))
    assert len(read_document(text, latest_unix_s=ONE.measured_unix_s)) == 2
    with pytest.raises(FieldError, match="in the future") as caught:
        read_document(text, latest_unix_s=ONE.measured_unix_s - 1)
    assert caught.value.field == "profiles[0].measured_unix_s"


def test_a_hostile_document_of_many_keys_is_refused_in_no_time() -> None:
    keys = ",".join(f'"k{number}": 0' for number in range(100_000))
    began_s = time.process_time()
    with pytest.raises(FieldError, match="there twice") as refused:
        read_document("{" + keys + ', "k99999": 0}')
    assert refused.value.field == "k99999"
    assert time.process_time() - began_s < 2.0, "quadratic would take minutes"
