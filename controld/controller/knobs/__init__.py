"""Knobs: what can be chosen, and what each choice is predicted to cost.

A knob is a frozen dataclass that satisfies `base.Knob`: `kv_transfer` (tier `pd`), `kv_load` (tier `prefix_store`).
Which tier takes which stands in `tiers`. Deciding, learning, explaining and storing plans know no knob by name, so the
next one is three things: a module here with its cost model (its servers are named by `work_stages`), its line in
`tiers`, and profiles whose configurations are its arms. Arms, contexts, posteriors, gates and exploration are shared.

`video` is no such knob: an engine has one setting at a time, pushed and not drawn, without a table of contexts. It is a
cost model with posteriors of its own; `controller.video` decides.
"""
