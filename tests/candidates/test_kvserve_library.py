"""KVServe's profile libraries: what maps, what does not and why, and what their numbers mean here."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from controld.candidates.kvserve_library import LibraryTarget, MappedLibrary, library_model, map_library
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from dataplanes.kvcodec import HeadProfile, KVDtype, KVLayout
from dataplanes.kvcodec.space import kv_strategy_space, validate_configuration

LAYOUT = KVLayout.keys_then_values(layers=28, heads=4, head_dim=128, dtype=KVDtype.BFLOAT16, page_tokens=64)
HEADS = HeadProfile(key=np.ones((28, 4)), value=np.ones((28, 4)))
ARTEFACTS = {HEADS.profile_id: HEADS}


def target(space: StrategySpace | None = None, workload: str | None = None) -> LibraryTarget:
    return LibraryTarget(
        model_fingerprint="m" * 64,
        space=space or kv_strategy_space(LAYOUT, ARTEFACTS),
        kv_bytes_per_token=57344,
        workload=workload,
    )


def entry(name: str = "c0", **changes: Any) -> dict[str, Any]:
    quantiser = {
        "model_name": "Tiny-7B", "hybrid_ratio": 0.8, "high_key_max_value": 12, "high_value_max_value": 10,
        "low_key_max_value": 6, "low_value_max_value": 4, "axis_key": "channel", "axis_value": "token",
        "split_type": "head", **changes.pop("quantiser", {}),
    }  # fmt: skip
    return {
        "profile_id": name,
        "metadata": {"config_id": 0},
        "compression_config": {
            "enabled": True,
            "pipeline": ["quantizer", "codec"],
            "transformer_config": {"transform_type": "none"},
            "quantizer_config": quantiser,
            "codec_config": {"codec_type": "nvcomp", "nvcomp_algorithm": "ANS", "data_type": "|u1"},
            "min_compress_size": 0,
            **changes.pop("config", {}),
        },
        "performance_metrics": {
            "compression_ratio": 8.5,
            "harmonic_speed_mbps": 1000.0,
            **changes.pop("performance", {}),
        },
        "quality_metrics": {"accuracy": 0.954, "metric_name": "relative_task_accuracy", **changes.pop("quality", {})},
    }


def library(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "library_metadata": {"model_name": "Tiny-7B", "dataset": "qa", "machine": "5090", "input_length": 4096},
        "accuracy_buckets": [
            {"bucket_id": 0, "acc_range": [0.0, 0.99], "pareto_profiles": list(entries), "bandwidth_intervals": []}
        ],
    }


def mapped(*entries: dict[str, Any], space: StrategySpace | None = None) -> MappedLibrary:
    return map_library(json.dumps(library(*entries)), target(space))


def test_a_head_split_maps_to_a_configuration_that_the_codec_takes() -> None:
    result = mapped(entry())
    (profile,) = result.profiles
    assert result.unmapped == ()
    assert dict(profile.configuration) == {
        "transform": "none", "quantise": "head_levels", "sink_tokens": 0, "head_profile": HEADS.profile_id,
        "key_levels": 12, "key_low_levels": 6, "key_low_percent": 80, "key_axis": "channel", "key_group": 128,
        "value_levels": 10, "value_low_levels": 4, "value_low_percent": 80, "value_axis": "all_heads",
        "code": "entropy",
    }  # fmt: skip
    validate_configuration(profile.configuration, LAYOUT, ARTEFACTS)


def test_a_layer_split_is_of_the_last_third_whatever_its_ratio_says() -> None:
    layers = entry(
        quantiser={
            "split_type": "layer", "hybrid_ratio": 0.3, "high_key_max_value": 32, "high_value_max_value": 32,
            "low_key_max_value": 16, "low_value_max_value": 16,
        }
    )  # fmt: skip
    (profile,) = mapped(layers).profiles
    assert profile.configuration["quantise"] == "layer_levels"
    assert profile.configuration["key_low_percent"] == 33
    validate_configuration(profile.configuration, LAYOUT, ARTEFACTS)


def test_accuracy_is_no_loss_and_passes_no_gate() -> None:
    (profile,) = mapped(entry(quality={"accuracy": 1.2})).profiles
    assert profile.loss_samples == 0
    assert math.isinf(profile.loss_upper_nats)
    assert "relative_task_accuracy 1.2" in profile.provenance
    assert profile.provenance.startswith("imported: ")
    assert profile.measured_unix_s == 0.0, "anything measured is newer"


def test_encode_and_decode_together_take_twice_what_the_harmonic_speed_says() -> None:
    encode, decode = 30.07 * 2**20, 98.94 * 2**20
    harmonic = 2 / (1 / encode + 1 / decode)
    (profile,) = mapped(entry(performance={"harmonic_speed_mbps": harmonic / 2**20})).profiles
    volume = profile.median_transfer_bytes
    assert volume == 4096 * 57344
    both = profile.encode.seconds(volume) + profile.decode.seconds(volume)
    assert both == pytest.approx(volume / encode + volume / decode)
    assert profile.sender_hardware == profile.receiver_hardware == "KVServe 5090"


def test_the_workload_is_the_data_set_unless_another_is_named() -> None:
    assert mapped(entry()).profiles[0].workload == "qa"
    named = map_library(json.dumps(library(entry())), target(workload="dialogue"))
    assert named.profiles[0].workload == "dialogue"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": {"enabled": False}}, "not enabled"),
        ({"config": {"pipeline": ["codec", "quantizer"]}}, "pipeline"),
        ({"config": {"pipeline": ["quantizer", "pruner"]}}, "pipeline"),
        ({"config": {"codec_config": {"codec_type": "nvcomp", "nvcomp_algorithm": "Bitcomp"}}}, "Bitcomp"),
        ({"config": {"codec_config": {"codec_type": "lc"}}}, "lc"),
        (
            {"config": {"pipeline": ["transformer", "codec"], "transformer_config": {"transform_type": "hadamard"}}},
            "transform without quantisation",
        ),
        (
            {
                "config": {
                    "pipeline": ["transformer", "quantizer", "codec"],
                    "transformer_config": {"transform_type": "dct"},
                }
            },
            "dct",
        ),
        ({"quantiser": {"hybrid_ratio": 0.7}}, "key_low_percent"),
        ({"quantiser": {"high_key_max_value": 11}}, "key_levels"),
        ({"quantiser": {"low_value_max_value": 10, "high_value_max_value": 8}}, "value_low_levels"),
        ({"quantiser": {"axis_value": "tensor"}}, "tensor"),
        ({"quantiser": {"split_type": "token"}}, "token"),
    ],
)
def test_what_has_no_counterpart_is_named_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    result = mapped(entry("bad", **changes), entry("good"))
    assert [profile.provenance.split()[2].rstrip(",") for profile in result.profiles] == ["good"]
    (unmapped,) = result.unmapped
    assert unmapped.profile_id == "bad"
    assert reason in unmapped.reason


def test_stages_may_be_missing() -> None:
    lossless = entry("lossless", config={"pipeline": ["codec"]})
    stored = entry("stored", config={"pipeline": ["quantizer"]})
    rotated = entry(
        "rotated",
        config={
            "pipeline": ["transformer", "quantizer", "codec"],
            "transformer_config": {"transform_type": "hadamard", "seed": 13107},
        },
    )
    result = mapped(lossless, stored, rotated)
    assert result.unmapped == ()
    assert [
        tuple(profile.configuration[name] for name in ("transform", "quantise", "code")) for profile in result.profiles
    ] == [("none", "none", "entropy"), ("none", "head_levels", "none"), ("hadamard", "head_levels", "entropy")]


def test_a_plane_without_a_head_profile_takes_no_head_split() -> None:
    (unmapped,) = mapped(entry(), space=kv_strategy_space(LAYOUT)).unmapped
    assert "head profile" in unmapped.reason


def test_a_configuration_comes_once() -> None:
    result = mapped(entry("first"), entry("second", quality={"accuracy": 0.9}))
    assert len(result.profiles) == 1
    assert [(one.profile_id, one.reason) for one in result.unmapped] == [("second", "the same configuration as first")]


PATH = "accuracy_buckets[0].pareto_profiles[0]"


@pytest.mark.parametrize(
    ("broken", "field"),
    [
        (entry(performance={"harmonic_speed_mbps": 0}), f"{PATH}.performance_metrics.harmonic_speed_mbps"),
        (entry(performance={"compression_ratio": math.nan}), f"{PATH}.performance_metrics.compression_ratio"),
        (entry(quality={"accuracy": "high"}), f"{PATH}.quality_metrics.accuracy"),
        (entry(quantiser={"hybrid_ratio": 1.5}), f"{PATH}.compression_config.quantizer_config.hybrid_ratio"),
        (
            entry(quantiser={"high_key_max_value": 12.0}),
            f"{PATH}.compression_config.quantizer_config.high_key_max_value",
        ),
        (entry(quantiser={"block": 8}), f"{PATH}.compression_config.quantizer_config.block"),
        ({"metadata": {}}, f"{PATH}.profile_id"),
        ([], PATH),
    ],
)
def test_a_library_of_another_shape_is_refused_whole(broken: Any, field: str) -> None:
    with pytest.raises(FieldError) as caught:
        mapped(broken)
    assert caught.value.field == field


def test_the_model_is_read_from_the_library_and_nothing_else_is_one() -> None:
    assert library_model(json.dumps(library())) == "Tiny-7B"
    for text in ("{}", "[]", '{"library_metadata": {"model_name": 3}}'):
        with pytest.raises(FieldError):
            library_model(text)


@pytest.mark.parametrize(
    "performance",
    [{"compression_ratio": 1e308}, {"compression_ratio": 5e-324}, {"harmonic_speed_mbps": 5e-324}],
    ids=str,
)
def test_numbers_that_no_machine_has_are_refused_by_their_path(performance: dict[str, float]) -> None:
    with pytest.raises(FieldError) as caught:
        mapped(entry(performance=performance))
    assert caught.value.field.startswith("accuracy_buckets[0].pareto_profiles[0]")
