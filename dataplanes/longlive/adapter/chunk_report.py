"""From what the hooks saw of a chunk to its report."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from controld.contract.video import MAX_DRIFT, ChunkReport, MemorySplit
from dataplanes.longlive.adapter.clip import Clip
from dataplanes.longlive.adapter.hooks import ChunkRecord, Decoded
from dataplanes.longlive.adapter.kv_fidelity import signal_to_noise_db
from dataplanes.longlive.adapter.timeline import Timeline, overlap

_FRAMES_PER_LATENT = 4


def pixel_frames(latents: int, session_chunk: int) -> int:
    """Frames of a chunk: four a latent, but the first latent of a clip is one frame."""
    return latents * _FRAMES_PER_LATENT - (_FRAMES_PER_LATENT - 1 if session_chunk == 0 else 0)


@dataclass(frozen=True, slots=True)
class _Times:
    denoise_s: tuple[float, ...]
    recache_s: float
    total_s: float


def _times(record: ChunkRecord, timeline: Timeline, busy: list[tuple[float, float]]) -> _Times:
    spans = [(timeline.seconds(begin), timeline.seconds(end)) for begin, end in record.forwards]
    busy.extend(spans)
    lengths = [end - begin for begin, end in spans]
    # With guidance each step is two passes.
    passes = max(1, len(lengths) // (record.steps + 1))
    each = tuple(sum(lengths[at * passes : (at + 1) * passes]) for at in range(record.steps))
    total_s = timeline.seconds(record.end) - timeline.seconds(record.begin)
    return _Times(each, sum(lengths[record.steps * passes :]), total_s)


def _drift(clip: Clip, latents: torch.Tensor) -> float:
    spread = latents.float().std(dim=(0, 1, 3, 4), correction=0)
    mean = latents.float().mean(dim=(0, 1, 3, 4))
    if clip.sink_moments is None:
        clip.sink_moments = (mean, spread)
        return 0.0
    sink_mean, sink_spread = clip.sink_moments
    unit = sink_spread.clamp_min(1e-6)
    moved = ((mean - sink_mean) / unit).square() + ((spread - sink_spread) / unit).square()
    return min(float(moved.mean().sqrt()), MAX_DRIFT)


def frames_per_second(clip: Clip, now_s: float, frames: int, since_s: float) -> float:
    """Over the last chunks, by when their frames were ready; of a clip's first chunk over its own time."""
    clip.finished.append((now_s, frames))
    first_s, _ = clip.finished[0]
    if len(clip.finished) == 1:
        return frames / max(now_s - since_s, 1e-9)
    return sum(count for _, count in list(clip.finished)[1:]) / max(now_s - first_s, 1e-9)


def make_report(
    clip: Clip,
    record: ChunkRecord,
    taken: list[Decoded],
    timeline: Timeline,
    *,
    setting_id: str,
    chunk: int,
    memory: MemorySplit,
    begun_s: float,
    now_s: float,
) -> ChunkReport:
    """The report of the chunk that `record` is of; its latents are finite.

    Args:
        taken: what the decoder gave meanwhile, of this chunk or of earlier ones.
        chunk: number over the engine's life; the clip counts its own one already.
        begun_s, now_s: of the step, by the host's clock.
    """
    assert record.latents is not None
    busy: list[tuple[float, float]] = []
    times = _times(record, timeline, busy)
    clip.busy.append(busy)
    frames = sum(len(one.frames) for one in taken)
    first_frame_s = 0.0
    if frames and not clip.has_frames:
        clip.has_frames = True
        first_frame_s = now_s - clip.opened_s
    spans = [(timeline.seconds(one.span[0]), timeline.seconds(one.span[1])) for one in taken]
    vae_s = sum(end - begin for begin, end in spans)
    passes = [one for chunk in clip.busy for one in chunk]
    beside_s = sum(overlap(span, passes) * (span[1] - span[0]) for span in spans)
    made = pixel_frames(record.latents.shape[1], clip.chunk - 1)
    return ChunkReport(
        session_id=clip.spec.session_id,
        service_class=clip.spec.service_class,
        setting_id=setting_id,
        chunk=chunk,
        session_chunk=clip.chunk - 1,
        frames=frames,
        denoise_s=times.denoise_s,
        recache_s=times.recache_s,
        vae_s=vae_s,
        vae_overlap=min(1.0, beside_s / vae_s) if vae_s > 0 else 0.0,
        total_s=times.total_s,
        first_frame_s=first_frame_s,
        fps_denoise=made / max(sum(times.denoise_s) + times.recache_s, 1e-9),
        fps_end_to_end=frames_per_second(clip, now_s, frames, begun_s),
        memory=memory,
        kv_signal_to_noise_db=signal_to_noise_db(record.kv_pairs),
        latent_sd=float(record.latents.float().std(correction=0)),
        drift=_drift(clip, record.latents),
        flicker=max((float(one.flicker) for one in taken), default=0.0),
        has_nan=not all(bool(one.is_finite) for one in taken),
    )
