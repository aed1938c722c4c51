"""A small genuine exit bundle made with onnx.helper: a convolutional net with three places for exits. No torch, fixed
weights.

Weights are random, so ramps know nothing; ``agreeable`` makes the last ramp the model's own classifier, which then
agrees with the reference on nearly every input.
"""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import safetensors.numpy
from onnx import helper, numpy_helper

from offramp_core.bundle import (
    BatchProfile,
    ChainProfile,
    Manifest,
    PrecisionSpec,
    Profile,
    RampSpec,
    TensorSpec,
    column_arrays,
    profile_arrays,
    ramp_set_digest,
)
from offramp_core.scale import Scale
from offramp_core.uncertainty import quantile_table, raw_score, uncertainty
from offramp_worker.bundle.graph import tapped_model
from offramp_worker.bundle.heads import head_nodes, parameter_shapes

CHANNELS, SIZE, WIDTH, CLASSES = 3, 14, 8, 5
MODEL = "tiny"
Array = npt.NDArray[Any]


def inputs(n: int, *, seed: int = 1) -> npt.NDArray[np.float32]:
    """(n, 3, 14, 14) inputs; each has a mean of its own so that answers vary."""
    rng = np.random.default_rng(seed)
    shift = rng.normal(0.0, 1.5, size=(n, CHANNELS, 1, 1))
    return (rng.normal(size=(n, CHANNELS, SIZE, SIZE)) + shift).astype(np.float32)


