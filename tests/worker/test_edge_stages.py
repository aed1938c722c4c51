"""A batch of an edge: who is asked, and behind which stage, whether rows go on elsewhere."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from offramp_core.edge import Place, Uplink
from offramp_core.execution import Regrouping
from offramp_core.precision import EXACT
from offramp_core.task import task_of
from offramp_core.uncertainty import exit_test
from offramp_worker.edge.proof import FeaturesProof
from offramp_worker.edge.wire import FEATURES, Reply
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.execution.execute import Onward, run_stages

N = 4
TABLE = np.linspace(-5.0, 5.0, 1025)


class Counting:
    """A stage that hands on how many have run before it; at its ramp only the first row is certain."""

    reads_input = pads = False

    def __init__(self, *ramps: int) -> None:
        self.ramps, self.runs = ramps, 0

    def run(self, features: np.ndarray, x: np.ndarray, rows: np.ndarray | None = None) -> tuple[np.ndarray, list]:
        self.runs += 1
        features = features + 1 if rows is None else features[rows] + 1
        logits = np.tile(np.array([0.0, 0.1], np.float32), (len(features), 1))
        logits[x[:, 0] == 0] = [9.0, 0.0]
        confidence = 1 / (1 + np.exp(-np.abs(np.diff(logits.astype(np.float64)))[:, 0]))
        return features, [(logits, confidence)] * len(self.ramps)


@pytest.mark.parametrize(("taken_at", "ran"), [(0, (1, 0, 0)), (1, (1, 1, 0)), (None, (1, 1, 1))])
def test_rows_go_on_at_the_last_exit_or_at_the_ramp_behind_it_from_which_features_are_sent(
    taken_at: int | None, ran: tuple[int, ...]
) -> None:
    """Where the core turns out to take no features, inputs are sent as soon as it is known that rows stay."""
    stages, x, asked = [Counting(0), Counting(1), Counting()], np.arange(N, dtype=np.float32)[:, None], list[Onward]()
    costs = [0.0, *[0.001] * N]

    def go_on(onward: Onward) -> bool:
        asked.append(onward)
        return onward.ramp == taken_at

    leaves = run_stages(
        stages,
        x,
        tests={0: exit_test(0.3, TABLE), 1: exit_test(0.0, TABLE)},
        may_leave=None,
        regroups=Regrouping.of([costs] * 3, [0.0] * (N + 1)),
        go_on=go_on,
        further=1,
    )
    told = [(leave.rows.tolist(), leave.ramp) for leave in leaves]
    assert told == [([0], 0)] + ([([1, 2, 3], None)] if taken_at is None else [])
    assert tuple(stage.runs for stage in stages) == ran
    assert [onward.ramp for onward in asked] == [0, 1][: 1 if taken_at == 0 else 2]
    assert all(onward.rows.tolist() == [1, 2, 3] for onward in asked)


# --- whether the core understands features, and whether to go on to where they are sent from ------------------------


class Link:
    """A core that understands features at the ramp ``knows`` alone."""

    boot, core, away, takes_features, uplink = "boot", "core", "", True, Uplink(1.25e7)

    def __init__(self, *, knows: str) -> None:
        self._knows, self.asked = knows, list[str]()

    def rests(self, what: str) -> bool:
        return False

    def send(self, what: str, name: str, x: np.ndarray, *, answered: Any, **rest: Any) -> None:
        assert name == FEATURES
        self.asked.append(what)
        answered(Reply({"logits": np.full((N, 2), float(self._knows in what), np.float32)}, self.boot))


def proof_and_link(*, knows: str) -> tuple[FeaturesProof, Link]:
    link, desk = Link(knows=knows), SimpleNamespace(left=lambda: None, back=lambda hand_in: hand_in())
    shapes = {"c0": (16_384,), "c1": (4096,)}
    bundle = SimpleNamespace(
        columns=[SimpleNamespace(id="early"), SimpleNamespace(id="late")],
        heads=[SimpleNamespace(source=tensor) for tensor in shapes],
        shapes=shapes,
        probe_x=np.zeros((N, 1), np.float32),
        probe_logits=np.ones((N, 2), np.float32),
        task=task_of(None, width=2),
        manifest=SimpleNamespace(inputs=[SimpleNamespace(varies=False)]),
    )
    return FeaturesProof(cast(Any, link), cast(Any, desk), cast(Any, bundle), residue="Features"), link


def runtime(*stages: Counting) -> Runtime:
    plan = SimpleNamespace(content_hash="plan", precision=EXACT, exits_off=False)
    seconds = [[0.0, *[0.001] * N]] * len(stages)
    return Runtime(cast(Any, plan), 0.0, cast(Any, None), stages=stages, stage_seconds=seconds)


def test_features_are_proven_for_the_ramp_that_they_are_sent_from() -> None:
    """A plan that was prepared again hands on at another ramp: there features went out that nobody had asked about."""
    proof, link = proof_and_link(knows="late")
    first, last = Counting(0), Counting()
    late, early = runtime(Counting(0), Counting(1), last), runtime(first, last)
    assert proof.holds(late, 1) and proof.held(late, 1, "boot")
    assert not proof.holds(early, 0) and not proof.held(early, 0, "boot")
    assert len(link.asked) == 2 and (first.runs, last.runs) == (1, 0)


@pytest.mark.parametrize(("pace", "goes"), [(1.0, True), (20.0, False)])
def test_rows_go_on_by_what_is_known_of_the_box_now_and_not_when_the_plan_was_prepared(pace: float, goes: bool) -> None:
    proof, link = proof_and_link(knows="late")
    now = Place(N * 60_000, 0.003)
    stages = runtime(Counting(0), Counting(1), Counting())
    assert proof.goes_on(stages, 0, rows=N, now=now, pace=pace) is goes
    assert bool(link.asked) is goes
