"""`python -m dataplanes.sglang.profiler.calibrate`: make a model's codec artefact from texts, in a minute or two."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from controld.contract.errors import ControldError
from dataplanes.kvcodec import HeadProfile
from dataplanes.kvcodec.artefacts import save_head_profile
from dataplanes.kvcodec.predictive.artefact import PredictiveArtefact, Rotary
from dataplanes.kvcodec.predictive.fit import CalibrationData, FitSettings, fit_artefact
from dataplanes.kvcodec.predictive.place import SINK_TOKENS, Place, position_classes
from dataplanes.kvcodec.predictive.rotary import angles, rotate
from dataplanes.sglang.model_identity import ModelIdentity, identify_model
from dataplanes.sglang.profiler.corpus import Corpus, python_manual, python_sources, read_corpus
from dataplanes.sglang.profiler.head_importance import measure_head_importance
from dataplanes.sglang.profiler.quality import QualityMeter, load_model
from dataplanes.sglang.profiler.wire_codec import layout_of

PROMPT_TOKENS = 512
CONTINUATION_TOKENS = 64
HEAD_PAGE_TOKENS = 64
"""Tokens of a page, and of the groups whose errors weigh the heads."""


class CalibrationError(ControldError):
    """The model or the texts cannot be calibrated on."""


def calibration_corpora(texts: Sequence[Path]) -> list[Corpus]:
    """The mix to calibrate on: the Python manual and the sources of Python's library, and whatever is given besides."""
    return [python_manual(), python_sources(), *(read_corpus(path) for path in texts)]


