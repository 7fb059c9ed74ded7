"""What the daemon says of itself: structured logs and metrics with bounded labels."""