def write_bundle(
    folder: Path, *, seed: int = 0, regrouping_pays: bool = True, executor: str = "onnxruntime-cpu"
) -> Path:
    """Write a bundle, as if measured with ``executor``; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    model = _backbone(rng)
    ramps = _ramps()
    tensors = _head_tensors(ramps, model, rng)
    model_bytes = model.SerializeToString()
    logits, heads = _run_tapped(model, ramps, tensors, inputs(256, seed=seed + 1))
    for ramp, said in zip(ramps, heads, strict=True):
        tensors[f"{ramp.id}/quantiles"] = quantile_table(raw_score(said))
    files = {
        "backbone.onnx": model_bytes,
        "ramps.safetensors": safetensors.numpy.save(tensors),
        "records.npz": _records(ramps, tensors, logits, heads),
        "profile.json": msgspec.json.encode(
            replace(_profile(len(ramps), regrouping_pays=regrouping_pays), executor=executor)
        ),
        "probe.npz": _npz(x=inputs(256, seed=seed + 1)[:8], logits=logits[:8]),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
    write_manifest(folder, ramps)
    return folder


def write_wide_bundle(
    folder: Path, *, seed: int = 0, int8_model: onnx.ModelProto | None = None, bare: bool = False
) -> Path:
    """The same model with a small model at the input and a second precision; returns the folder. ``bare`` leaves int8
    without any ramp.

    ``int8_model`` is by default the backbone with weights rounded to few steps: like int8, faster to make, and wrong
    more often.
    """
    write_bundle(folder, seed=seed)
    rng = np.random.default_rng(seed + 100)
    reference = onnx.load(str(folder / "backbone.onnx"))
    int8 = coarse(reference) if int8_model is None else int8_model
    small = _small_model(rng)
    tensors = dict(safetensors.numpy.load((folder / "ramps.safetensors").read_bytes()))
    x = inputs(256, seed=seed + 1)
    said: dict[str, Array] = {SMALL: _answers(small, x)}
    for model, own in ((reference, _ramps()), (int8, _int8_ramps())):
        logits, heads = _run_tapped(model, own, tensors, x)
        said |= {ramp.id: head for ramp, head in zip(own, heads, strict=True)}
        said["int8/final" if model is int8 else "fp32/final"] = logits
    ramps = _ramps() if bare else WIDE_RAMPS
    for column in (*(ramp.id for ramp in ramps), "int8/final"):
        tensors[f"{column}/quantiles"] = quantile_table(raw_score(said[column]))
    (folder / "backbone.int8.onnx").write_bytes(int8.SerializeToString())
    (folder / f"ramp-{SMALL}.onnx").write_bytes(small.SerializeToString())
    (folder / "ramps.safetensors").write_bytes(safetensors.numpy.save(tensors))
    write_manifest(folder, ramps, WIDE_PRECISIONS)
    columns = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest).columns
    profile = wide_profile(bare=bare)
    records = _npz(
        uncertainty=np.stack([uncertainty(said[c.id], tensors[f"{c.id}/quantiles"]) for c in columns], axis=1),
        prediction=np.stack([said[c.id].argmax(axis=1) for c in columns], axis=1).astype(np.int32),
        final=said["fp32/final"].argmax(axis=1).astype(np.int32),
        **profile_arrays(profile),
        **column_arrays(columns),
    )
    (folder / "records.npz").write_bytes(records)
    (folder / "profile.json").write_bytes(msgspec.json.encode(profile))
    write_manifest(folder, ramps, WIDE_PRECISIONS)
    return folder


def add_precision(folder: Path, name: str, model: onnx.ModelProto, *, share: float) -> RampSpec:
    """One more form of the backbone for a wide bundle, last in its order: its graph, one head read off it, what both
    say, and their costs.

    It takes ``share`` of the reference's time. Returns its ramp.
    """
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    profile = msgspec.json.decode((folder / "profile.json").read_bytes(), type=Profile)
    tensors = dict(safetensors.numpy.load((folder / "ramps.safetensors").read_bytes()))
    records = dict(np.load(folder / "records.npz"))
    spec = PrecisionSpec(name, f"backbone.{name}.onnx", "by a test")
    ramp = RampSpec(f"{name}/r02-linear", "c2", 2, 0.9, "pooled-linear", WIDTH, precision=name)
    logits, (head,) = _run_tapped(model, (ramp,), tensors, inputs(256, seed=1))
    said = {ramp.id: head, f"{name}/final": logits}
    tensors |= {f"{column}/quantiles": quantile_table(raw_score(scores)) for column, scores in said.items()}
    chains = [
        ChainProfile((0.0, share * b.exact_seconds, 0.0), (b.ramp_seconds[0], 1e-6 * b.batch_size))
        for b in profile.batches
    ]
    profile = replace(
        profile,
        batches=tuple(
            replace(b, precisions={**b.precisions, name: c}) for b, c in zip(profile.batches, chains, strict=True)
        ),
    )
    ramps, precisions = (*manifest.ramps, ramp), (*manifest.precisions, spec)
    columns = replace(manifest, ramps=ramps, precisions=precisions).columns
    own = [uncertainty(scores, tensors[f"{column}/quantiles"]) for column, scores in said.items()]
    records |= {
        "uncertainty": np.column_stack([records["uncertainty"], *own]),
        "prediction": np.column_stack([records["prediction"], *(scores.argmax(axis=1) for scores in said.values())]),
        **profile_arrays(profile),
        **column_arrays(columns),
    }
    (folder / spec.file).write_bytes(model.SerializeToString())
    (folder / "ramps.safetensors").write_bytes(safetensors.numpy.save(tensors))
    (folder / "records.npz").write_bytes(_npz(**records))
    (folder / "profile.json").write_bytes(msgspec.json.encode(profile))
    write_manifest(folder, ramps, precisions)
    return ramp


def pruned(model: onnx.ModelProto, *, share: float = 0.5) -> onnx.ModelProto:
    """The model without the smallest ``share`` of every tensor's weights."""
    sparse = onnx.ModelProto()
    sparse.CopyFrom(model)
    for tensor in sparse.graph.initializer:
        values = numpy_helper.to_array(tensor).copy()
        values[np.abs(values) < np.quantile(np.abs(values), share)] = 0.0
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return sparse


def coarse(model: onnx.ModelProto, *, steps: int = 3) -> onnx.ModelProto:
    """The model with every weight rounded to few steps of its tensor's largest."""
    rounded = onnx.ModelProto()
    rounded.CopyFrom(model)
    for tensor in rounded.graph.initializer:
        values = numpy_helper.to_array(tensor)
        step = np.abs(values).max() / steps
        tensor.CopyFrom(numpy_helper.from_array((np.rint(values / step) * step).astype(np.float32), tensor.name))
    return rounded


def wide_profile(*, bare: bool = False) -> Profile:
    """Invented seconds: int8 takes half of fp32, the small model a tenth."""
    batches, first = [], 1 if bare else 0  # of the columns and of the places, without and with the one at the input
    for size in (1, 8, 32):
        segments, int8 = (0.0, 2e-4, 0.0, 3e-4, 3e-4, 2e-4), (0.0, 1e-4, 3e-4, 1e-4)
        batches.append(
            BatchProfile(
                size,
                size * sum(segments),
                tuple(size * s for s in segments)[first:],
                (size * 1e-4, *[size * 1e-5] * 4)[first:],
                1e-5,
                {
                    "int8": ChainProfile((size * sum(int8),), ())
                    if bare
                    else ChainProfile(tuple(size * s for s in int8), (size * 1e-4, size * 1e-5, size * 1e-5))
                },
            )
        )
    return Profile("onnxruntime-cpu", 1, tuple(batches))


