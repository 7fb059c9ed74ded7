"""From a model's KV and what the model feels of it to an artefact: predictors, transforms, coder tables.

Layer by layer, closed loop: a layer is predicted from earlier ones as the receiver will have decoded them. The
prediction is a reduced-rank regression, the transform the Karhunen-Loeve transform of what is left, both in the metric
of the Fisher information, in which a unit of noise costs the same wherever it falls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dataplanes.kvcodec.errors import CodecError
from dataplanes.kvcodec.predictive.artefact import GRANULE, PredictiveArtefact, Rotary
from dataplanes.kvcodec.predictive.place import ORDINARY
from dataplanes.kvcodec.predictive.predictor import (
    IntegerPredictor,
    fit_predictor,
    integer_gain,
    largest_factor,
    to_integers,
)
from dataplanes.kvcodec.predictive.reference import ReferencePredictor
from dataplanes.kvcodec.predictive.tables import (
    CLASSES,
    TABLE_SYMBOLS,
    frequency_tables,
    scale_class,
    symbol_places,
)

_COUNTED_TOKENS = 3000
_BAND_STRIDE = 4

Progress = Callable[[str, int, int], None]
"""`(what, done, total)`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """Constants of the fit.

    Args:
        depth: previous layers that a prediction sees.
        bottleneck: rank of the prediction.
        steps: for which coder tables are made. A step of s costs at most about s squared nats a token on a prompt of
            512 tokens.
        reference_step: at which the loop is closed while fitting.
        first_refine: how much finer the step of the first four tokens is.
        bands: sizes of the bands at a request's end and how much finer the step is there.
        dead_zone, shrink: see `PredictiveArtefact`.
        ridge: of the regression, relative to the mean square of its inputs.
        diagonal_share: how far the Fisher information's diagonal moves to its mean over keys and over values.
        off_diagonal_share: what is kept of its other elements, which are noisier than its diagonal.
        rarest_mean: coefficients whose symbols are smaller than this on average, and all behind them, are not coded.
    """

    depth: int = 2
    bottleneck: int = 128
    steps: tuple[float, ...] = (0.1, 0.14, 0.17, 0.2, 0.28, 0.4, 0.56, 0.8)
    reference_step: float = 0.28
    first_refine: float = 8.0
    bands: tuple[tuple[int, float], ...] = ((128, 1.4), (64, 2.0), (32, 2.8), (16, 4.0))
    dead_zone: float = 0.4
    shrink: float = 0.02
    ridge: float = 1e-3
    diagonal_share: float = 0.1
    off_diagonal_share: float = 0.5
    rarest_mean: float = 0.003


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CalibrationData:
    """A model's KV on calibration texts; C = heads * (key_dim + value_dim).

    Args:
        model_fingerprint, texts, heads, key_dim, value_dim, rotary: see `PredictiveArtefact`.
        joint: bfloat16 or float32 `[L, tokens, C]`: keys before RoPE, then values.
        positions: int64 `[tokens]` position classes, as of requests whose end is not known.
        fisher: float32 `[L, C, C]`: mean over tokens but the first of g g' by the continuation's length, g being the
            gradient of the continuation's log-likelihood.
        prompt_tokens: of the prompts that `fisher` is a mean over.
    """

    model_fingerprint: str
    texts: tuple[str, ...]
    heads: int
    key_dim: int
    value_dim: int
    rotary: Rotary
    joint: Tensor
    positions: Tensor
    fisher: Tensor
    prompt_tokens: int


