"""Slices of the answers that name a class: what is counted for them, and that no exit gives such an answer once they
are stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import bundles
import numpy as np
import pytest
from desks import EVERYBODY_LEAVES, Service
from processes import WorkerProcess, document, plan_for, sign

from offramp_core.execution import Regrouping
from offramp_core.protocol import class_slice
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.execute import Leave, run_again, run_stages
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.queue.tickets import Ticket

ALL = {"slices": (*map(class_slice, range(10)), "night"), "holdback_share": 0.0, "audit_rate": 1.0}


@pytest.fixture
def service(bundle_dir: Path, bundle: Bundle, sessions: Sessions) -> Iterator[Service]:
    service = Service(bundle_dir, bundle, sessions)
    yield service
    service.engine.close()
    assert service.engine.join(30.0)


def told(tickets: Sequence[Ticket]) -> list[tuple[str, int]]:
    return [(t.exits[0], int(t.labels[0])) for t in tickets]


def favourite(tickets: Sequence[Ticket]) -> int:
    """The class that exits name most."""
    return Counter(label for name, label in told(tickets) if name != "final").most_common(1)[0][0]


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_no_exit_names_a_stopped_class_and_nothing_else_changes(
    service: Service, sessions: Sessions, execution: str
) -> None:
    service.run(service.plan(execution=execution), **ALL)
    before = service.serve(40)
    stopped = favourite(before)
    service.run(service.plan(execution=execution), **ALL, stopped_slices=(class_slice(stopped),))
    after = service.serve(40)
    held = 0
    for was, now in zip(before, after, strict=True):
        if was.exits[0] != "final" and was.labels[0] == stopped:
            assert told([now]) == [("final", int(sessions.exact(now.x)[0].argmax()))]
            held += 1
        else:
            assert told([now]) == told([was])
    assert 0 < held < 40


@pytest.mark.parametrize("execution", ["ComputeSaving", "ResultsOnly"])
def test_audits_count_for_the_class_that_was_answered_and_for_the_slice_that_was_asked(
    service: Service, sessions: Sessions, execution: str
) -> None:
    service.run(service.plan(execution=execution), **ALL)
    tickets = [*service.serve(30, seed=3), *service.serve(20, seed=4, slice_name="night")]
    wrong = [int(t.labels[0]) != int(sessions.exact(t.x)[0].argmax()) for t in tickets]
    seen = service.measured.slices
    assert (seen["night"].audited, seen["night"].disagreements) == (20, sum(wrong[30:]))
    for number, n in Counter(int(t.labels[0]) for t in tickets).items():
        mine = [w for t, w in zip(tickets, wrong, strict=True) if t.labels[0] == number]
        assert (seen[class_slice(number)].audited, seen[class_slice(number)].disagreements) == (n, sum(mine))
    assert service.counts("stable").audited == 50
    assert service.counts("stable").disagreements == sum(wrong) > 0


def test_a_class_that_is_not_declared_is_not_counted_and_no_request_can_name_one(service: Service) -> None:
    service.run(service.plan(), slices=(class_slice(0),), stopped_slices=(), holdback_share=0.0, audit_rate=1.0)
    tickets = service.serve(30, slice_name=class_slice(0))
    zeros = sum(int(t.labels[0]) == 0 for t in tickets)
    assert {name: s.audited for name, s in service.measured.slices.items()} == (
        {class_slice(0): zeros} if zeros else {}
    )


def test_what_a_stopped_class_is_told_never_disagrees(service: Service) -> None:
    service.run(service.plan(), **ALL)
    stopped = favourite(service.serve(40))
    before = service.measured.slices[class_slice(stopped)]
    assert before.disagreements > 0
    service.run(service.plan(), **ALL, stopped_slices=(class_slice(stopped),))
    service.serve(40, seed=9)
    after = service.measured.slices[class_slice(stopped)]
    assert after.audited > before.audited
    assert after.disagreements == before.disagreements


def test_at_a_lower_precision_a_stopped_class_is_named_by_the_exact_executor_alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = bundles.write_wide_bundle(tmp_path_factory.mktemp("wide"))
    wide = load_bundle(folder)
    exact = Sessions(wide, threads=1)
    service = Service(folder, wide, exact)
    plan = service.plan({"int8/r00-grid": "0.4"}, precision="int8")
    service.run(plan, **ALL)
    before = service.serve(60)
    stopped = Counter(label for _, label in told(before)).most_common(1)[0][0]
    service.run(plan, **ALL, stopped_slices=(class_slice(stopped),))
    after = service.serve(60)
    held = set()
    for was, now in zip(before, after, strict=True):
        if was.labels[0] == stopped:
            assert told([now]) == [("final", int(exact.exact(now.x)[0].argmax()))]
            held.add(was.exits[0])
        else:
            assert told([now]) == told([was])
    assert held == {"int8/r00-grid", "final"}
    service.engine.close()
    assert service.engine.join(30.0)


# --- batches ---------------------------------------------------------------------------------------


class Always:
    """A ramp that is certain of every row."""

    def leaves(self, logits: np.ndarray, confidence: np.ndarray) -> np.ndarray:
        return np.ones(len(logits), dtype=bool)


class Sure:
    """A ramp that is certain where its confidence is 1."""

    def leaves(self, logits: np.ndarray, confidence: np.ndarray) -> np.ndarray | None:
        found = confidence == 1
        return found if found.any() else None


class Saying:
    """A stage whose ramp, and whose output, says to each row what is written in its input."""

    reads_input = pads = False

    def __init__(self, number: int, ramps: tuple[int, ...]) -> None:
        self.number, self.ramps = number, ramps

    def run(self, features: np.ndarray, x: np.ndarray, rows: np.ndarray | None = None) -> tuple[np.ndarray, list]:
        features = features if rows is None else features[rows]
        logits = np.eye(4, dtype=np.float32)[features[:, self.number]]
        return (features, [(logits, np.ones(len(features)))]) if self.ramps else (logits, [])


#                ramp 0, ramp 1, output
ROWS = np.array([[2, 1, 3], [1, 1, 1], [2, 2, 2], [0, 2, 0], [1, 2, 3]])


@pytest.mark.parametrize("regroups", [True, False])
def test_a_row_that_would_leave_with_a_stopped_class_leaves_at_no_later_ramp_either(regroups: bool) -> None:
    rule = Regrouping.of([[0.0] * 6, [float(n) for n in range(6)], [float(n) for n in range(6)]], [0.0] * 6)
    leaves = run_stages(
        [Saying(0, (0,)), Saying(1, (1,)), Saying(2, ())],
        ROWS,
        tests={0: Always(), 1: Always()},
        may_leave=None,
        regroups=rule if regroups else None,
        withheld=(2,),
    )
    answers = {
        int(row): (leave.ramp, int(label))
        for leave in leaves
        for row, label in zip(leave.rows, leave.logits.argmax(1), strict=True)
    }
    assert answers == {0: (None, 3), 1: (0, 1), 2: (None, 2), 3: (0, 0), 4: (0, 1)}


def test_rows_that_may_not_leave_anyway_stay_so() -> None:
    may_leave = np.array([True, False, True, True, True])
    leaves = run_stages(
        [Saying(0, (0,)), Saying(2, ())], ROWS, tests={0: Always()}, may_leave=may_leave, regroups=None, withheld=(2,)
    )
    left = {int(row) for leave in leaves if leave.ramp is not None for row in leave.rows}
    assert left == {3, 4}
    assert may_leave.tolist() == [True, False, True, True, True], "what was given is not changed"


def test_answers_of_a_lower_precision_that_name_a_stopped_class_are_given_by_the_exact_executor() -> None:
    def leaves() -> Iterator[Leave]:
        yield Leave(np.array([0, 2]), 0, np.eye(4, dtype=np.float32)[[2, 1]])
        yield Leave(np.array([1]), 1, np.eye(4, dtype=np.float32)[[2]])
        yield Leave(np.array([3, 4]), None, np.eye(4, dtype=np.float32)[[3, 2]])

    x = np.arange(5)[:, None]
    asked: list[list[int]] = []

    def exact(rows: np.ndarray) -> np.ndarray:
        asked.append(rows[:, 0].tolist())
        return np.eye(4, dtype=np.float32)[rows[:, 0] % 4]

    answers = {
        int(row): (leave.ramp, int(label))
        for leave in run_again(x, leaves(), exact=exact, withheld=(2,))
        for row, label in zip(leave.rows, leave.logits.argmax(1), strict=True)
    }
    assert answers == {2: (0, 1), 3: (None, 3), 0: (None, 0), 1: (None, 1), 4: (None, 0)}
    assert asked == [[0, 1, 4]], "in one batch"


# --- a process -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_takes_stopped_classes_from_a_signed_document(worker: WorkerProcess, bundle_dir: Path) -> None:
    slices = tuple(map(class_slice, range(10)))

    def told(epoch: int, *stopped: int) -> set[tuple[str, int]]:
        fields = {"slices": slices, "stopped_slices": tuple(map(class_slice, stopped)), "accuracy_budget": 0.99}
        body = sign(document(plan_for(bundle_dir, EVERYBODY_LEAVES), epoch=epoch, **fields))
        reply = worker.admin.post("/v1/config", json={"payload": body.payload, "signature": body.signature})
        assert reply.status_code == 200, reply.text
        found = set()
        for row in bundles.inputs(30, seed=1):
            x = {"name": "x", "shape": [1, *row.shape], "datatype": "FP32", "data": row.ravel().tolist()}
            answer = worker.public.post("/v2/models/tiny/infer", json={"inputs": [x]}).json()
            label = next(o["data"][0] for o in answer["outputs"] if o["name"] == "label")
            found.add((answer["parameters"]["exit"], label))
        return found

    before = {label for name, label in told(1) if name != "final"}
    assert len(before) > 1
    kept = min(before)
    assert {label for name, label in told(2, *(before - {kept})) if name != "final"} == {kept}
