"""Artefacts on disk and on the shelf; a stale, foreign or damaged one is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from controld.contract.configuration import Configuration
from controld.contract.errors import FieldError
from dataplanes.kvcodec import ArtefactShelf, CodecError, HeadProfile, PredictiveArtefact
from dataplanes.kvcodec.artefacts import id_of, load_artefact, misfit, read_artefact, save_head_profile
from dataplanes.kvcodec.predictive.artefact import ArtefactError, find_predictive
from dataplanes.kvcodec.space import kv_strategy_space


def test_saved_and_loaded_is_the_same(bench, tmp_path: Path) -> None:
    path = bench.artefact.save(tmp_path)
    assert path.stem == bench.artefact.artefact_id
    loaded, fingerprint = load_artefact(path)
    assert fingerprint == bench.artefact.model_fingerprint
    assert isinstance(loaded, PredictiveArtefact)
    assert loaded.artefact_id == bench.artefact.artefact_id
    assert torch.equal(loaded.analysis, bench.artefact.analysis)
    assert list(tmp_path.iterdir()) == [path]


def test_the_id_follows_every_tensor_and_field(bench) -> None:
    artefact = bench.artefact
    changed = [
        dataclasses.replace(artefact, mean=artefact.mean + 1e-3),
        dataclasses.replace(artefact, model_fingerprint="0" * 64),
        dataclasses.replace(artefact, shrink=0.03),
    ]
    assert len({artefact.artefact_id, *(other.artefact_id for other in changed)}) == 4


def test_a_damaged_or_renamed_file_is_refused(bench, tmp_path: Path) -> None:
    path = bench.artefact.save(tmp_path)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtefactError):
        load_artefact(path)
    path.write_bytes(data[:1000])
    with pytest.raises(ArtefactError, match="no codec artefact"):
        load_artefact(path)
    other = bench.artefact.save(tmp_path / "again").rename(tmp_path / "0123456789abcdef.safetensors")
    with pytest.raises(ArtefactError, match="holds the artefact"):
        load_artefact(other)


def test_another_models_artefacts_are_left_on_disk(bench, tmp_path: Path) -> None:
    bench.artefact.save(tmp_path)
    dataclasses.replace(bench.artefact, model_fingerprint="0" * 64).save(tmp_path)
    shelf = ArtefactShelf.of_folder(tmp_path, bench.artefact.model_fingerprint)
    assert list(shelf) == [bench.artefact.artefact_id]
    assert len(ArtefactShelf.of_folder(tmp_path / "none", "")) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", (0.2, 0.1)),
        ("dead_zone", 0.9),
        ("refinements", (1.0, 1.0)),
        ("bands", (32, 128)),
        ("heads", 7),
        ("classes", None),
        ("frequencies", None),
        ("mean", None),
    ],
)
def test_what_does_not_fit_together_is_refused(bench, field: str, value: object) -> None:
    artefact = bench.artefact
    broken = {
        "classes": torch.full_like(artefact.classes, 200),
        "frequencies": artefact.frequencies + 1,
        "mean": artefact.mean * float("nan"),
    }
    with pytest.raises(ArtefactError):
        dataclasses.replace(artefact, **{field: broken.get(field, value)})


def test_the_space_offers_it_only_where_it_is_and_fits(bench) -> None:
    without = kv_strategy_space(bench.layout())
    space = kv_strategy_space(bench.layout(), bench.artefacts)
    assert "artefact" not in {parameter.name for parameter in without.parameters}
    for step in bench.artefact.steps:
        space.validate(bench.configuration(step))
    for changes in ({"step": 0.15}, {"code": "zstd"}, {"transform": "hadamard"}, {"artefact": "0" * 16}):
        with pytest.raises(FieldError):
            space.validate(Configuration({**bench.configuration(), **changes}))
    with pytest.raises(CodecError):
        find_predictive(bench.artefacts, "0" * 16)


def test_a_head_profile_is_a_file_like_any_artefact(bench, tmp_path: Path) -> None:
    layers, heads = bench.artefact.layers, bench.artefact.heads
    profile = HeadProfile(
        key=np.full((layers, heads), 0.25), value=np.arange(1.0, layers * heads + 1).reshape(layers, -1)
    )
    path = save_head_profile(profile, tmp_path, "f" * 64)
    bench.artefact.save(tmp_path)
    assert load_artefact(path) == (profile, "f" * 64)
    shelf = ArtefactShelf.of_folder(tmp_path, "f" * 64)
    assert set(shelf) == {profile.profile_id, bench.artefact.artefact_id}
    assert id_of(shelf[profile.profile_id]) == profile.profile_id
    assert not misfit(profile, bench.layout())
    other = HeadProfile(key=np.ones((layers, heads + 1)), value=np.ones((layers, heads + 1)))
    assert "heads" in misfit(other, bench.layout())
    content = bytearray(path.read_bytes())
    content[-1] ^= 0x80  # the sign of the last number
    with pytest.raises(ArtefactError, match="positive"):
        read_artefact(bytes(content), "a test")
    content = path.read_bytes().replace(b'"value"', b'"valve"')
    with pytest.raises(ArtefactError, match="no codec artefact"):
        read_artefact(content, "a test")
