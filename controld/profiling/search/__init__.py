"""What searches a strategy space, without what needs torch: observations, encoding, expected improvement."""
