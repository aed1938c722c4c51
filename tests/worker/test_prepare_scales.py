"""What ``offramp prepare`` sees to: scores mean the same at every exit, whatever the model ends in and however it was
given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import bundles
import numpy as np
import numpy.typing as npt
import onnx
import prepared
import pytest
import torch
from onnx import helper, numpy_helper
from scipy.special import softmax
from torch import nn

from offramp_core.bundle import HeadKind, RampSpec
from offramp_core.scale import LOGITS, Scale
from offramp_worker.bundle.graph import tapped_model
from offramp_worker.bundle.heads import KINDS, parameter_shapes
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.devices import open_session
from offramp_worker.prepare.heads.scales import temperature, tempered
from offramp_worker.prepare.pipeline import PrepareRequest, prepare_bundle
from offramp_worker.prepare.progress import Reporter
from offramp_worker.prepare.refresh import refresh_bundle
from offramp_worker.prepare.source.sources import load_backbone

pytestmark = pytest.mark.slow  # exports with torch

Array = npt.NDArray[np.float64]
HELD_OUT = 3_000
BINS = 10
# Of an error over 3,000 rows, seen at 0.005 to 0.025: a temperature from some dozens of rows, and noise of 0.01.
MARGIN = 0.05


def as_onnx(folder: Path, *ends: str) -> str:
    """The family's network as an .onnx file with more operators at its end."""
    model = load_backbone(prepared.save_model(folder), prepared.images(16, seed=1)[0]).model
    (end,) = model.graph.output
    name = end.name
    model.graph.initializer.append(numpy_helper.from_array(np.array(100, dtype=np.float32), "hundred"))
    for number, operator in enumerate(ends):
        inputs = [name, "hundred"] if operator == "Mul" else [name]
        options = {} if operator == "Mul" else {"axis": 1}
        model.graph.node.append(helper.make_node(operator, inputs, [f"end{number}"], **options))
        name = f"end{number}"
    end.name = name
    onnx.save(model, str(folder / "model.onnx"))
    return str(folder / "model.onnx")


def as_program(folder: Path, end: nn.Module) -> str:
    """The same network as a program of torch.export."""
    batch, x = torch.export.Dim("batch"), torch.from_numpy(prepared.images(2, seed=1)[0])
    program = torch.export.export(nn.Sequential(prepared.trained_model(), end), (x,), dynamic_shapes=({0: batch},))
    torch.export.save(program, folder / "model.pt2")
    return str(folder / "model.pt2")


SOURCES: dict[str, tuple[Callable[[Path], str], Scale]] = {
    "a family, logits": (prepared.save_model, LOGITS),
    "a program, softmax": (lambda d: as_program(d, nn.Softmax(dim=1)), Scale("probabilities")),
    "a program, log-softmax": (lambda d: as_program(d, nn.LogSoftmax(dim=1)), Scale("log-probabilities")),
    "ONNX, softmax": (lambda d: as_onnx(d, "Softmax"), Scale("probabilities")),
    "ONNX, log-softmax": (lambda d: as_onnx(d, "LogSoftmax"), Scale("log-probabilities")),
    "ONNX, percentages": (lambda d: as_onnx(d, "Softmax", "Mul"), Scale("probabilities", 100.0)),
}


def bundle_of(folder: Path, model: str, **options: object) -> Bundle:
    np.savez(folder / "data.npz", x=prepared.images(900, seed=2)[0])
    request = PrepareRequest(
        model=model,
        data=str(folder / "data.npz"),
        out=folder / "bundle",
        head_share=0.4,
        profile_seconds=0.05,
        **{"precision": "exact", "compile_limit": 0, **options},  # type: ignore[arg-type]
    )
    prepare_bundle(request, Reporter(quiet=True))
    return load_bundle(folder / "bundle")


def said(bundle: Bundle, x: npt.NDArray[np.float32]) -> tuple[Array, dict[str, Array]]:
    """What the model answers, and the logits of each of its ramps."""
    heads = [head for head in bundle.heads if head is not None]
    session = open_session(tapped_model(bundle.backbone, heads), threads=1)
    final, *others = session.run(None, {bundle.manifest.inputs[0].name: x})
    found = {head.ramp_id: each for head, each in zip(heads, others, strict=True)}
    for j, model in bundle.side_models.items():
        found[bundle.columns[j].id] = prepared.run(model, x)
    return final, found


def probabilities(scale: Scale, answers: Array) -> Array:
    """Answers as probabilities, worked out apart from the code under test."""
    if scale.kind == "probabilities":
        return np.asarray(answers / scale.total)
    return np.asarray(np.exp(answers) if scale.kind == "log-probabilities" else softmax(answers, axis=1))


def calibration_error(shares: Array, own: Array) -> float:
    """Expected calibration error in bins of equal mass: how far the largest probability lies from what the model gives
    that class."""
    sure, given = shares.max(axis=1), own[np.arange(len(own)), shares.argmax(axis=1)]
    bins = np.array_split(np.argsort(sure), BINS)
    return float(sum(len(rows) * abs(sure[rows].mean() - given[rows].mean()) for rows in bins) / len(own))


