"""Contract double, not LongLive."""

from pipeline.causal_diffusion_inference import CausalDiffusionInferencePipeline

__all__ = ["CausalDiffusionInferencePipeline"]