def fit_artefact(
    data: CalibrationData, settings: FitSettings | None = None, progress: Progress = lambda what, done, total: None
) -> PredictiveArtefact:
    """Fit everything.

    Raises:
        CodecError: there is too little data, or it is not finite.
    """
    settings = settings or FitSettings()
    layers, tokens, channels = data.joint.shape
    if tokens < 2 * channels or not bool(data.fisher.isfinite().all()):
        raise CodecError(
            f"{tokens} tokens are too few for {channels} channels, or the Fisher information is not finite",
            code="codec.calibration",
            hint="give more texts",
        )
    width = -(-channels // GRANULE) * GRANULE
    metric = shrunk_metric(data, settings)
    kinds = ORDINARY + 1 + len(settings.bands)
    mean = torch.zeros(kinds, layers, width)
    for kind in range(kinds):
        # Bands hold tokens like any other.
        rows = data.positions == min(kind, ORDINARY)
        mean[kind, :, :channels] = data.joint[:, rows].float().mean(1) if bool(rows.any()) else 0.0
    ordinary = data.positions == ORDINARY
    bottleneck = settings.bottleneck if settings.depth else 0
    gain = torch.zeros(layers, width)
    largest = largest_factor(max(settings.depth * width, bottleneck))
    predictors = [IntegerPredictor.none(settings.depth * width, bottleneck, width)] * layers
    analysis = torch.zeros(layers, width, width, dtype=torch.bfloat16)
    synthesis = torch.zeros(layers, width, width, dtype=torch.bfloat16)
    seen, units = torch.zeros(int(ordinary.sum()), settings.depth, width), torch.zeros(settings.depth, width)
    for layer in range(layers):
        progress("fitting layers", layer, layers)
        x = data.joint[layer, ordinary].float() - mean[ORDINARY, layer, :channels]
        root, inverse_root = square_roots(metric[layer])
        guess = torch.zeros_like(x)
        if layer and bottleneck:
            inputs = seen.flatten(1)
            fitted = fit_predictor(
                inputs,
                units.flatten(),
                x,
                root,
                inverse_root,
                bottleneck=bottleneck,
                ridge=settings.ridge,
                largest=largest,
            )
            predictors[layer] = fitted.padded(width)
            guess = fitted.predict(inputs)
        residual = x - guess
        forward, backward = weighted_transform(residual, root, inverse_root)
        analysis[layer, :channels, :channels] = forward.to(torch.bfloat16)
        synthesis[layer, :channels, :channels] = backward.to(torch.bfloat16)
        forward, backward = (part[layer, :channels, :channels].float() for part in (analysis, synthesis))
        coefficients = residual @ forward / settings.reference_step
        cells = torch.copysign((coefficients.abs() + settings.dead_zone).floor(), coefficients)
        values = (cells - settings.shrink * cells.sign()) * settings.reference_step
        decoded = guess + values @ backward
        gain[layer, :channels] = integer_gain(decoded, largest)
        if settings.depth:
            seen, units = seen.roll(-1, dims=1), units.roll(-1, dims=0)
            units[-1, :channels] = 1 / gain[layer, :channels]
            seen[:, -1, :channels] = to_integers(decoded, gain[layer, :channels], largest)
    untabled = PredictiveArtefact(
        model_fingerprint=data.model_fingerprint,
        texts=data.texts,
        layers=layers,
        heads=data.heads,
        key_dim=data.key_dim,
        value_dim=data.value_dim,
        rotary=data.rotary,
        steps=settings.steps,
        bands=tuple(tokens for tokens, _ in settings.bands),
        refinements=(settings.first_refine, settings.first_refine, 1.0, *(refine for _, refine in settings.bands)),
        dead_zone=settings.dead_zone,
        shrink=settings.shrink,
        mean=mean,
        gain=gain,
        narrow=torch.stack([one.narrow for one in predictors]).view(layers, settings.depth, width, bottleneck),
        narrow_scale=torch.stack([one.narrow_scale for one in predictors]),
        widen=torch.stack([one.widen for one in predictors]),
        widen_scale=torch.stack([one.widen_scale for one in predictors]),
        analysis=analysis,
        synthesis=synthesis,
        classes=torch.zeros(len(settings.steps), kinds, layers, width, dtype=torch.uint8),
        ranks=torch.full((len(settings.steps), kinds, layers), width, dtype=torch.int32),
        frequencies=torch.from_numpy(frequency_tables(np.zeros((CLASSES, TABLE_SYMBOLS), np.int64))),
    )
    return _with_tables(untabled, data, settings, progress)


def shrunk_metric(data: CalibrationData, settings: FitSettings) -> Tensor:
    """The Fisher information in units of nats, regularised; float32 `[L, C, C]`.

    White noise of variance s * s / 12 on every channel of every layer costs s squared nats a token on prompts of the
    calibrated length: half the sum over layers and tokens of the trace of metric times noise.
    """
    layers, channels, _ = data.fisher.shape
    metric = (data.fisher + data.fisher.mT) / 2
    split = data.heads * data.key_dim
    diagonal = metric.diagonal(dim1=-2, dim2=-1)
    parts = [
        part.mean(1, keepdim=True).expand(-1, part.shape[1]) for part in (diagonal[:, :split], diagonal[:, split:])
    ]
    keep = 1 - settings.diagonal_share
    wanted = keep * diagonal + settings.diagonal_share * torch.cat(parts, dim=1)
    metric = metric * (keep * settings.off_diagonal_share)
    metric.diagonal(dim1=-2, dim2=-1).copy_(wanted)
    return metric * (data.prompt_tokens * layers * channels / 24)


def square_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric square root of a positive matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(metric.double())
    values = values.clamp(min=float(values.max()) * 1e-9)
    root = (vectors * values.sqrt()) @ vectors.mT
    inverse = (vectors / values.sqrt()) @ vectors.mT
    return root.float(), inverse.float()


def weighted_transform(residual: Tensor, root: Tensor, inverse_root: Tensor) -> tuple[Tensor, Tensor]:
    """The Karhunen-Loeve transform in the metric, largest variance first: analysis and synthesis `[C, C]`."""
    covariance = (residual.T @ residual).double() / residual.shape[0]
    weighted = root.double() @ covariance @ root.double()
    _, vectors = torch.linalg.eigh((weighted + weighted.mT) / 2)
    vectors = vectors.flip(1)
    return (root.double() @ vectors).float(), (vectors.mT @ inverse_root.double()).float()


def _sample(positions: Tensor, kinds: int) -> tuple[Tensor, Tensor]:
    """Tokens to count symbols of, and the class that each stands for.

    All first tokens, an even share of the others, and some of those once more for each band.
    """
    ordinary = (positions == ORDINARY).nonzero().flatten()
    ordinary = ordinary[:: max(1, len(ordinary) // _COUNTED_TOKENS)]
    first = (positions < ORDINARY).nonzero().flatten()
    again = ordinary[::_BAND_STRIDE]
    bands = [torch.full_like(again, kind) for kind in range(ORDINARY + 1, kinds)]
    tokens = torch.cat([first, ordinary, *([again] * len(bands))])
    return tokens, torch.cat([positions[first], positions[ordinary], *bands])


def _with_tables(
    artefact: PredictiveArtefact, data: CalibrationData, settings: FitSettings, progress: Progress
) -> PredictiveArtefact:
    """Count symbols at every step; the classes, ranks and tables that follow."""
    layers, _, channels = data.joint.shape
    tokens, kinds = _sample(data.positions, artefact.position_classes)
    classes = torch.zeros_like(artefact.classes)
    ranks = torch.zeros_like(artefact.ranks)
    counts = np.zeros((CLASSES, TABLE_SYMBOLS), np.int64)
    joint = torch.zeros(layers, tokens.numel(), artefact.width)
    joint[..., :channels] = data.joint[:, tokens].float()
    for index, step in enumerate(artefact.steps):
        progress("counting symbols", index, len(artefact.steps))
        quantised = ReferencePredictor(artefact, step).quantise(joint, kinds)
        if quantised is None:
            raise CodecError(f"symbols at step {step} are too large", code="codec.calibration")
        for layer, block in enumerate(quantised.symbols):
            for kind in range(artefact.position_classes):
                rows = block[kinds == kind]
                if not len(rows):
                    continue
                mean_size = rows.abs().float().mean(0)
                classes[index, kind, layer] = scale_class(mean_size)
                common = (mean_size >= settings.rarest_mean).nonzero()
                needed = int(common.max()) + 1 if len(common) else 0
                ranks[index, kind, layer] = -(-needed // GRANULE) * GRANULE
                places = symbol_places(rows.long()).clamp(max=TABLE_SYMBOLS - 1)
                flat = (classes[index, kind, layer].long() * TABLE_SYMBOLS + places).flatten()
                counts += torch.bincount(flat, minlength=CLASSES * TABLE_SYMBOLS).view(CLASSES, -1).numpy()
    return replace(artefact, classes=classes, ranks=ranks, frequencies=torch.from_numpy(frequency_tables(counts)))
