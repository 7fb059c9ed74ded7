"""Who chooses the arms: one small protocol (`base`), and everybody who is compared."""
