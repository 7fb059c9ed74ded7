"""Knobs: what can be chosen, and what each choice is predicted to cost.

A knob is a frozen dataclass that satisfies `base.Knob`: `kv_transfer` (tier `pd`), `kv_load` (tier `prefix_store`).
Which tier takes which stands in `tiers`. Deciding, learning, explaining and storing plans know no knob by name, so the
next one, `video` (the precision of a video engine's layers), is three things: a module here with its cost model (its
servers are named by `work_stages`; what it has no use for, such as bytes on a wire, it predicts as zero), its line in
`tiers`, and profiles whose configurations are its arms. Arms, contexts, posteriors, gates and exploration are shared.
"""
