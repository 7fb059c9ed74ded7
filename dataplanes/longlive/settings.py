"""The names of a video engine's parameters, alike in every engine so that profiles and policies speak of one thing.

An engine's space has those that it can turn, with the values that it takes. Which linear back end carries a precision
is the engine's own choice (`EngineCapabilities.backends`) and no parameter.
"""

from __future__ import annotations

from typing import Final

WEIGHTS: Final = "weights"
"""Precision of linear weights: bf16, fp8, nvfp4."""
ACTIVATIONS: Final = "activations"
"""Precision of linear inputs: bf16, fp8, nvfp4; `weights` nvfp4 with `activations` nvfp4 is W4A4."""
BLOCK_RULE: Final = "block_rule"
"""Where a block's peak lands in NVFP4: plain, 4over6."""
KV: Final = "kv"
"""Precision of the KV cache: bf16, fp8, nvfp4."""
KV_SMOOTH: Final = "kv_smooth"
"""What is subtracted from keys before they are quantised: none, token_mean."""
STEPS: Final = "steps"
"""Denoising steps a chunk; one more forward pass writes the clean keys and values."""
WINDOW: Final = "window"
"""Latent frames that attention sees, sinks included."""
SINK: Final = "sink"
"""Latent frames from the begin that attention always sees."""
MULTI_SHOT: Final = "multi_shot"
"""Whether a scene cut pins its first chunk as a further sink: yes, no."""
VAE: Final = "vae"
"""When latents are decoded: batch, stream, async, pipeline. Frames are the same whichever."""
RANKS: Final = "ranks"
"""Ranks of Ulysses sequence parallelism. Frames are the same whichever, up to rounding."""
COMPILE: Final = "compile"
"""Whether the generator is compiled: yes, no."""

LOSSLESS: Final = (VAE, RANKS, COMPILE)
"""Parameters that never decide quality."""
