"""Years of everything at once: what makes them quick changes nothing, and a run that was cut goes on."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from bench import control_traffic
from bench.control_records import NewestRecords
from bench.control_traffic import LOOK, SIGHTS, Everything, Sights, looked_at, rows
from bench.control_world import World
from bench.control_year import Year, YearScenario
from fleet import pool  # type: ignore[import-not-found]

from offramp_core.evidence import detector

POOL = pool(3000, seed=1)
LIVED = Year(0.004, 0.2, 0, 0.1, 777, 1, 9, 1, ("Succeeded",), (0.004,))


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up pool as a records file."""
    path = tmp_path_factory.mktemp("records") / "made.npz"
    final = np.zeros(len(POOL), dtype=np.int64)
    np.savez(
        path,
        uncertainty=POOL.uncertainty,
        prediction=np.where(POOL.agrees, final[:, None], 1),
        final=final,
        batch_size=np.array([1, 16]),
        segment_seconds=np.stack([POOL.costs.segment_seconds] * 2),
        ramp_seconds=np.stack([POOL.costs.ramp_seconds] * 2),
    )
    return path


@pytest.mark.parametrize("effect", [1.0, 7.5])
@pytest.mark.parametrize("rate", [0.005, 0.05])
def test_a_breaker_that_is_followed_quickly_is_the_same_to_the_last_bit(rate: float, effect: float) -> None:
    outcomes = np.random.default_rng(1).random(5013) < rate
    slow = state = detector.update(detector.init(), 30, 1, p0=0.01)
    alarm = None
    for begin in range(0, len(outcomes), LOOK):
        block = outcomes[begin : begin + LOOK]
        slow = detector.update(slow, len(block), int(block.sum()), p0=0.01, design_effect=effect)
        if detector.alarm(slow, run_length=1e4):
            alarm = begin + len(block)
            break
    quick = looked_at(state, outcomes, p0=0.01, run_length=1e4, design_effect=effect)
    assert (quick.state, quick.alarm_after) == (slow, alarm)
    assert (alarm is not None) == (rate == 0.05)


def test_the_newest_records_are_kept_in_order_and_what_was_handed_out_stays() -> None:
    kept, rng, now = NewestRecords(POOL), np.random.default_rng(2), 0.0
    shown, times = np.zeros(0, dtype=np.int64), np.zeros(0)
    held = []
    for n in (0, 40, 3, 500, 7, 90, 260):
        parts = [(rng.integers(0, len(POOL), n), now + np.sort(rng.random(n))) for _ in range(2)]
        for part, time in parts:
            kept.append(part, time=time)
        kept.settle(100)
        shown, times = (np.concatenate([a, *b]) for a, b in zip((shown, times), zip(*parts, strict=True), strict=True))
        newest = np.argsort(times, kind="stable")[-100:]
        shown, times, now = shown[newest], times[newest], now + 1
        held.append((kept.records(), POOL.uncertainty[shown], times)) if n else None
    for records, uncertainty, time in held:
        assert np.array_equal(records.uncertainty, uncertainty) and np.array_equal(records.time, time)
    assert len(kept) == 100


@pytest.mark.parametrize("sights", [Sights(30, 8), Sights(1, 1), Sights(100, 1)])
def test_every_source_shows_a_scene_until_its_next_begins(records: Path, sights: Sights) -> None:
    life = Everything(World.read(records), YearScenario("", "", days=1), sights, seed=1)
    rng, cumulated, showing = np.random.default_rng(5), np.cumsum(life.weights()), {}
    for stretch in range(4):
        n = 700 if stretch != 2 else 1
        source, drawn = rng.integers(0, sights.sources, n), rng.random(n) * (1 - 1e-12)
        scene = (np.sort(rng.random(n) + stretch) * 2000 / (sights.sources * sights.scene)).astype(np.int64)
        expected = []
        for s, number, u in zip(source.tolist(), scene.tolist(), drawn, strict=True):
            if showing.get(s, (-1,))[0] != number:
                showing[s] = number, int(np.searchsorted(cumulated, u))
            expected.append(showing[s][1])
        assert life._seen(source, scene, drawn).tolist() == expected


@pytest.mark.slow
def test_a_run_that_was_cut_goes_on_with_the_years_that_are_missing(records: Path, tmp_path: Path) -> None:
    out, other, missing = tmp_path / "traffic.json", tmp_path / "other.json", "independent requests"
    lived = {(name, 0): LIVED for name in SIGHTS if name != missing}
    out.write_text(json.dumps(rows(lived, days=1)))
    asked = ["--days", "1", "--records", str(records), "--out", str(out)]
    control_traffic.main([*asked, "--years", "1", "--continue"])
    after = json.loads(out.read_text())
    assert {name: row["seeds"] for name, row in after.items() if name != "measured"} == {name: [0] for name in SIGHTS}
    assert all(after[name]["years"][0]["tests"] == LIVED.tests for name, _ in lived)
    assert after[missing]["years"][0]["tests"] != LIVED.tests and after["measured"]
    other.write_text(json.dumps(rows({(missing, 5): LIVED}, days=1)))
    control_traffic.main([*asked, "--years", "0", "--continue", str(out), str(other)])
    assert json.loads(out.read_text())[missing]["seeds"] == [0, 5]
