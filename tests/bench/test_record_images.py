"""Recording image networks: variations of images, scores, and the whole way on a small network."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from bench.cifar.data import DEVIATION, MEAN
from bench.record import costs
from bench.record.cifar import SHIFT, augmented
from bench.record.costs import network_costs, with_costs
from bench.record.network import Recording, Rows, last_places, record_network
from bench.record.scores import Ramp, one_minus_max, ramp_facts, record_arrays
from bench.record.store import RecordSet
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from offramp_core.bundle import HeadKind, RampSpec
from offramp_core.records import records_from_arrays
from offramp_worker.prepare.families import build_family
from offramp_worker.prepare.places.cuts import Place
from offramp_worker.prepare.progress import Reporter


def test_a_variation_is_the_image_shifted_over_black_and_perhaps_mirrored() -> None:
    x = np.random.default_rng(0).normal(size=(12, 3, 32, 32)).astype(np.float32)
    black = (-MEAN / DEVIATION)[None]
    padded = np.tile(black, (12, 1, 32 + 2 * SHIFT, 32 + 2 * SHIFT))
    padded[:, :, SHIFT:-SHIFT, SHIFT:-SHIFT] = x
    mirrored = 0
    for i, made in enumerate(augmented(x, seed=1)):
        windows = [padded[i, :, t : t + 32, s : s + 32] for t in range(2 * SHIFT + 1) for s in range(2 * SHIFT + 1)]
        straight = any(np.array_equal(made, window) for window in windows)
        turned = any(np.array_equal(made, window[:, :, ::-1]) for window in windows)
        assert straight or turned
        mirrored += turned
    assert 0 < mirrored < 12


@given(logits=st.lists(st.lists(st.floats(-30, 30, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_one_minus_max_is_the_softmax_share_of_the_other_classes(logits: list[list[float]]) -> None:
    z = np.array(logits, dtype=np.float32)
    softmax = torch.softmax(torch.from_numpy(z).double(), 1).numpy()
    others = np.sort(softmax, axis=1)[:, :-1].sum(axis=1)
    np.testing.assert_allclose(one_minus_max(z), others, rtol=1e-5)


def test_places_are_counted_by_blocks_from_the_back() -> None:
    places = [Place(i, f"t{i}", (4, 8, 8)) for i in range(4)]
    assert [(p.position, p.tensor) for p in last_places(places, blocks=3)] == [(1, "t1"), (2, "t2"), (3, "t3")]
    with pytest.raises(ValueError, match="4 places"):
        last_places(places, blocks=5)


def test_answers_are_the_classes_of_the_highest_logits_and_certain_ones_score_lower() -> None:
    spec = RampSpec(id="r01-linear", tensor="t", position=1, depth=0.0, head="pooled-linear", channels=3)
    pool = np.array([[9.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0]], dtype=np.float32)
    validation = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    reference = np.array([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=np.float32)
    arrays = record_arrays([Ramp(spec, pool, validation)], reference)
    assert arrays["prediction"][:, 0].tolist() == [0, 1, 2]
    assert arrays["reference"].tolist() == arrays["final"].tolist() == [0, 2, 2]
    scores = arrays["uncertainty"][:, 0]
    assert scores[0] < scores[2] < scores[1]


@pytest.mark.slow
def test_every_block_of_a_small_network_is_recorded_with_both_heads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "PROFILE_SECONDS", 0.5)
    x = np.random.default_rng(0).normal(size=(400, 3, 16, 16)).astype(np.float32)
    torch.manual_seed(0)
    model = build_family("resnet", {"blocks": "1", "classes": "4"})
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    uri = f"family:resnet?blocks=1&classes=4&weights={tmp_path / 'w.safetensors'}"
    rows = Rows(training=x[:240], validation=x[240:300], pool=x[300:])
    recording = record_network(uri, rows, Reporter(quiet=True), blocks=3, seed=0)
    with torch.inference_mode():
        expected = model(torch.from_numpy(x[300:])).numpy()
    np.testing.assert_allclose(recording.reference, expected, atol=1e-3)
    priced = network_costs(uri, rows.pool, Reporter(quiet=True), blocks=3)
    for kind, prices in priced.items():
        _check_kind(recording, kind, prices)


def _check_kind(recording: Recording, kind: HeadKind, prices: costs.Costs) -> None:
    ramps = recording.of_kind(kind)
    assert [ramp.spec.position for ramp in ramps] == [1, 2, 3]
    facts = {"ramps": ramp_facts(ramps, recording.reference, macs=recording.macs)}
    made = with_costs(RecordSet("made", record_arrays(ramps, recording.reference), facts), prices)
    records = records_from_arrays(made.arrays)
    assert (len(records), records.n_ramps) == (100, 3)
    for name in ("macs_depth", "depth"):
        shares = [ramp[name] for ramp in made.facts["ramps"]]
        assert 0 < shares[0] < shares[1] < shares[2] < 1
    assert made.facts["ramps"][2]["macs_depth"] == pytest.approx(1, abs=0.01)  # only the classifier comes later
    assert all(ramp["cost"] > 0 for ramp in made.facts["ramps"])
