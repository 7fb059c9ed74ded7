"""A small video generator on the CPU with real numerics: the engine that every decision can be tried on without a GPU.

A causal diffusion transformer denoises latents chunk by chunk against a rolling cache of keys and values; a causal VAE
turns latents into frames. It knows one toy world (`shapes`) and was trained on it for minutes.
"""
