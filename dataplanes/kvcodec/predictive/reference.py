"""The codec in torch, on any device: what the native kernels do, one layer after another.

Its sums are of float32 where the kernels' are of integers, so that a coefficient on the border of two cells may fall
into the other one; either side decodes the other's symbols to nearly the same values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dataplanes.kvcodec.predictive.artefact import PredictiveArtefact
from dataplanes.kvcodec.predictive.predictor import IntegerPredictor, to_integers

LARGEST_SYMBOL = 32000


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """What one pass over the layers made.

    Args:
        symbols: int16 `[L, tokens, R]`; zero beyond a token's rank.
        decoded: float32 `[L, tokens, W]`, means included.
        bound: float32 `[L, tokens, W]`: largest error of each element, rounding to the cache's dtype aside.
    """

    symbols: Tensor
    decoded: Tensor
    bound: Tensor


class ReferencePredictor:
    """One artefact at one step.

    Args:
        artefact: its tensors are widened to float32 once.
        step: one of its steps.
    """

    def __init__(self, artefact: PredictiveArtefact, step: float) -> None:
        self._artefact = artefact
        self._step = step
        self._ranks = artefact.ranks[artefact.steps.index(step)]
        self._predictors = [
            IntegerPredictor(artefact.narrow[layer].flatten(0, 1), *parts, artefact.largest)
            for layer, parts in enumerate(zip(artefact.narrow_scale, artefact.widen, artefact.widen_scale, strict=True))
        ]
        self._analysis, self._synthesis = artefact.analysis.float(), artefact.synthesis.float()

    def quantise(self, joint: Tensor, classes: Tensor, *, with_bound: bool = False) -> Quantised | None:
        """Code joint vectors.

        Args:
            joint: float32 `[L, tokens, W]`, keys before RoPE.
            classes: position class of each token.
            with_bound: also work out the bound, which takes as long again; else it is infinite.

        Returns:
            None if a value cannot be expressed.
        """
        means, steps = self._by_token(classes)
        history: list[Tensor] = []
        symbols: list[Tensor] = []
        bounds: list[Tensor] = []
        for layer in range(joint.shape[0]):
            guess = self._predict(layer, history, joint)
            residual = (joint[layer] - means[layer]) - guess
            analysis, synthesis, coded = self._analysis[layer], self._synthesis[layer], self._coded(layer, classes)
            coefficients = (residual @ analysis) * coded
            sizes = coefficients.abs() / steps
            if not bool((sizes < LARGEST_SYMBOL).all()):
                return None
            cells = torch.copysign((sizes + self._artefact.dead_zone).floor(), coefficients)
            history.append(guess + self._values(cells, steps) @ synthesis)
            symbols.append(cells.to(torch.int16))
            if not with_bound:
                bounds.append(torch.full_like(residual, torch.inf))
                continue
            # Half a cell and what the dead zone and the shrinking move, through the synthesis; then what it leaves out.
            cell = steps * (1 - self._artefact.dead_zone + self._artefact.shrink)
            left_out = (residual - coefficients @ synthesis).abs()
            bounds.append(cell * (coded.float() @ synthesis.abs()) + left_out)
        return Quantised(torch.stack(symbols), torch.stack(history) + means, torch.stack(bounds))

    def dequantise(self, symbols: Tensor, classes: Tensor) -> Tensor:
        """Joint vectors, float32 `[L, tokens, W]`, of symbols `[L, tokens, R]`."""
        means, steps = self._by_token(classes)
        history: list[Tensor] = []
        for layer, cells in enumerate(symbols.float()):
            guess = self._predict(layer, history, means)
            history.append(guess + self._values(cells, steps) @ self._synthesis[layer])
        return torch.stack(history) + means

    def _coded(self, layer: int, classes: Tensor) -> Tensor:
        """bool `[tokens, R]`: which coefficients are coded."""
        return torch.arange(self._analysis.shape[-1]) < self._ranks[classes, layer, None]

    def _values(self, cells: Tensor, steps: Tensor) -> Tensor:
        return (cells - self._artefact.shrink * cells.sign()) * steps

    def _predict(self, layer: int, history: list[Tensor], like: Tensor) -> Tensor:
        """float32 `[tokens, W]` from the decoded layers; before the first one they were zero."""
        artefact = self._artefact
        if not layer or not artefact.narrow.numel():
            return torch.zeros_like(like[layer])
        sources = range(layer - artefact.depth, layer)
        seen = [
            to_integers(history[source], artefact.gain[source], artefact.largest)
            if source >= 0
            else torch.zeros_like(like[layer])
            for source in sources
        ]
        return self._predictors[layer].predict(torch.cat(seen, dim=1))

    def _by_token(self, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Means `[L, tokens, W]` and steps `[tokens, 1]`."""
        means = self._artefact.mean[classes].transpose(0, 1)
        steps = self._step / torch.tensor(self._artefact.refinements)[classes]
        return means, steps[:, None]
