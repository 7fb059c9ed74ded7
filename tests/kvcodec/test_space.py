"""The advertised space and the codec agree."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from controld.contract.configuration import Configuration, Value
from controld.contract.errors import FieldError
from controld.contract.space import StrategySpace
from dataplanes.kvcodec import CodecError, HeadProfile, KVCodec, KVDtype, KVLayout
from dataplanes.kvcodec.coders import OFFERED_CODERS
from dataplanes.kvcodec.presets import PRESETS
from dataplanes.kvcodec.space import kv_strategy_space, validate_configuration

LAYOUTS = [
    KVLayout.keys_then_values(layers=2, heads=3, head_dim=64, dtype=KVDtype.BFLOAT16, page_tokens=64),
    KVLayout.keys_then_values(layers=2, heads=1, head_dim=100, dtype=KVDtype.FLOAT16, page_tokens=1),
    KVLayout.keys_then_values(layers=2, heads=1, head_dim=1, dtype=KVDtype.BFLOAT16, page_tokens=48),
    KVLayout.latents(layers=2, latent_dim=576, dtype=KVDtype.BFLOAT16, page_tokens=64),
]


def random_points(space: StrategySpace, count: int) -> Iterator[Configuration]:
    """Points of a space too large to enumerate in a test."""
    chance = random.Random(0)
    while count:
        values: dict[str, Value] = {}
        for parameter in space.parameters:
            if space.is_active(parameter.name, values):
                value = chance.choice(parameter.values)
                if not parameter.is_default(value):
                    values[parameter.name] = value
        forbidden = (all(values.get(name) in bad for name, bad in rule.values.items()) for rule in space.forbidden)
        if not any(forbidden):
            count -= 1
            yield Configuration(values)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"head_dim {layout.planes[0].head_dim}")
def test_the_codec_takes_every_advertised_configuration(layout: KVLayout) -> None:
    space = kv_strategy_space(layout)
    for configuration in random_points(space, 500):
        space.validate(configuration)
        validate_configuration(configuration, layout)
    assert StrategySpace.from_json(space.to_json()).to_json() == space.to_json()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"head_dim {layout.planes[0].head_dim}")
def test_formats_that_need_a_head_profile_are_offered_with_one_only(layout: KVLayout) -> None:
    def formats(space: StrategySpace) -> set[Value]:
        return {value for parameter in space.parameters if parameter.name == "quantise" for value in parameter.values}

    heads = layout.planes[0].heads
    profile = HeadProfile(key=np.ones((2, heads)), value=np.ones((2, heads)))
    space = kv_strategy_space(layout, {profile.profile_id: profile})
    assert formats(space) - formats(kv_strategy_space(layout)) == {"head_levels", "allocated_levels"}
    for configuration in random_points(space, 300):
        space.validate(configuration)
        KVCodec(configuration, layout, artefacts={profile.profile_id: profile}, use_native=False)


def test_presets_without_a_window_or_a_range_over_heads_are_in_the_space() -> None:
    """The others the codec takes all the same."""
    heads = LAYOUTS[0].planes[0].heads
    profile = HeadProfile(key=np.ones((2, heads)), value=np.ones((2, heads)))
    space = kv_strategy_space(LAYOUTS[0], {profile.profile_id: profile})
    inside = set()
    for name, preset in PRESETS.items():
        configuration = preset.configuration(LAYOUTS[0], profile.profile_id)
        validate_configuration(configuration, LAYOUTS[0])
        whole = configuration if configuration["quantise"] == "none" else {"sink_tokens": 0, **configuration}
        try:
            space.validate(whole)
        except FieldError:
            continue
        inside.add(name)
    assert inside == {"cachegen", "splitzip", "turboquant", "fp8", "nvfp4"}


def test_a_latent_pool_has_no_value_parameters() -> None:
    names = {parameter.name for parameter in kv_strategy_space(LAYOUTS[3]).parameters}
    assert "key_levels" in names
    assert not any(name.startswith("value") for name in names)


def test_only_the_coder_is_lossless() -> None:
    assert [p.name for p in kv_strategy_space(LAYOUTS[0]).parameters if not p.lossy] == ["code"]


def test_what_the_space_forbids_the_codec_refuses() -> None:
    space, refused = kv_strategy_space(LAYOUTS[3]), 0
    formats = ("none", "fp8_e4m3", "nvfp4")
    for code, transform, quantise in itertools.product(OFFERED_CODERS, ("none", "hadamard"), formats):
        configuration = Configuration({"transform": transform, "quantise": quantise, "code": code})
        # Sinks may be left out where a configuration is written by hand.
        whole = {**configuration, **({} if quantise == "none" else {"sink_tokens": 0})}
        try:
            space.validate(whole)
        except FieldError as error:
            assert error.code == "configuration.forbidden"
            refused += 1
            with pytest.raises(CodecError):
                validate_configuration(configuration, LAYOUTS[3])
        else:
            validate_configuration(configuration, LAYOUTS[3])
    assert refused == 10


def test_ids_that_stores_already_hold_stay_what_they_are() -> None:
    levels = Configuration(
        {
            "transform": "hadamard", "quantise": "levels", "sink_tokens": 1, "code": "entropy",
            "key_levels": 12, "key_axis": "channel", "key_group": 64,
            "value_levels": 6, "value_axis": "token", "value_group": 64,
        }
    )  # fmt: skip
    lossless = Configuration({"transform": "none", "quantise": "none", "code": "zstd"})
    assert (levels.config_id, lossless.config_id) == ("6c9bd009a99e706f", "e1b6b2b5f3e0764e")
    for configuration in (levels, lossless):
        kv_strategy_space(LAYOUTS[0]).validate(configuration)
        validate_configuration(configuration, LAYOUTS[0])


def test_a_window_may_be_kept_and_none_is_not_written() -> None:
    space = kv_strategy_space(LAYOUTS[0])
    plain = {
        "transform": "none", "quantise": "levels", "sink_tokens": 1, "code": "entropy",
        "key_levels": 12, "key_axis": "channel", "key_group": 64,
        "value_levels": 6, "value_axis": "token", "value_group": 64,
    }  # fmt: skip
    space.validate({**plain, "window_tokens": 64})
    assert validate_configuration(Configuration({**plain, "window_tokens": 64}), LAYOUTS[0]).window_tokens == 64
    with pytest.raises(FieldError, match="window_tokens") as caught:
        space.validate({**plain, "window_tokens": 0})
    assert caught.value.code == "configuration.default"
    with pytest.raises(FieldError, match="window_tokens"):
        space.validate({"transform": "none", "quantise": "none", "code": "zstd", "window_tokens": 64})
