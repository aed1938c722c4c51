"""What heads said becomes the arrays of a record set."""

from __future__ import annotations

import numpy as np
from bench.record.scores import Ramp, record_arrays

from offramp_core.bundle import RampSpec
from offramp_core.records import records_from_arrays

SPEC = RampSpec("r00-linear", "features", position=0, depth=0.5, head="pooled-linear", channels=8)


def test_a_ramp_that_is_as_sure_as_the_model_agrees_with_it_and_the_surer_rows_leave_first() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(scale=3, size=(400, 10)).astype(np.float32)
    ramp = Ramp(SPEC, pool=logits[:300], validation=logits[300:])
    arrays = record_arrays([ramp], logits[:300])
    costs = {"segment_seconds": np.array([1.0, 1.0]), "ramp_seconds": np.array([0.1])}
    records = records_from_arrays({**arrays, **costs})
    assert records.agrees.all()
    order = np.argsort(records.uncertainty[:, 0], kind="stable")
    assert (np.diff(arrays["one_minus_max"][order, 0]) >= -1e-6).all()
