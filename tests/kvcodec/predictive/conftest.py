"""A small artefact, really fitted, on joint vectors that have something to predict and something to transform."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from controld.contract.configuration import Configuration
from dataplanes.kvcodec import ArtefactShelf, KVDtype, KVLayout, PredictiveArtefact
from dataplanes.kvcodec.predictive import Rotary
from dataplanes.kvcodec.predictive.fit import CalibrationData, FitSettings, fit_artefact
from dataplanes.kvcodec.predictive.place import Place, position_classes
from dataplanes.kvcodec.predictive.rotary import angles, rotate

torch.set_num_threads(1)

LAYERS, HEADS, DIM = 5, 2, 20
CHANNELS = 2 * HEADS * DIM


def joint_vectors(tokens: int, seed: int) -> Tensor:
    """`[layers, tokens, channels]`: each layer leans on the one before it; the first token is unlike the others."""
    mixing = torch.Generator().manual_seed(0)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 10, generator=generator) @ torch.randn(10, CHANNELS, generator=mixing)
    layers = []
    for layer in range(LAYERS):
        x = x @ torch.randn(CHANNELS, CHANNELS, generator=mixing) / CHANNELS**0.5
        x = x + 0.3 * torch.randn(tokens, CHANNELS, generator=generator)
        layers.append(x + layer)
        layers[-1][0] += 20
    return torch.stack(layers)


def calibration_data(tokens: int = 300, prompts: int = 4) -> CalibrationData:
    return CalibrationData(
        model_fingerprint="f" * 64,
        texts=("synthetic#1",),
        heads=HEADS,
        key_dim=DIM,
        value_dim=DIM,
        rotary=Rotary(10_000.0, 16),
        joint=torch.cat([joint_vectors(tokens, seed) for seed in range(prompts)], dim=1),
        positions=position_classes(Place(0), tokens, ()).repeat(prompts),
        fisher=torch.eye(CHANNELS).expand(LAYERS, -1, -1) * 2e-6,
        prompt_tokens=tokens,
    )


@dataclass(frozen=True)
class Bench:
    """An artefact with what is needed to use it."""

    artefact: PredictiveArtefact
    artefacts: ArtefactShelf

    def layout(self, dtype: KVDtype = KVDtype.FLOAT32, page_tokens: int = 4) -> KVLayout:
        return KVLayout.keys_then_values(layers=LAYERS, heads=HEADS, head_dim=DIM, dtype=dtype, page_tokens=page_tokens)

    def configuration(self, step: float = 0.2) -> Configuration:
        return Configuration(
            {
                "transform": "klt",
                "quantise": "uniform",
                "artefact": self.artefact.artefact_id,
                "step": step,
                "code": "rans",
            }
        )

    def planes(self, tokens: int, seed: int = 99, dtype: torch.dtype = torch.float32) -> Tensor:
        """KV of a request: keys with RoPE, then values."""
        joint = joint_vectors(tokens, seed)
        cosines, sines = angles(self.artefact.rotary, 0, tokens)
        keys = joint[..., : HEADS * DIM].reshape(LAYERS, tokens, HEADS, DIM)
        values = joint[..., HEADS * DIM :].reshape(LAYERS, tokens, HEADS, DIM)
        return torch.cat([rotate(keys, cosines, sines, 1), values]).to(dtype)


@pytest.fixture(scope="session")
def calibration() -> CalibrationData:
    return calibration_data()


@pytest.fixture(scope="session")
def bench(calibration: CalibrationData) -> Bench:
    artefact = fit_artefact(calibration, FitSettings(bottleneck=32))
    shelf = ArtefactShelf()
    shelf.add(artefact)
    return Bench(artefact, shelf)
