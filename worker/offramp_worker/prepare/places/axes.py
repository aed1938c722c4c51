"""What the axes of a graph's tensors are, found by running it: which one counts rows, and which one counts tokens.

Nothing in a shape says what an axis is for: [12, 16] may be twelve rows, or twelve steps of all rows. So the graph is
run on batches of two sizes, and an axis counts rows when it is as long as both of them. Whether the rows keep to
themselves is seen in values: those of some rows must be what they are without the others, which a worker drops. Where
the length of texts varies, a run on shorter ones tells the axis of the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper

from offramp_core.bundle import TensorSpec
from offramp_core.errors import ModelRefusedError
from offramp_worker.bundle.graph import Array, input_name, plain_session
from offramp_worker.bundle.lengths import pad_rows

Shape = tuple[int, ...]

ROWS = 3
KEPT = (0, 1)  # a reversed or rotated batch of three is told from one whose rows stay where they are
ALONE = (2,)
VALUES_RTOL = 1e-3  # of the tensor's largest number, as for a model's answers
FLOAT_TYPE = "tensor(float)"
# What they make may be no tensor, and has no shape then.
SHAPELESS = frozenset(
    {
        "If",
        "Loop",
        "Optional",
        "OptionalGetElement",
        "Scan",
        "SequenceConstruct",
        "SequenceEmpty",
        "SequenceErase",
        "SequenceInsert",
        "SequenceMap",
        "SplitToSequence",
    }
)


@dataclass(frozen=True, slots=True)
class Shapes:
    """Shapes of a graph's tensors, the input among them, on three rows, on two of them, and (where the length varies)
    on three shorter ones.

    ``lengths`` are the tokens of a row in the first and in the last run; (0, 0) where there are none.
    """

    three: Mapping[str, Shape]
    two: Mapping[str, Shape]
    shorter: Mapping[str, Shape]
    lengths: tuple[int, int]

    def row_axis(self, name: str) -> int | str:
        """The axis that counts rows, or why there is none."""
        if name not in self.three or len(self.three[name]) != len(self.two[name]):
            return "its shape is not known"
        three, two = self.three[name], self.two[name]
        grown = [axis for axis, sizes in enumerate(zip(three, two, strict=True)) if sizes[0] != sizes[1]]
        if not grown:
            return f"it has the shape {list(three)} whatever the number of rows"
        if len(grown) > 1:
            return f"its axes {' and '.join(map(str, grown))} all grow with the number of rows"
        (axis,) = grown
        if (three[axis], two[axis]) != (ROWS, len(KEPT)):
            return (
                f"its axis {axis} has {three[axis]} entries for {ROWS} rows and {two[axis]} for {len(KEPT)}, so "
                "that no row can be dropped from it"
            )
        return axis

    def varying(self, name: str) -> frozenset[int]:
        """Axes whose size changes with the length of the rows."""
        if name not in self.shorter:
            return frozenset()
        sizes = zip(self.three[name], self.shorter[name], strict=True)
        return frozenset(axis for axis, (long, short) in enumerate(sizes) if long != short)

    def counts_tokens(self, name: str, axis: int) -> bool:
        """Whether an axis is as long as the rows of a text are."""
        long, short = self.lengths
        return self.three[name][axis] == long and (name not in self.shorter or self.shorter[name][axis] == short)


def sample_rows(x: Array, spec: TensorSpec) -> Array:
    """Three rows from all over the data: neighbours may be alike."""
    return pad_rows([x[np.linspace(0, len(x) - 1, ROWS).astype(int)]], spec)


def observed_shapes(model: onnx.ModelProto, rows: Array, *, tokens: bool, varies: bool) -> Shapes:
    """Run the graph on ``rows`` (3, ...) and learn the shape of every tensor; rows of ``tokens`` may vary in length.

    Raises
    ------
    ModelRefusedError
        It does not run on three rows, or on two.
    """
    probe, names = _with_shapes(model)
    entry = input_name(model)
    batches = {"three": rows, "two": np.ascontiguousarray(rows[list(KEPT)])}
    if varies and rows.shape[1] > 1:
        batches["shorter"] = np.ascontiguousarray(rows[:, : (rows.shape[1] + 1) // 2])
    session = plain_session(probe)
    outputs = list(names.values())
    found: dict[str, dict[str, Shape]] = {}
    for name, batch in batches.items():
        values = _run(session, outputs, {entry: batch}) if outputs else []
        found[name] = {t: tuple(int(d) for d in v) for t, v in zip(names, values, strict=True)} | {entry: batch.shape}
    lengths = (rows.shape[1], batches.get("shorter", rows).shape[1]) if tokens else (0, 0)
    return Shapes(found["three"], found["two"], found.get("shorter", {}), lengths)


def mixed_rows(model: onnx.ModelProto, axes: Mapping[str, int], rows: Array) -> dict[str, str]:
    """Which of some tensors (name to the axis that counts rows) no head can be fed from, and why.

    They are no float32, or what they hold of a row of ``rows`` (3, ...) depends on the other rows of the batch.
    """
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    # Without a type: ONNX Runtime knows it, also where shape inference gave up.
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in axes)
    session = plain_session(probe)
    refused = {
        output.name: f"it is {output.type}, and heads read float32"
        for output in session.get_outputs()
        if output.type != FLOAT_TYPE
    }
    names, entry = [name for name in axes if name not in refused], input_name(model)
    if not names:
        return refused
    whole, kept, alone = (
        _run(session, names, {entry: np.ascontiguousarray(rows[list(part)])}) for part in (range(ROWS), KEPT, ALONE)
    )
    for name, all_rows, *parts in zip(names, whole, kept, alone, strict=True):
        expected = (np.take(all_rows, list(part), axis=axes[name]) for part in (KEPT, ALONE))
        if not all(_close(got, wanted) for got, wanted in zip(parts, expected, strict=True)):
            refused[name] = "what it holds of a row depends on the other rows of the batch"
    return refused


def _with_shapes(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy that answers nothing but shapes, and the name of the output with the shape of each tensor."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    nodes = [node for node in probe.graph.node if node.op_type not in SHAPELESS]
    made = (name for node in nodes for name in node.output if name)
    names = {name: f"offramp/shape/{number}" for number, name in enumerate(made)}
    probe.graph.node.extend(helper.make_node("Shape", [name], [target]) for name, target in names.items())
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=target) for target in names.values())
    return probe, names


def _run(session: Any, names: Sequence[str], feed: Mapping[str, Array]) -> list[Array]:
    try:
        return list(session.run(names, dict(feed)))
    except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side
        rows = {name: list(value.shape) for name, value in feed.items()}
        raise ModelRefusedError(
            f"ONNX Runtime cannot run the model on {rows}: {' '.join(str(error).split())[:300]}"
        ) from error


def _close(got: Array, wanted: Array) -> bool:
    if got.shape != wanted.shape:
        return False
    finite = np.isfinite(wanted)
    if not np.array_equal(finite, np.isfinite(got)):
        return False
    most = float(np.abs(wanted[finite]).max(initial=0.0))
    return bool(np.allclose(got[finite], wanted[finite], rtol=0, atol=VALUES_RTOL * most))
