"""The SGLang data plane: plugin, launcher, link and what SGLang needs on a CPU."""