@pytest.mark.parametrize("source", SOURCES)
def test_a_ramps_scores_mean_what_the_models_own_mean(source: str, tmp_path: Path) -> None:
    make, scale = SOURCES[source]
    bundle = bundle_of(tmp_path, make(tmp_path))
    assert bundle.manifest.scale == scale
    x, _ = prepared.images(HELD_OUT, seed=9)
    final, ramps = said(bundle, x)
    own = probabilities(scale, final)
    np.testing.assert_allclose(own.sum(axis=1), 1, rtol=1e-3)
    assert ramps
    for ramp, logits in ramps.items():
        answered = scale.from_logits(logits)
        assert (
            answered.argmax(axis=1) == logits.argmax(axis=1)
        ).mean() > 0.999  # what is equal in float32 has no order
        shares = probabilities(scale, answered)
        np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-3, err_msg=ramp)
        assert calibration_error(shares, own) < MARGIN, ramp


def test_refreshed_heads_keep_the_scale_and_a_bundle_from_before_it_stays_without(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, as_onnx(tmp_path, "Softmax"))
    np.savez(tmp_path / "recent.npz", x=prepared.images(900, seed=3)[0])
    x, _ = prepared.images(HELD_OUT, seed=9)
    for scale in (Scale("probabilities"), None):
        bundles.edit_manifest(bundle.path, scale=scale and {"kind": scale.kind, "total": scale.total})
        out = tmp_path / f"refreshed-{scale is None}"
        request = PrepareRequest(model=str(bundle.path), data=str(tmp_path / "recent.npz"), out=out, head_share=0.4)
        refresh_bundle(request, Reporter(quiet=True))
        refreshed = load_bundle(out)
        assert refreshed.manifest.scale == scale
        own, ramps = said(refreshed, x)
        for ramp, logits in ramps.items():
            assert calibration_error(softmax(logits, axis=1), own) < MARGIN, ramp


def too_sure(folder: Path, *, end: str = "") -> str:
    """A small network that knows a little and is as sure as if it knew ten times as much."""
    x, y = prepared.images(2_000, seed=4)
    half = prepared.SIZE // 2
    quadrants = x.reshape(-1, 2, half, 2, half).mean(axis=(2, 4)).reshape(-1, prepared.CLASSES)
    assert (quadrants.argmax(axis=1) == y).mean() > 0.5
    nodes = [
        helper.make_node("AveragePool", ["x"], ["pooled"], kernel_shape=[half] * 2, strides=[half] * 2),
        helper.make_node("Flatten", ["pooled"], ["means"], axis=1),
        helper.make_node("MatMul", ["means", "w"], ["said"]),
        *([helper.make_node(end, ["said"], ["scores"], axis=1)] if end else []),
    ]
    shape = ["batch", 1, prepared.SIZE, prepared.SIZE]
    graph = helper.make_graph(
        nodes,
        "means",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [
            helper.make_tensor_value_info(
                "scores" if end else "said", onnx.TensorProto.FLOAT, ["batch", prepared.CLASSES]
            )
        ],
        [numpy_helper.from_array(100 * np.eye(prepared.CLASSES, dtype=np.float32), "w")],
    )
    file = folder / f"means{end.lower()}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(file))
    return str(file)


def test_side_models_answer_as_sure_as_the_model_is_whatever_they_end_in(tmp_path: Path) -> None:
    sides = (too_sure(tmp_path), too_sure(tmp_path, end="Softmax"))
    bundle = bundle_of(tmp_path, as_onnx(tmp_path, "Softmax"), sides=sides)
    assert len(bundle.side_models) == len(sides)
    x, _ = prepared.images(HELD_OUT, seed=9)
    own, ramps = said(bundle, x)
    for model in bundle.side_models:
        logits = ramps[bundle.columns[model].id]
        shares = Scale("probabilities").from_logits(logits)
        assert calibration_error(shares, own) < MARGIN
    for file in sides:  # by themselves they are nothing of the kind
        alone = prepared.run(onnx.load(file), x)
        assert calibration_error(alone if "softmax" in file else softmax(alone, axis=1), own) > 2 * MARGIN


def test_a_temperature_is_what_was_multiplied_into_the_logits() -> None:
    logits = np.random.default_rng(0).normal(0, 2, (500, 5)).astype(np.float32)
    for by in (0.2, 1.0, 7.0):
        assert temperature(by * logits, softmax(logits, axis=1)) == pytest.approx(by, rel=1e-3)


def test_a_temperature_has_bounds_where_rows_say_nothing_of_it() -> None:
    sure = np.eye(3, dtype=np.float32)
    assert 1 / 17 < temperature(sure, sure) < 1 / 15  # never wrong: the surer the better
    assert 15 < temperature(sure, sure[::-1][[2, 0, 1]]) < 17  # always wrong
    assert temperature(np.full((4, 3), np.nan, np.float32), sure[[0, 1, 2, 0]]) == 1.0
    with_one_broken = np.concatenate([3 * sure, [[np.inf, 0, 0]]]).astype(np.float32)
    assert np.isfinite(temperature(with_one_broken, sure[[0, 1, 2, 0]]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].training])
def test_a_temperature_lies_in_the_last_layer_of_every_kind_of_head(kind: HeadKind) -> None:
    rng = np.random.default_rng(1)
    spec = RampSpec("r", "x", 0, 0.5, kind, 3, hidden=4 if KINDS[kind].needs_hidden else 0)
    parameters = {
        name: rng.normal(size=shape).astype(np.float32) for name, shape in parameter_shapes(spec, n_classes=3).items()
    }
    last = {"w2", "b2"} if KINDS[kind].hidden_layer else {"w1", "b1"}
    halved = tempered(parameters, 2.0)
    for name, value in parameters.items():
        np.testing.assert_array_equal(halved[name], value / 2 if name in last else value)