def write_manifest(
    folder: Path, ramps: tuple[RampSpec, ...] | None = None, precisions: tuple[PrecisionSpec, ...] = ()
) -> None:
    """Write a manifest that fits the files as they are."""
    ramps = _ramps() if ramps is None else ramps
    hashes = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.iterdir()
        if file.name != "manifest.json"
    }
    manifest = Manifest(
        schema_version=1,
        name=MODEL,
        backbone_digest="sha256:" + hashes["backbone.onnx"],
        ramp_set_digest=ramp_set_digest(ramps, hashes, precisions),
        inputs=(TensorSpec("x", "FP32", (CHANNELS, SIZE, SIZE)),),
        outputs=(TensorSpec("logits", "FP32", (CLASSES,)),),
        n_classes=CLASSES,
        ramps=ramps,
        files=hashes,
        source="tests",
        precisions=precisions,
    )
    (folder / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def answering_in(folder: Path, scale: Scale) -> Path:
    """Let the bundle's model, at every precision, end in another scale than logits, which the manifest says."""
    manifest = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=Manifest)
    ends = {"probabilities": "Softmax", "log-probabilities": "LogSoftmax"}
    for file in ("backbone.onnx", *(precision.file for precision in manifest.precisions)):
        model = onnx.load(str(folder / file))
        (end,) = model.graph.output
        model.graph.node.append(helper.make_node(ends[scale.kind], [end.name], ["shares"], axis=1))
        model.graph.node.append(helper.make_node("Mul", ["shares", "total"], ["scores"]))
        model.graph.initializer.append(numpy_helper.from_array(np.array(scale.total, dtype=np.float32), "total"))
        end.name = "scores"
        (folder / file).write_bytes(model.SerializeToString())
    x = np.load(folder / "probe.npz")["x"]
    (folder / "probe.npz").write_bytes(_npz(x=x, logits=_answers(onnx.load(str(folder / "backbone.onnx")), x)))
    write_manifest(folder, manifest.ramps, manifest.precisions)
    edit_manifest(folder, scale={"kind": scale.kind, "total": scale.total})
    return folder


