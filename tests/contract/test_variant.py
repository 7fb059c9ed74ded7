"""Completions of a lossy part have names, and the names lead back."""

from __future__ import annotations

import pytest

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from controld.contract.space import Parameter, StrategySpace
from controld.contract.variant import variant_name, with_variant

KV = StrategySpace(
    parameters=(
        Parameter(name="quantise", values=("levels", "nvfp4")),
        Parameter(name="code", values=("none", "entropy"), lossy=False),
    )
)
VIDEO = StrategySpace(
    parameters=(
        Parameter(name="steps", values=(2, 4), ordered=True),
        Parameter(name="vae", values=("stream", "async"), lossy=False),
        Parameter(name="ranks", values=(1, 2), ordered=True, lossy=False),
    )
)


@pytest.mark.parametrize("space", [KV, VIDEO])
def test_every_configuration_is_its_lossy_part_with_its_variant(space: StrategySpace) -> None:
    for lossy in space.enumerate(lossy_only=True):
        wholes = space.coders(lossy)
        names = [variant_name(space, whole) for whole in wholes]
        assert len(set(names)) == len(names) > 1
        assert [with_variant(lossy, name) for name in names] == list(wholes)


def test_a_coder_is_its_own_name_and_other_parameters_are_spelt_out() -> None:
    assert variant_name(KV, Configuration({"quantise": "nvfp4", "code": "entropy"})) == "entropy"
    assert variant_name(VIDEO, Configuration({"steps": 4, "vae": "async", "ranks": 2})) == '{"ranks":2,"vae":"async"}'


def test_a_space_without_lossless_parameters_has_no_variants() -> None:
    space = StrategySpace(parameters=(Parameter(name="steps", values=(2, 4)),))
    assert variant_name(space, Configuration({"steps": 2})) == ""


def test_what_is_no_variant_is_refused() -> None:
    with pytest.raises(FieldError):
        with_variant(Configuration({"steps": 2}), '{"vae":')


def test_a_variant_that_would_change_the_lossy_part_is_refused() -> None:
    with pytest.raises(FieldError, match=r"variant\.steps"):
        with_variant(Configuration({"steps": 2}), '{"steps":4,"vae":"async"}')
    with pytest.raises(FieldError, match=r"variant\.code"):
        with_variant(Configuration({"code": "none"}), "entropy")


def test_the_variant_of_defaults_has_a_name_too() -> None:
    vae = Parameter(name="vae", values=("stream", "async"), lossy=False, default="stream")
    space = StrategySpace(parameters=(Parameter(name="steps", values=(2, 4)), vae))
    lossy = Configuration({"steps": 2})
    names = [variant_name(space, whole) for whole in space.coders(lossy)]
    assert names == ["{}", '{"vae":"async"}']
    assert [with_variant(lossy, name) for name in names] == list(space.coders(lossy))


def test_a_kv_part_whose_coder_does_not_exist_has_no_name() -> None:
    assert variant_name(KV, Configuration({"quantise": "levels"})) == ""
