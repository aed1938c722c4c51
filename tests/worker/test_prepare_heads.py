"""Training heads: what every kind learns, that its served form computes what was trained, and that a seed decides
everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import torch
from onnx import helper

from offramp_core.bundle import HeadKind, RampSpec
from offramp_core.errors import InvalidArgumentError
from offramp_worker.bundle.heads import (
    KINDS,
    HeadRecipe,
    Pooling,
    Training,
    head_inputs,
    head_nodes,
    parameter_shapes,
)
from offramp_worker.devices import open_session
from offramp_worker.prepare.heads import distillation, plain
from offramp_worker.prepare.heads.distillation import Lesson, train_head
from offramp_worker.prepare.heads.fitting import candidate_rungs
from offramp_worker.prepare.heads.objectives import softmax
from offramp_worker.prepare.heads.recipes import Parameters
from offramp_worker.prepare.picture import MARKS, OTHER, _mark
from offramp_worker.prepare.places.cuts import Place

pytestmark = pytest.mark.slow  # trains heads

CLASSES = 3
Array = npt.NDArray[Any]


def spec(kind: str, *, channels: int = 2) -> RampSpec:
    hidden = 8 if KINDS[kind].needs_hidden else 0
    return RampSpec(f"r01-{kind}", "x", 1, 0.5, kind, channels, hidden)


def served(ramp: RampSpec, parameters: Parameters, maps: Array) -> Array:
    """What ONNX Runtime makes of a head's parameters and maps (n, C, H, W)."""
    head = head_nodes(ramp, parameters, height=maps.shape[2], width=maps.shape[3])
    source = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", *maps.shape[1:]])
    target = helper.make_tensor_value_info(head.output, onnx.TensorProto.FLOAT, None)
    graph = helper.make_graph(list(head.nodes), "head", [source], [target], list(head.initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (logits,) = open_session(model, threads=1).run(None, {"x": maps})
    return np.asarray(logits)


def bright_corners(n: int, *, seed: int, size: int = 16) -> tuple[Array, Array]:
    """Noisy maps (n, 2, size, size) and logits: which of three corners of channel 1 is bright; the scales differ by
    thousands."""
    rng = np.random.default_rng(seed)
    label, half = rng.integers(0, CLASSES, n), size // 2
    maps = rng.normal(size=(n, 2, size, size))
    for row, corner in zip(maps, label, strict=True):
        row[1, half * (corner // 2) :, half * (corner % 2) :][:half, :half] += 1.5
    maps *= np.array([1e3, 1.0])[None, :, None, None]
    return maps.astype(np.float32), 6 * np.eye(CLASSES, dtype=np.float32)[label]


def pooled(ramp: RampSpec, maps: Array) -> Array:
    """What the head's first linear layer reads, computed by its own pooling nodes."""
    width = head_inputs(ramp)
    through = RampSpec(
        ramp.id, "x", 1, 0.5, "pooled-linear" if width == ramp.channels else "grid-linear", ramp.channels
    )
    identity = {"w1": np.eye(width, dtype=np.float32), "b1": np.zeros(width, dtype=np.float32)}
    return served(through, identity, maps)


@pytest.mark.parametrize("kind", ["grid-linear", "grid-mlp", pytest.param("conv", marks=pytest.mark.slow)])
def test_a_head_learns_where_something_is_and_serves_what_it_learned(kind: HeadKind) -> None:
    torch.set_num_threads(1)
    maps, logits = bright_corners(400, seed=0)
    ramp = spec(kind)
    x = maps if KINDS[kind].convolutions else pooled(ramp, maps)
    targets = softmax(logits)
    head = train_head(ramp, Lesson(x[:250], targets[:250]), Lesson(x[250:300], targets[250:300]), seed=0)
    said = served(ramp, head, maps[300:])
    assert (said.argmax(axis=1) == logits[300:].argmax(axis=1)).mean() > 0.9


def test_a_pooled_head_learns_a_linear_rule_whatever_the_scale_of_its_inputs() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(loc=50, scale=(0.01, 1, 100, 10), size=(600, 4)).astype(np.float32)
    logits = 4 * np.stack([(x[:, 0] - 50) / 0.01, (x[:, 2] - 50) / 100], axis=1).astype(np.float32)
    ramp, targets = spec("pooled-linear", channels=4), softmax(logits)
    head = train_head(ramp, Lesson(x[:450], targets[:450]), Lesson(x[450:500], targets[450:500]), seed=0)
    said = served(ramp, head, x[500:, :, None, None])
    assert (said.argmax(axis=1) == logits[500:].argmax(axis=1)).mean() > 0.9


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].training and not KINDS[kind].convolutions])
def test_without_pytorch_a_head_learns_as_much_and_a_seed_decides_the_bytes(kind: HeadKind) -> None:
    """The same rule from the same rows; the scales of inputs differ by thousands."""
    rng = np.random.default_rng(0)
    ramp = spec(kind, channels=4)
    width = head_inputs(ramp)
    x = rng.normal(loc=5, scale=np.geomspace(0.01, 100, width), size=(700, width)).astype(np.float32)
    z = (x - 5) / np.geomspace(0.01, 100, width)
    logits = np.stack([3 * z[:, 0] + z[:, 1], 3 * z[:, 2] - z[:, 3], np.full(len(x), 0.5)], axis=1).astype(np.float32)
    targets = softmax(logits)
    rows, held_out = (x[:400], targets[:400]), (x[400:500], targets[400:500])
    head = plain.train_head(ramp, rows, held_out, seed=0)
    other = train_head(ramp, Lesson(*rows), Lesson(*held_out), seed=0)
    assert {name: (value.shape, value.dtype) for name, value in head.items()} == {
        name: (value.shape, value.dtype) for name, value in other.items()
    }

    def agreement(parameters: Parameters) -> float:
        said = plain.head_logits(parameters, x[500:])
        return float((said.argmax(axis=1) == logits[500:].argmax(axis=1)).mean())

    assert agreement(head) > agreement(other) - 0.05
    again, differs = (plain.train_head(ramp, rows, held_out, seed=seed) for seed in (0, 1))
    assert all(np.array_equal(head[name], again[name]) for name in head)
    assert not np.array_equal(head["w1"], differs["w1"])


def maximum(source: str, prefix: str, _height: int, _width: int) -> list[onnx.NodeProto]:
    return [
        helper.make_node("GlobalMaxPool", [source], [f"{prefix}/max"], name=f"{prefix}/max"),
        helper.make_node("Flatten", [f"{prefix}/max"], [f"{prefix}/pooled"], name=f"{prefix}/flat", axis=1),
    ]


def test_a_new_kind_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dots that a mean does not see: it is a candidate at every map, learns, serves what it learned, is refused
    without its parameters, and has a mark in the picture."""
    recipe = HeadRecipe("dot", Pooling("maximum", maximum, cells=1), Training(1e-2, 1e-2))
    monkeypatch.setitem(KINDS, "max-linear", recipe)  # type: ignore[arg-type]
    rungs = candidate_rungs([Place(1, "x", (2, 8, 8)), Place(2, "y", (-1, 4))], entry=None, exits={})
    (ramp,) = (spec for spec in rungs.all if spec.head == "max-linear")
    assert (ramp.id, ramp.channels) == ("r01-dot", 2)
    rng = np.random.default_rng(0)
    maps, label = rng.normal(size=(300, 2, 8, 8)).astype(np.float32), rng.integers(0, 2, 300)
    maps[np.arange(300), label, rng.integers(0, 8, 300), rng.integers(0, 8, 300)] = 9
    targets, x = softmax(6 * np.eye(2, dtype=np.float32)[label]), maps.max(axis=(2, 3))
    lessons = (x[:150], targets[:150]), (x[150:200], targets[150:200])
    for head in (
        plain.train_head(ramp, *lessons, seed=0),
        train_head(ramp, Lesson(*lessons[0]), Lesson(*lessons[1]), seed=0),
    ):
        assert (served(ramp, head, maps[200:]).argmax(axis=1) == label[200:]).mean() > 0.9
    with pytest.raises(InvalidArgumentError, match="r01-dot/b1 is missing; a max-linear head needs it"):
        head_nodes(ramp, {}, height=8, width=8)
    assert _mark("max-linear") in MARKS and _mark("model") == OTHER


@pytest.mark.parametrize("module", [distillation, plain], ids=["torch", "plain"])
def test_training_stops_early_and_keeps_the_head_that_did_best_on_rows_held_out(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of held-out rows is made to rise after an epoch; the head is that of the epoch, whatever was learned
    later."""
    rng = np.random.default_rng(0)
    ramp = spec("pooled-linear", channels=4)
    x = rng.normal(size=(80, 4)).astype(np.float32)
    targets = softmax(np.stack([2 * x[:, 0], x[:, 1], x[:, 2]], axis=1))
    best_at, seen = 2, list[int]()
    torch.set_num_threads(1)

    def head(last: int) -> Any:
        """With an improvement up to epoch ``last`` and none after it."""
        seen.clear()

        def loss(*_: Any) -> float:
            seen.append(len(seen))
            return float(max(0, last - seen[-1])) + 0.1 * (seen[-1] > last)

        monkeypatch.setattr(module, "_loss", loss)
        rows, held_out = (x[:60], targets[:60]), (x[60:], targets[60:])
        if module is distillation:
            return train_head(ramp, Lesson(*rows), Lesson(*held_out), seed=0)
        return plain.train_head(ramp, rows, held_out, seed=0)

    stopped = head(best_at)
    ran = len(seen)
    whole = head(10**6)
    assert len(seen) > ran > best_at + 1  # it waited for a while, and then stopped
    assert ran - best_at <= module.PATIENCE_SHARE * len(seen) + 2
    assert all(not np.array_equal(stopped[name], whole[name]) for name in stopped)
    later = head(best_at + 1)
    assert not np.array_equal(stopped["w1"], later["w1"])  # another epoch's weights


def test_convolutions_are_trained_on_half_precision_maps_and_folded_without_loss() -> None:
    """With all rows kept, the loss that the training saw is the loss of what is served."""
    torch.set_num_threads(1)
    maps, logits = bright_corners(300, seed=1, size=9)  # an odd size, where padding and windows overlap
    halves, targets = maps.astype(np.float16), softmax(logits)
    ramp = spec("conv")
    head = train_head(ramp, Lesson(halves[:200], targets[:200]), Lesson(halves[200:], targets[200:]), seed=0)
    assert {name: value.shape for name, value in head.items()} == parameter_shapes(ramp, n_classes=CLASSES)
    said = served(ramp, head, halves[200:].astype(np.float32))
    assert (said.argmax(axis=1) == logits[200:].argmax(axis=1)).mean() > 0.8


@pytest.mark.parametrize("kind", ["pooled-linear", "grid-linear", "grid-mlp", "conv"])
def test_the_seed_and_nothing_else_decides_the_bytes(kind: HeadKind) -> None:
    torch.set_num_threads(1)
    maps, logits = bright_corners(80, seed=2, size=8)
    ramp, targets = spec(kind), softmax(logits)
    x = maps if KINDS[kind].convolutions else pooled(ramp, maps)
    lessons = Lesson(x[:60], targets[:60]), Lesson(x[60:], targets[60:])

    def bytes_of(seed: int, noise: int) -> bytes:
        torch.manual_seed(noise)  # the global generator must not matter
        return b"".join(value.tobytes() for value in train_head(ramp, *lessons, seed=seed).values())

    assert bytes_of(0, 1) == bytes_of(0, 2)
    assert bytes_of(0, 1) != bytes_of(1, 1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].training])
def test_a_head_with_a_parameter_missing_or_of_another_shape_is_refused_by_name(kind: HeadKind) -> None:
    ramp = spec(kind)
    whole = {n: np.zeros(shape, dtype=np.float32) for n, shape in parameter_shapes(ramp, n_classes=CLASSES).items()}
    for name in whole:
        with pytest.raises(InvalidArgumentError, match=f"{ramp.id}/{name} is missing"):
            head_nodes(ramp, {n: v for n, v in whole.items() if n != name}, height=8, width=8)
    with pytest.raises(InvalidArgumentError, match=f"{ramp.id}/w1 has shape"):
        head_nodes(ramp, whole | {"w1": np.zeros((1, 1), dtype=np.float32)}, height=8, width=8)


def test_a_map_too_small_for_a_grid_is_refused() -> None:
    ramp = spec("grid-linear")
    tensors = {n: np.zeros(shape, dtype=np.float32) for n, shape in parameter_shapes(ramp, n_classes=CLASSES).items()}
    with pytest.raises(InvalidArgumentError, match="at least 4 cells"):
        head_nodes(ramp, tensors, height=8, width=3)
