"""Policy: what the operator wrote, read strictly and applied whole or not at all."""
