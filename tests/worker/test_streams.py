"""A record says which source its request came from and how it was drawn, and the control plane's pool keeps that."""

from __future__ import annotations

from pathlib import Path

import bundles
import numpy as np
import pytest
from processes import WorkerProcess, document, eventually, infer_json, plan_for

from offramp_core.protocol import stream_number
from offramp_core.records import records_from_arrays
from offramp_operator.shell import wire
from offramp_operator.shell.record_pool import RecordPool

pytestmark = pytest.mark.slow  # real workers


def test_records_carry_the_stream_the_draw_and_the_rate_it_was_compared_with(bundle_dir: Path) -> None:
    with WorkerProcess(bundle_dir) as worker:
        plan = plan_for(bundle_dir, {"r00-grid": "0.2"})
        assert worker.deliver(document(plan, audit_rate=0.5)).status_code == 200
        x = bundles.inputs(40, seed=3)
        for i in range(40):
            worker.infer(x[i : i + 1], parameters={"stream": f"camera-{i % 2}"} if i % 4 < 2 else {})
        eventually(lambda: worker.observations().records.next >= 8, what="audits")
        rows = wire.decode_rows(worker.observations().records, n_ramps=len(worker.state().ramps))
    known = {stream_number("camera-0"), stream_number("camera-1"), 0}
    assert set(rows.stream.tolist()) <= known and len(set(rows.stream.tolist())) == 3
    assert (rows.audit_rate == np.float32(0.5)).all()
    assert (rows.draw < 0.5).all() and len(set(rows.draw.tolist())) == len(rows)
    pool = RecordPool(n_ramps=rows.uncertainty.shape[1])
    pool.add("boot", rows, latest_time=np.inf)
    again = RecordPool.load(pool.dump()).columns()
    costs = {
        "segment_seconds": np.ones(rows.uncertainty.shape[1] + 1),
        "ramp_seconds": np.zeros(rows.uncertainty.shape[1]),
    }
    records = records_from_arrays({**again, **costs})
    assert records.stream is not None and records.draw is not None
    assert records.sampled() == 0.5 and records.equal_weight().all()


@pytest.mark.parametrize("stream", ["x" * 129, 7, None, ["a"]])
def test_a_stream_that_is_no_short_text_is_a_bad_request(bundle_dir: Path, stream: object) -> None:
    with WorkerProcess(bundle_dir, control_plane=False) as worker:
        body = infer_json(bundles.inputs(1), parameters={"stream": stream})
        reply = worker.public.post("/v2/models/tiny/infer", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("parameters.stream: ")
