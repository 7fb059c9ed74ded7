"""Linear layers at the precision that is in force: back ends, what they are offered for, and layers that switch.

- `precision`: formats of weights and inputs;
- `backend`: the interface and what probing says;
- `emulated`, `te`, `four_over_six`, `torchao_fp8`: the back ends;
- `probing`: a self-test and a measurement beside bf16, and which back end carries which precision;
- `switchable`: a layer that keeps its bf16 weights and swaps what it computes with; a library, no engine uses it.
"""
