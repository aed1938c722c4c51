"""What the ways to train heads have in common, with PyTorch and without."""

from __future__ import annotations

from offramp_core.bundle import RampSpec
from offramp_worker.bundle.heads import KINDS, Training
from offramp_worker.prepare.source.data import FloatArray

WARM_UP_SHARE = 0.25
PATIENCE_SHARE = 0.5  # of all epochs without a better validation loss
MIN_DEVIATION = 1e-3

Parameters = dict[str, FloatArray]


def training_of(spec: RampSpec) -> Training:
    """How the head of a ramp is trained; an exit of the network itself is not."""
    training = KINDS[spec.head].training
    assert training is not None, "an exit of the network itself is not trained"
    return training
