"""A batch of an edge: who is asked, and behind which stage, whether rows go on elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from offramp_core.execution import Regrouping
from offramp_core.uncertainty import exit_test
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