def edit_manifest(folder: Path, **fields: Any) -> None:
    """Overwrite fields of the manifest as it is on disk."""
    file = folder / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def _backbone(rng: np.random.Generator) -> onnx.ModelProto:
    """Three residual-free places c0, c1, c2 (14x14, 7x7, 7x7), then pooling and a classifier."""
    nodes, weights, source, channels = [], [], "x", CHANNELS
    for i, stride in enumerate((1, 2, 1)):
        kernel = rng.normal(0.0, (2.0 / (9 * channels)) ** 0.5, size=(WIDTH, channels, 3, 3)).astype(np.float32)
        weights += [numpy_helper.from_array(kernel, f"k{i}"), _vector(rng, f"kb{i}", WIDTH)]
        nodes.append(
            helper.make_node(
                "Conv", [source, f"k{i}", f"kb{i}"], [f"a{i}"], pads=[1, 1, 1, 1], strides=[stride, stride]
            )
        )
        nodes.append(helper.make_node("Relu", [f"a{i}"], [f"c{i}"]))
        source, channels = f"c{i}", WIDTH
    weights.append(numpy_helper.from_array(rng.normal(0.0, 2.0, size=(WIDTH, CLASSES)).astype(np.float32), "w"))
    weights.append(_vector(rng, "b", CLASSES))
    nodes += [
        helper.make_node("GlobalAveragePool", [source], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"], axis=1),
        helper.make_node("Gemm", ["flat", "w", "b"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", CHANNELS, SIZE, SIZE])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", CLASSES])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _ramps() -> tuple[RampSpec, ...]:
    """Both head kinds, two ramps at one place, and a last one (r02-linear) that is the classifier of the model
    itself."""
    return (
        RampSpec("r00-grid", "c0", 0, 0.2, "grid-mlp", WIDTH, hidden=6),
        RampSpec("r00-linear", "c0", 0, 0.2, "pooled-linear", WIDTH),
        RampSpec("r01-grid", "c1", 1, 0.5, "grid-mlp", WIDTH, hidden=6),
        RampSpec("r02-linear", "c2", 2, 0.9, "pooled-linear", WIDTH),
    )


def _int8_ramps() -> tuple[RampSpec, ...]:
    """Heads on the features of the other precision; both use the weights of their namesakes at fp32."""
    return (
        RampSpec("int8/r00-grid", "c0", 0, 0.2, "grid-mlp", WIDTH, hidden=6, precision="int8"),
        RampSpec("int8/r02-linear", "c2", 2, 0.9, "pooled-linear", WIDTH, precision="int8"),
    )


SMALL = "in.small"
WIDE_RAMPS = (RampSpec(SMALL, "x", 0, 0.0, "model", CHANNELS), *_ramps(), *_int8_ramps())
WIDE_PRECISIONS = (PrecisionSpec("int8", "backbone.int8.onnx", "rounded"),)


def _small_model(rng: np.random.Generator) -> onnx.ModelProto:
    """A classifier of the channels' means."""
    nodes = [
        helper.make_node("GlobalAveragePool", ["x"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["row"], axis=1),
        helper.make_node("Gemm", ["row", "w", "b"], ["said"]),
    ]
    weights = [
        numpy_helper.from_array(rng.normal(0.0, 2.0, size=(CHANNELS, CLASSES)).astype(np.float32), "w"),
        _vector(rng, "b", CLASSES),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", CHANNELS, SIZE, SIZE])],
        [helper.make_tensor_value_info("said", onnx.TensorProto.FLOAT, ["batch", CLASSES])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _answers(model: onnx.ModelProto, x: Array) -> Array:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def _head_tensors(ramps: tuple[RampSpec, ...], model: onnx.ModelProto, rng: np.random.Generator) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for ramp in ramps:
        for name, shape in parameter_shapes(ramp, n_classes=CLASSES).items():
            tensors[f"{ramp.id}/{name}"] = rng.normal(0.0, 0.5, size=shape).astype(np.float32)
    own = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    tensors["r02-linear/w1"], tensors["r02-linear/b1"] = own["w"].copy(), own["b"].copy()
    return tensors


def _run_tapped(
    model: onnx.ModelProto, ramps: tuple[RampSpec, ...], tensors: dict[str, Array], x: Array
) -> tuple[Array, list[Array]]:
    sizes = {"c0": SIZE, "c1": SIZE // 2, "c2": SIZE // 2}
    heads = [
        head_nodes(
            ramp,
            {k.rpartition("/")[2]: v for k, v in tensors.items() if k.rpartition("/")[0] == ramp.id.rpartition("/")[2]},
            height=sizes[ramp.tensor],
            width=sizes[ramp.tensor],
        )
        for ramp in ramps
    ]
    tapped = tapped_model(model, heads)
    session = ort.InferenceSession(tapped.SerializeToString(), providers=["CPUExecutionProvider"])
    logits, *said = session.run(None, {"x": x})
    return logits, said


def _records(ramps: tuple[RampSpec, ...], tensors: dict[str, Array], logits: Array, heads: list[Array]) -> bytes:
    profile = _profile(len(ramps), regrouping_pays=True).batches[0]
    return _npz(
        uncertainty=np.stack(
            [uncertainty(h, tensors[f"{r.id}/quantiles"]) for r, h in zip(ramps, heads, strict=True)], axis=1
        ),
        prediction=np.stack([h.argmax(axis=1) for h in heads], axis=1).astype(np.int32),
        final=logits.argmax(axis=1).astype(np.int32),
        segment_seconds=np.array(profile.segment_seconds),
        ramp_seconds=np.array(profile.ramp_seconds),
    )


def _profile(n_ramps: int, *, regrouping_pays: bool) -> Profile:
    """Invented seconds: proportional to the batch where regrouping pays, constant where it does not."""
    batches = []
    for size in (1, 8, 32):
        scale = size if regrouping_pays else 32
        segments = (2e-4, 0.0, 3e-4, 3e-4, 2e-4)
        batches.append(
            BatchProfile(
                size, scale * sum(segments), tuple(scale * s for s in segments), (scale * 1e-5,) * n_ramps, 1e-5
            )
        )
    return Profile("onnxruntime-cpu", 1, tuple(batches))


def _vector(rng: np.random.Generator, name: str, n: int) -> onnx.TensorProto:
    return numpy_helper.from_array(rng.normal(0.0, 0.2, size=n).astype(np.float32), name)


def _npz(**arrays: Array) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()