def calibration_segments(model_dir: Path, corpora: Sequence[Corpus], count: int) -> torch.Tensor:
    """Segments of prompt and continuation from the calibration part of every corpus in turn, int64 `[count, tokens]`.

    Raises:
        CalibrationError: the texts are too short.
    """
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
    size, share = PROMPT_TOKENS + CONTINUATION_TOKENS, -(-count // len(corpora))
    rows: list[list[torch.Tensor]] = []
    for corpus in corpora:
        text = "\n\n".join(corpus.calibration)[: share * size * 12]
        ids = tokenizer(text, verbose=False, return_tensors="pt").input_ids[0]
        rows.append(list(ids[: len(ids) // size * size].view(-1, size)[:share]))
    segments = [row for turn in range(share) for row in (part[turn] for part in rows if turn < len(part))]
    if len(segments) < count:
        raise CalibrationError(
            f"the texts have {len(segments)} segments of {size} tokens, {count} are needed",
            code="calibration.too_short",
            hint="give more texts, or fewer --segments",
        )
    return torch.stack(segments[:count])


def rotary_of(model: Any) -> Rotary:
    """How a `transformers` model rotates its keys.

    Raises:
        CalibrationError: not with plain RoPE.
    """
    config = model.config
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = parameters.get("rope_type", "default")
    theta = parameters.get("rope_theta", getattr(config, "rope_theta", None))
    if kind != "default" or theta is None:
        raise CalibrationError(f"the model's rotary embedding is {kind!r}, not plain", code="calibration.rotary")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    share = parameters.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)) or 1.0
    return Rotary(float(theta), int(head_dim * share))


class _Collector:
    """Joint vectors and Fisher information, segment by segment."""

    def __init__(self, model: Any, identity: ModelIdentity, rotary: Rotary) -> None:
        self._model = model
        self._rotary = rotary
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        channels = 2 * identity.kv_heads * identity.head_dim
        self._dtype = getattr(torch, identity.kv_dtype)
        self.fisher = torch.zeros(identity.layers, channels, channels)
        self.labels = 0
        self.joint: list[torch.Tensor] = []

    def collect(self, segment: torch.Tensor, labels: int) -> None:
        """Prefill the segment's prompt; for `labels` sampled continuations also add to the Fisher information."""
        prompt, continuation = segment[None, :PROMPT_TOKENS], segment[None, PROMPT_TOKENS:]
        with torch.no_grad():
            layers = self._model.model(prompt, use_cache=True).past_key_values.layers
        keys = torch.stack([layer.keys[0] for layer in layers]).to(self._dtype).float()
        values = torch.stack([layer.values[0] for layer in layers]).to(self._dtype).float()
        self.joint.append(self._joined(keys, values).to(torch.bfloat16))
        for _ in range(labels):
            joined = self._joined(*self._gradient(keys, values, continuation))[:, SINK_TOKENS:]
            self.fisher += joined.mT @ joined / joined.shape[1] / CONTINUATION_TOKENS
            self.labels += 1

    def _gradient(
        self, keys: torch.Tensor, values: torch.Tensor, continuation: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the log-likelihood of tokens that the model itself draws: an unbiased view of the Fisher information."""
        from transformers import DynamicCache

        keys, values = keys.clone().requires_grad_(True), values.clone().requires_grad_(True)
        cache = DynamicCache()
        for layer in range(keys.shape[0]):
            cache.update(keys[layer][None], values[layer][None], layer)
        log_probs = self._model(continuation, past_key_values=cache, use_cache=True).logits[0].log_softmax(-1)
        drawn = torch.multinomial(log_probs.detach().exp(), 1)
        total = log_probs.gather(-1, drawn).sum()
        key_gradient, value_gradient = torch.autograd.grad(total, (keys, values))
        return key_gradient, value_gradient

    def _joined(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """`[layers, heads, tokens, head_dim]` twice -> `[layers, tokens, channels]`, keys before RoPE."""
        cosines, sines = angles(self._rotary, 0, keys.shape[2])
        plain = rotate(keys.transpose(1, 2), cosines, sines, -1)
        return torch.cat([plain.flatten(2), values.transpose(1, 2).flatten(2)], dim=-1)


def calibrate(
    model_dir: Path,
    corpora: Sequence[Corpus],
    *,
    segments: int = 48,
    gradient_segments: int = 24,
    settings: FitSettings | None = None,
    report: Any = lambda what, done, total: None,
) -> PredictiveArtefact:
    """Calibrate a model.

    Args:
        model_dir: a Hugging Face model folder.
        corpora: texts; their calibration part is used.
        segments: of 512 tokens, for means, predictors and transforms.
        gradient_segments: of them, for the Fisher information.
        settings: of the fit.
        report: `(what, done, total)`.

    Raises:
        CalibrationError: see above.
        CodecError: the fit failed.
    """
    identity = identify_model(model_dir)
    if identity.latent_dim:
        raise CalibrationError("latent KV has no keys and values to join", code="calibration.latent")
    rows = calibration_segments(model_dir, corpora, segments)
    model = load_model(model_dir)
    rotary = rotary_of(model)
    torch.manual_seed(0)
    collector = _Collector(model, identity, rotary)
    for index, row in enumerate(rows):
        report("running the model", index, segments)
        # Every corpus has its share of gradients, because segments alternate between them.
        collector.collect(row, labels=2 if index < gradient_segments else 0)
    positions = position_classes(Place(0), PROMPT_TOKENS, ()).repeat(segments)
    data = CalibrationData(
        model_fingerprint=identity.fingerprint,
        texts=tuple(corpus.calibration_label for corpus in corpora),
        heads=identity.kv_heads,
        key_dim=identity.head_dim,
        value_dim=identity.head_dim,
        rotary=rotary,
        joint=torch.cat(collector.joint, dim=1),
        positions=positions,
        fisher=collector.fisher / max(collector.labels, 1),
        prompt_tokens=PROMPT_TOKENS,
    )
    return fit_artefact(data, settings, report)


def calibrate_heads(model_dir: Path, corpora: Sequence[Corpus], *, segments: int) -> HeadProfile:
    """How much each head matters, from segments that nothing is measured on.

    Raises:
        CalibrationError: the texts are too short.
    """
    model = load_model(model_dir)
    rows = calibration_segments(model_dir, corpora, segments)
    layout = layout_of(identify_model(model_dir), page_tokens=HEAD_PAGE_TOKENS)
    importance = measure_head_importance(
        QualityMeter(model), model, list(rows), layout, prompt_tokens=PROMPT_TOKENS, group=HEAD_PAGE_TOKENS
    )
    return importance.profile


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dataplanes.sglang.profiler.calibrate",
        description="Calibrate the layer-predictive transform codec on a model: one artefact, named by its hash.",
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="Hugging Face model folder")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the artefact")
    parser.add_argument(
        "--texts", type=Path, action="append", default=[], metavar="PATH",
        help="a file or folder of texts (.txt, .md, .jsonl) beside Python's manual and library; may be repeated",
    )  # fmt: skip
    parser.add_argument("--segments", type=int, default=48, help="segments of 512 tokens to run (default: 48)")
    parser.add_argument("--gradients", type=int, default=24, help="of them with gradients (default: 24)")
    parser.add_argument(
        "--depth", type=int, default=2, choices=(0, 1, 2, 4), help="layers to predict from (default: 2)"
    )
    parser.add_argument("--bottleneck", type=int, default=128, help="rank of the prediction (default: 128)")
    parser.add_argument(
        "--head-segments",
        type=int,
        default=6,
        metavar="N",
        help="segments to measure each head's importance on, for methods that treat heads apart; 0: none (default: 6)",
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads (default: all)")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    options = _parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    start_s = time.monotonic()
    columns = (TextColumn("{task.description:20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True)) as bars:
            task = bars.add_task("reading texts", total=None)
            artefact = calibrate(
                options.model,
                calibration_corpora(options.texts),
                segments=options.segments,
                gradient_segments=options.gradients,
                settings=FitSettings(depth=options.depth, bottleneck=options.bottleneck),
                report=lambda what, done, total: bars.update(task, description=what, completed=done, total=total),
            )
            profile = None
            if options.head_segments:
                bars.update(task, description="weighing heads", total=None)
                profile = calibrate_heads(
                    options.model, calibration_corpora(options.texts), segments=options.head_segments
                )
        path = artefact.save(options.out)
        if profile is not None:
            save_head_profile(profile, options.out, artefact.model_fingerprint)
    except ControldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        json.dumps(
            {
                "artefact": artefact.artefact_id,
                "path": str(path),
                "size_bytes": path.stat().st_size,
                "head_profile": profile.profile_id if profile is not None else None,
                "texts": list(artefact.texts),
                "seconds": round(time.monotonic() - start_s, 1),
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
