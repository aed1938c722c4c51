"""Tasks: how outputs become answers, what answers lose, how sure an exit is, and what a declaration may say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from offramp_core.errors import InvalidArgumentError, InvalidRecordsError
from offramp_core.records import records_from_arrays
from offramp_core.scale import Scale
from offramp_core.task import NO_ANSWER, TASKS, Task, TaskSpec, declared_spec, task_of

WIDTH = 5
ALONE = Scale("independent-probabilities")
SPECS: dict[str, tuple[TaskSpec, int, Scale | None]] = {
    "top label": (TaskSpec(), WIDTH, None),
    "top 3": (TaskSpec("TopK", k=3), WIDTH, None),
    "top 3, overlap": (TaskSpec("TopK", k=3, loss="Overlap"), WIDTH, Scale("probabilities")),
    "labels": (TaskSpec("MultiLabel", thresholds=(0.3,)), WIDTH, None),
    "labels, Hamming": (TaskSpec("MultiLabel", loss="Hamming"), WIDTH, ALONE),
    "yes or no": (TaskSpec("Binary", thresholds=(0.8,)), 1, ALONE),
    "numbers": (TaskSpec("Regression", measure="absolute", tolerance=0.5), 2, None),
    "shares": (TaskSpec("Regression", measure="relative", tolerance=0.1), 1, None),
    "vectors": (TaskSpec("Embedding", measure="cosine", tolerance=0.1), WIDTH, None),
    "lengths": (TaskSpec("Embedding", measure="relative", tolerance=0.1), WIDTH, None),
}


def made(case: str) -> Task:
    spec, width, scale = SPECS[case]
    return task_of(spec, width=width, scale=scale)


def drawn(data: st.DataObject, task: Task, n: int) -> np.ndarray:
    """What an exit may say; whole and half numbers, so that ties happen."""
    halves = hnp.arrays(np.int8, (n, task.head_width), elements=st.integers(-12, 12))
    return data.draw(halves).astype(np.float32) / 2


@pytest.mark.parametrize("case", SPECS)
@given(data=st.data())
def test_losses_lie_between_0_and_1_and_an_answer_loses_nothing_against_itself(case: str, data: st.DataObject) -> None:
    task = made(case)
    one, other = (task.exit_answers(drawn(data, task, 4)) for _ in range(2))
    losses = task.losses(one, other)
    assert losses.shape == (4,)
    assert ((losses >= 0) & (losses <= 1)).all()
    assert not task.losses(one, one).any()
    if not task.graded:
        assert set(losses.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("case", SPECS)
@given(data=st.data())
def test_losses_of_many_exits_at_once_are_those_of_each(case: str, data: st.DataObject) -> None:
    task = made(case)
    exits = [task.exit_answers(drawn(data, task, 3)) for _ in range(2)]
    reference = task.exit_answers(drawn(data, task, 3))
    together = task.losses(np.stack(exits, axis=1), reference[:, None])
    np.testing.assert_array_equal(together, np.stack([task.losses(e, reference) for e in exits], axis=1))


@given(
    hnp.arrays(np.float32, (6, WIDTH), elements=st.floats(-9, 9, width=16)),
    hnp.arrays(np.float32, (6, WIDTH), elements=st.floats(-9, 9, width=16)),
)
def test_losses_are_those_worked_out_row_by_row(given: np.ndarray, reference: np.ndarray) -> None:
    def lost(spec: TaskSpec, width: int = WIDTH) -> list[float]:
        task = task_of(spec, width=width)
        a, b = given[:, :width], reference[:, :width]
        return [round(v, 6) for v in task.losses(task.answers(a), task.answers(b)).tolist()]

    pairs = list(zip(given.astype(np.float64), reference.astype(np.float64), strict=True))
    tops = [({*np.argsort(-a, kind="stable")[:3]}, {*np.argsort(-b, kind="stable")[:3]}) for a, b in pairs]
    assert lost(TaskSpec("TopK", k=3)) == [float(a != b) for a, b in tops]
    assert lost(TaskSpec("TopK", k=3, loss="Overlap")) == [round(1 - len(a & b) / 3, 6) for a, b in tops]
    signs = [(a > 0) != (b > 0) for a, b in pairs]
    assert lost(TaskSpec("MultiLabel")) == [float(s.any()) for s in signs]
    assert lost(TaskSpec("MultiLabel", loss="Hamming")) == [round(float(s.mean()), 6) for s in signs]
    assert lost(TaskSpec("Binary"), 1) == [float(s[0]) for s in signs]
    absolute = TaskSpec("Regression", measure="absolute", tolerance=0.75)
    assert lost(absolute) == [float(max(abs(a - b)) > 0.75) for a, b in pairs]


def test_a_relative_error_is_of_the_models_own_number() -> None:
    task = made("shares")
    given, reference = np.array([[110.0], [112.0], [0.0], [1.0]]), np.array([[100.0], [100.0], [0.0], [0.0]])
    np.testing.assert_array_equal(task.losses(given, reference), [0, 1, 0, 1])


def test_a_cosine_says_nothing_of_lengths() -> None:
    task = made("vectors")
    vector = np.array([[1.0, 2.0, 3.0, 4.0, 5.0]])
    assert not task.losses(7 * vector, vector).any()
    assert task.losses(-vector, vector).all()
    assert task.losses(np.zeros((1, WIDTH)), vector).all(), "no direction is no answer"


@pytest.mark.parametrize("case", SPECS)
def test_what_is_not_finite_never_leaves_and_agrees_with_itself_alone(case: str) -> None:
    task = made(case)
    said = np.zeros((2, task.head_width), dtype=np.float32)
    said[0, 0] = np.nan
    assert task.raw_score(said)[0] == np.inf
    assert np.isfinite(task.raw_score(said)[1])
    answers = task.exit_answers(said)
    assert not task.losses(answers[:1], answers[:1]).any()
    assert task.losses(answers[:1], answers[1:]).all()
    if answers.dtype.kind == "i":
        assert (answers[0] == NO_ANSWER).all()


@pytest.mark.parametrize("case", ["top 3", "labels", "yes or no"])
@given(data=st.data())
def test_the_further_from_another_answer_the_more_certain(case: str, data: st.DataObject) -> None:
    """Scores twice as far from where an answer changes are more certain: of one row at a time, since rows differ."""
    task = made(case)
    near = drawn(data, task, 1)
    centre = task.offsets if task.lesson == "labels" else 0
    far = ((near - centre) * 2 + centre).astype(np.float32)
    if np.isfinite(task.raw_score(near)).all():
        assert task.raw_score(far)[0] <= task.raw_score(near)[0]


def test_one_label_is_as_unsure_as_the_two_classes_that_say_the_same() -> None:
    logits = np.array([[2.5], [-0.5], [0.0]], dtype=np.float32)
    two = np.concatenate([np.zeros_like(logits), logits], axis=1)
    binary, top = task_of(TaskSpec("Binary"), width=1), task_of(None, width=2)
    np.testing.assert_allclose(binary.raw_score(logits), top.raw_score(two), atol=1e-12)


def test_probabilities_and_logits_cross_their_threshold_together() -> None:
    logits = np.linspace(-4, 4, 81, dtype=np.float32)[:, None]
    spec = TaskSpec("Binary", thresholds=(0.8,))
    said = task_of(spec, width=1).answers(logits)
    np.testing.assert_array_equal(task_of(spec, width=1, scale=ALONE).exit_answers(logits), said)
    np.testing.assert_array_equal(said, 1 / (1 + np.exp(-logits[:, 0].astype(np.float64))) > 0.8)


WRONG: dict[str, tuple[dict[str, Any], int, str]] = {
    "one class": ({"output": "Top1"}, 1, "needs at least two classes"),
    "k of all classes": ({"output": "TopK", "k": 5}, 5, r"k is 5; it must lie in \[2, 4\]"),
    "no k": ({"output": "TopK"}, 5, "k is 0"),
    "one label": ({"output": "MultiLabel"}, 1, "one is a Binary task"),
    "thresholds of others": ({"output": "MultiLabel", "thresholds": (0.5, 0.5)}, 3, "2 thresholds for 3 labels"),
    "a threshold that is none": ({"output": "Binary", "thresholds": (1.0,)}, 1, "threshold 1.0 .* above 0 and below 1"),
    "two columns": ({"output": "Binary"}, 2, "one column, not 2"),
    "no tolerance": ({"output": "Regression", "measure": "absolute"}, 1, "tolerance is 0.0; it must be a number above"),
    "no number": ({"output": "Embedding", "measure": "cosine", "tolerance": float("nan")}, 8, "tolerance is nan"),
    "a measure of vectors": (
        {"output": "Regression", "measure": "cosine", "tolerance": 1},
        2,
        "use absolute or relative",
    ),
    "k of labels": ({"output": "MultiLabel", "k": 2}, 3, "k belongs to another task"),
    "a loss of sets": ({"output": "MultiLabel", "loss": "Overlap"}, 3, "use Exact or Hamming"),
    "too wide": ({"output": "Embedding", "measure": "cosine", "tolerance": 1}, 70_000, "must have 1 to 65536"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_declaration_that_does_not_fit_is_refused_with_its_field(case: str) -> None:
    spec, width, message = WRONG[case]
    with pytest.raises(InvalidArgumentError, match=message):
        task_of(TaskSpec(**spec), width=width)


def test_people_declare_tasks_by_the_names_of_the_spec() -> None:
    assert declared_spec("Top1") is None
    assert declared_spec("Embedding", tolerance=0.1) == TaskSpec("Embedding", measure="cosine", tolerance=0.1)
    with pytest.raises(InvalidArgumentError, match=f"task 'top5' is unknown; use {', '.join(TASKS)}"):
        declared_spec("top5")
    with pytest.raises(InvalidArgumentError, match="task Top1: tolerance belongs to another task"):
        declared_spec("Top1", tolerance=0.1)


def arrays(**given: Any) -> dict[str, Any]:
    base = {"uncertainty": np.full((2, 2), 0.5), "segment_seconds": np.ones(3), "ramp_seconds": np.zeros(2)}
    return {**base, **given}


def test_records_may_say_what_answers_lose_instead_of_what_they_are() -> None:
    records = records_from_arrays(arrays(loss=np.array([[0, 0.25], [1, 0]])))
    np.testing.assert_array_equal(records.agrees, [[True, False], [False, True]])
    assert records.final_agrees.all()
    assert records.prediction is None
    taken = records.take(np.array([1]))
    assert taken.loss is not None
    np.testing.assert_array_equal(taken.loss, [[1, 0]])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": np.array([[0, 2], [0, 0]])}, r"loss\[0, 1\] is 2"),
        ({"loss": np.array([[0, np.nan], [0, 0]])}, r"loss\[0, 1\] is nan"),
        ({"loss": np.zeros((2, 3))}, "loss has shape"),
        ({"loss": np.zeros((2, 2)), "final_loss": np.array([0, -1])}, r"final_loss\[1\] is -1"),
        ({}, "prediction is missing"),
    ],
)
def test_losses_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRecordsError, match=message):
        records_from_arrays(arrays(**given))
