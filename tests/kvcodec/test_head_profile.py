"""Frames that name a head profile decode with it and are refused without."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from controld.contract.configuration import Configuration, Value
from dataplanes.kvcodec import (
    CodecError,
    FrameError,
    FrameErrorReason,
    HeadProfile,
    KVCodec,
    KVDtype,
    KVLayout,
    Plane,
    PlaneRole,
    decode_frame,
)
from dataplanes.kvcodec.parameters import parse_parameters
from dataplanes.kvcodec.partition import parts_of

torch.set_num_threads(1)

LAYOUT = KVLayout.keys_then_values(layers=3, heads=4, head_dim=8, dtype=KVDtype.BFLOAT16, page_tokens=4)
TABLE = np.arange(1.0, 13.0).reshape(3, 4)
PROFILE = HeadProfile(key=TABLE, value=TABLE[::-1])
ARTEFACTS = {PROFILE.profile_id: PROFILE}


def by_head(profile: HeadProfile = PROFILE, **changes: Value) -> Configuration:
    values: dict[str, Value] = {"transform": "none", "quantise": "head_levels", "code": "bitpack"}
    for part in ("key", "value"):
        values |= {
            f"{part}_levels": 16, f"{part}_low_levels": 4, f"{part}_low_percent": 50,
            f"{part}_axis": "token", f"{part}_group": 8,
        }  # fmt: skip
    return Configuration({**values, "head_profile": profile.profile_id, **changes})


def test_the_id_is_that_of_the_content() -> None:
    assert HeadProfile(key=TABLE.copy(), value=TABLE[::-1]) == PROFILE
    assert len({PROFILE, HeadProfile(key=TABLE, value=TABLE[::-1])}) == 1
    for key, value in ((TABLE * 2, TABLE[::-1]), (TABLE[::-1], TABLE), (TABLE.reshape(4, 3), TABLE.reshape(4, 3))):
        assert HeadProfile(key=key, value=value) != PROFILE
    assert PROFILE.profile_id == "da0c7e36cf0002ca"


def test_a_profile_is_a_copy_that_nobody_changes() -> None:
    table = TABLE.copy()
    profile = HeadProfile(key=table, value=table)
    table[0, 0] = 99
    assert profile.key[0, 0] == 1
    with pytest.raises(ValueError, match="read-only"):
        profile.key[0, 0] = 99


@pytest.mark.parametrize(
    "table", [np.ones(3), np.ones((0, 4)), np.zeros((3, 4)), -TABLE, TABLE * np.nan, TABLE * np.inf], ids=str
)
def test_tables_are_positive_numbers(table: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> None:
    with pytest.raises(CodecError):
        HeadProfile(key=TABLE, value=table)


def test_the_least_important_heads_of_all_layers_are_low() -> None:
    parts = parts_of(LAYOUT, parse_parameters(by_head(), LAYOUT), ARTEFACTS)
    levels = {}
    for part in parts:
        assert part.levels is not None
        chosen = part.heads or (tuple(range(4)),) * len(part.stack.positions)
        for position, heads in zip(part.stack.positions, chosen, strict=True):
            levels |= {(position, head): part.levels.levels for head in heads}
    expected = {(layer, head): 4 if TABLE[layer, head] <= 6 else 16 for layer in range(3) for head in range(4)}
    assert {where: count for where, count in levels.items() if where[0] < 3} == expected
    mirrored = {(5 - layer, head): count for (layer, head), count in expected.items()}
    assert {where: count for where, count in levels.items() if where[0] >= 3} == mirrored


def test_a_frame_needs_the_very_profile_that_it_names() -> None:
    planes = torch.randn(6, 20, 4, 8).bfloat16()
    frame = KVCodec(by_head(), LAYOUT, artefacts=ARTEFACTS).encode(planes, first_token=0)
    decode_frame(frame, artefacts=ARTEFACTS)
    other = HeadProfile(key=TABLE[::-1], value=TABLE)
    # Also after a receiver that had it.
    for artefacts in ({}, {other.profile_id: other}, {PROFILE.profile_id: other}, {PROFILE.profile_id: "profile"}):
        with pytest.raises(FrameError) as caught:
            decode_frame(frame, artefacts=artefacts)
        assert caught.value.reason is FrameErrorReason.ARTEFACT


def test_a_profile_of_another_model_is_refused() -> None:
    for key in (np.ones((2, 4)), np.ones((3, 5))):
        profile = HeadProfile(key=key, value=key)
        with pytest.raises(CodecError, match="layers"):
            KVCodec(by_head(profile), LAYOUT, artefacts={profile.profile_id: profile})
    uneven = KVLayout(
        planes=(Plane(PlaneRole.KEY, 2, 8), Plane(PlaneRole.VALUE, 2, 8), Plane(PlaneRole.KEY, 1, 8)),
        dtype=KVDtype.BFLOAT16,
        page_tokens=4,
    )
    profile = HeadProfile(key=np.ones((2, 2)), value=np.ones((1, 2)))
    with pytest.raises(CodecError, match="heads"):
        KVCodec(by_head(profile), uneven, artefacts={profile.profile_id: profile})


def test_equal_importance_still_gives_a_split_and_equal_levels_none() -> None:
    flat = HeadProfile(key=np.ones((3, 4)), value=np.ones((3, 4)))
    parameters = parse_parameters(by_head(flat), LAYOUT)
    parts = parts_of(LAYOUT, parameters, {flat.profile_id: flat})
    assert [part.heads for part in parts].count(None) == 4
    same = parse_parameters(by_head(key_low_levels=16, value_low_levels=16), LAYOUT)
    assert [part.stack for part in parts_of(LAYOUT, same, ARTEFACTS)] == list(LAYOUT.stacks)


@pytest.mark.parametrize(
    "changes", [{"key_low_levels": 17}, {"key_low_percent": 0}, {"key_low_percent": 100}, {"head_profile": 7}], ids=str
)
def test_settings_out_of_range_are_refused(changes: dict[str, Value]) -> None:
    with pytest.raises(CodecError, match=r"configuration\."):
        parse_parameters(by_head(**changes), LAYOUT)
