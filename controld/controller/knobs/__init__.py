"""Knobs: what can be chosen, and what each choice is predicted to cost."""
