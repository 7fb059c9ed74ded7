"""A load change on the CPU reference engine, steered by a real daemon: what `controld demo-video` shows."""
