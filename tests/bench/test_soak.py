"""The soak in small: a real worker at twice its capacity for some seconds. What it takes is for the bench; here only
what is said counts."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "worker"))

import bundles
from bench import openloop, soak
from bench.load import Traffic
from bench.openloop import Trial
from bench.validate_simulator import Subject, make_subject

from offramp_core.bundle import BatchProfile, Profile
from offramp_worker.bundle.load import load_bundle
from offramp_worker.engine.execution.sessions import Sessions

SIZES = (1, 8, 32)


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A model slow enough that it, and not HTTP, is what a worker spends its time on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "WIDTH", 384)
        folder = bundles.write_bundle(tmp_path_factory.mktemp("bundle"))
        sessions = Sessions(load_bundle(folder), threads=1)
        seconds = {n: _seconds(sessions, n) for n in SIZES}
        measured = Profile(
            "onnxruntime-cpu",
            1,
            tuple(
                BatchProfile(n, s, (0.2 * s, 0.0, 0.3 * s, 0.3 * s, 0.2 * s), (1e-6,) * 4, 1e-6)
                for n, s in seconds.items()
            ),
        )
        (folder / "profile.json").write_bytes(msgspec.json.encode(measured))
        bundles.write_manifest(folder)
        bundle = load_bundle(folder)
    x = bundles.inputs(300, seed=5)
    return make_subject(bundle, Traffic(x, sessions.exact(x).argmax(axis=1)), "Auto")


def _seconds(sessions: Sessions, n: int) -> float:
    x = bundles.inputs(n)
    sessions.exact(x)
    found = []
    for _ in range(5):
        began = time.perf_counter()
        sessions.exact(x)
        found.append(time.perf_counter() - began)
    return min(found)


@pytest.mark.slow
def test_a_worker_at_twice_its_capacity_answers_rightly_or_refuses(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "traffic.npz", x=subject.traffic.x, reference=subject.traffic.reference)
    monkeypatch.setattr(openloop, "DRAIN_SECONDS", 60.0)  # a request that is late here is not one that is lost
    out = tmp_path / "soak.json"
    # A machine that is slow while the capacity is measured and fast after is offered too little.
    for _ in range(3):
        code = soak.main(
            [
                "--seconds",
                "10",
                "--slo-ms",
                "1000",
                "--bundle",
                str(subject.bundle.path),
                "--traffic",
                str(tmp_path / "traffic.npz"),
                "--out",
                str(out),
            ]
        )
        result = json.loads(out.read_text())
        assert code == (0 if all(result["passed"].values()) else 1)
        assert result["passed"]["every accepted answer is right"]
        assert result["passed"]["every request is answered or refused"]
        refused = sum(s["statuses"].get("429", 0) for s in result["stretches"])
        if refused:
            break
    assert refused > 0
    assert {s["exits"] for s in result["stretches"]} == {False, True}
    assert max(s["left_early"] for s in result["stretches"]) > 0
    assert len(result["memory"]["samples"]) >= 8


# --- the judge -------------------------------------------------------------------------------------


def trial(subject: Subject, *, rows: list[int], labels: list[int], ramps: list[int]) -> Trial:
    n = len(rows)
    codes = np.array(labels) + subject.bundle.manifest.n_classes * (1 + np.array(ramps))
    return Trial(1.0, np.zeros(n), np.full(n, 0.01), np.full(n, 200), np.array(rows), codes)


@pytest.mark.slow
def test_a_right_answer_is_the_models_or_that_of_the_ramp_it_names(subject: Subject) -> None:
    expected = soak.expect(subject)
    ramp = subject.active[0]
    limit = float(subject.plan.ramps[0].threshold)
    sure = np.flatnonzero(expected.uncertainty[:, ramp] < limit - 0.01)
    unsure = np.flatnonzero(expected.uncertainty[:, ramp] > limit + 0.01)
    clear = np.flatnonzero(~expected.tied)
    for rows, labels, ramps, exits, wrong in (
        (clear, expected.final[clear], -1, True, 0),
        (clear, (expected.final[clear] + 1) % 5, -1, True, len(clear)),
        (sure, expected.said[sure, ramp], ramp, True, 0),
        (sure, (expected.said[sure, ramp] + 1) % 5, ramp, True, len(sure)),
        (unsure, expected.said[unsure, ramp], ramp, True, len(unsure)),  # it should not have left
        (sure, expected.said[sure, ramp], ramp, False, len(sure)),  # exits are off
    ):
        assert len(rows) > 0
        seen = trial(
            subject, rows=rows.tolist(), labels=labels.tolist(), ramps=[ramp if ramps >= 0 else -1] * len(rows)
        )
        assert soak.wrong_answers(seen, subject, expected, exits=exits) == wrong


def test_the_verdict_names_what_did_not_hold() -> None:
    good = {"wrong": 0, "statuses": {"200": 5, "429": 5}, "accepted_ms": {"p95": 40.0}, "refused_ms": {"p95": 5.0}}
    assert all(soak.verdict([good], growth=0.01, slo_seconds=0.05).values())
    for bad, growth, failed in (
        ({"wrong": 1}, 0.0, "every accepted answer is right"),
        ({"statuses": {"200": 5, "500": 1}}, 0.0, "every request is answered or refused"),
        ({"statuses": {"429": 5}, "accepted_ms": {"p95": None}}, 0.0, "every accepted answer is right"),
        ({"accepted_ms": {"p95": 51.0}}, 0.0, "p95 of the accepted is within the objective"),
        ({"refused_ms": {"p95": 26.0}}, 0.0, "the others are refused at once"),
        ({}, 0.06, "memory is flat"),
    ):
        said = soak.verdict([good, {**good, **bad}], growth=growth, slo_seconds=0.05)
        assert [name for name, held in said.items() if not held] == [failed]


def test_growth_compares_the_end_with_the_end_of_the_warm_up() -> None:
    memory = soak.Memory(0, [50] * 20 + [100] * 70 + [110] * 10)
    assert memory.growth() == pytest.approx((0.1, 100, 110))
