"""Gaussian processes over encoded configurations, by BoTorch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from botorch.exceptions import BotorchError
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.utils.gpytorch_modules import get_covar_module_with_dim_scaled_prior
from gpytorch.mlls import ExactMarginalLogLikelihood
from linear_operator.utils.cholesky import psd_safe_cholesky
from linear_operator.utils.errors import NanError, NotPSDError
from numpy.typing import NDArray

Array = NDArray[np.float64]
Hyperparameters = Mapping[str, Any]

FIT_ERRORS = (BotorchError, NanError, NotPSDError, RuntimeError, ValueError, ArithmeticError)
"""What a fit raises on degenerate data."""

_REFIT_GROWTH = 1.15
_MAX_ITERATIONS = 60
_SMALLEST_NOISE = 1e-6
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Prediction:
    """Mean and standard deviation of each output at each point, `[n, outputs]`."""

    mean: Array
    deviation: Array


class GaussianProcess:
    """Independent outputs over the same inputs; keeps its hyperparameters until the data grows by 15 %, or shrinks."""

    def __init__(self) -> None:
        self._kept: Hyperparameters | None = None
        self._kept_at = 0
        self._centre = np.zeros(1)
        self._scale = np.ones(1)

    def fit(self, features: Array, targets: Array, relative_variance: Array | None = None) -> None:
        """Take the data, and fit the hyperparameters where they are out of date.

        Args:
            features: `[n, columns]` in the unit cube.
            targets: `[n, outputs]`, finite.
            relative_variance: `[n]`, how the noise of the rows compares; None where it is alike. Its level is inferred.

        Raises:
            one of `FIT_ERRORS`: the data cannot be fitted.
        """
        if not np.isfinite(targets).all() or len(features) < 2:
            raise ValueError("targets are finite, and at least two")
        self._centre = targets.mean(axis=0)
        deviation = targets.std(axis=0)
        self._scale = np.where(deviation > 1e-12 * np.maximum(np.abs(self._centre), 1.0), deviation, 1.0)
        x = torch.as_tensor(features, dtype=torch.float64)
        y = torch.as_tensor((targets - self._centre) / self._scale, dtype=torch.float64)
        model = _model(x, y)
        # Fewer rows than before are another study's.
        stale = self._kept is None or not self._kept_at <= len(features) < self._kept_at * _REFIT_GROWTH
        if self._kept is not None:
            model.load_state_dict(self._kept)
        if stale:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                likelihood = ExactMarginalLogLikelihood(model.likelihood, model)
                fit_gpytorch_mll(likelihood, optimizer_kwargs={"options": {"maxiter": _MAX_ITERATIONS}})
            self._kept = {name: value.clone() for name, value in model.state_dict().items()}
            self._kept_at = len(features)
        model.eval()
        self._condition(model, x, y, relative_variance)

    def _condition(self, model: Any, x: torch.Tensor, y: torch.Tensor, relative_variance: Array | None) -> None:
        """Factor the covariance of the data once; every prediction is then a product of matrices.

        BoTorch's posterior would factor a joint covariance for each of some thousand points, or hold one of them all.
        """
        with torch.no_grad():
            outputs = y.shape[-1]
            level = model.likelihood.noise.reshape(outputs, 1)
            weights = torch.ones(len(x), dtype=torch.float64)
            if relative_variance is not None:
                weights = torch.as_tensor(relative_variance / relative_variance.mean(), dtype=torch.float64)
            noise = (level * weights).clamp_min(_SMALLEST_NOISE)
            covariance = model.covar_module(x).to_dense().reshape(outputs, len(x), len(x))
            self._factor = psd_safe_cholesky(covariance + torch.diag_embed(noise))
            self._mean = model.mean_module.constant.reshape(outputs, 1, 1)
            residual = y.T[..., None] - self._mean
            self._weights = torch.cholesky_solve(residual, self._factor)
        self._kernel, self._inputs = model.covar_module, x

    def predict(self, features: Array) -> Prediction:
        """Mean and deviation of what would be measured without noise."""
        means, deviations = [], []
        with torch.no_grad():
            for block in torch.split(torch.as_tensor(features, dtype=torch.float64), _BLOCK):
                cross = self._cross_covariance(block)
                prior = self._kernel(block, diag=True).reshape(len(cross), len(block))
                explained = torch.linalg.solve_triangular(self._factor, cross.mT, upper=False).square_().sum(dim=1)
                means.append((cross @ self._weights + self._mean)[..., 0].T.numpy())
                deviations.append((prior - explained).clamp_min(0).sqrt().T.numpy())
        return Prediction(self._unscaled(means), _finite(np.concatenate(deviations)) * self._scale)

    def predict_mean(self, features: Array) -> Array:
        """The mean alone, `[n, outputs]`, in half the time."""
        with torch.no_grad():
            blocks = torch.split(torch.as_tensor(features, dtype=torch.float64), _BLOCK)
            means = [(self._cross_covariance(b) @ self._weights + self._mean)[..., 0].T.numpy() for b in blocks]
        return self._unscaled(means)

    def _cross_covariance(self, block: torch.Tensor) -> torch.Tensor:
        covariance: torch.Tensor = self._kernel(block, self._inputs).to_dense()
        return covariance.reshape(len(self._factor), len(block), len(self._inputs))

    def _unscaled(self, means: list[Array]) -> Array:
        return _finite(np.concatenate(means)) * self._scale + self._centre


def _finite(values: Array) -> Array:
    if not np.isfinite(values).all():
        raise ValueError("the prediction is not finite")
    return values


def _model(x: torch.Tensor, y: torch.Tensor) -> Any:
    outputs = y.shape[-1]
    kernel = get_covar_module_with_dim_scaled_prior(
        ard_num_dims=x.shape[-1], batch_shape=torch.Size([outputs] if outputs > 1 else []), use_rbf_kernel=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return SingleTaskGP(x, y, covar_module=kernel, outcome_transform=None)
