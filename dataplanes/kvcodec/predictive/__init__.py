"""The layer-predictive transform codec: calibrated per model, predicted from layer to layer, entropy-coded.

K before RoPE and V of one layer form one joint vector. It is predicted from the decoded layers before it, the residual
is transformed by a Karhunen-Loeve transform that is weighted by what the model's next-token distribution feels (its
Fisher information), and every coefficient is rounded with one step and a dead zone. One number, the step, is the whole
rate knob: its square is the loss, by and large.
"""

from dataplanes.kvcodec.predictive.artefact import PredictiveArtefact, Rotary

__all__ = ["PredictiveArtefact", "Rotary"]
