"""What the daemon and its data planes both import: pure, light, without I/O.

Nothing in here imports torch, pydantic or any other part of `controld`.
"""
