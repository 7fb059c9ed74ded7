"""Profiles (configurations with measured objectives) and the Pareto sets made of them."""
