"""An exit bundle whose first ramp is nearly as good as the whole model, which is where compute dominates. No torch,
fixed weights.

After the first convolution come others that hardly change anything (identity kernels and a little noise), so the
model's own classifier on the first features agrees with the model on nearly every input, at a fifth of the work.
"""

from __future__ import annotations

import functools
import hashlib
import io
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
from offramp_core.protocol import RampInfo
from offramp_core.uncertainty import quantile_table, raw_score, uncertainty
from offramp_worker.bundle.graph import tapped_model
from offramp_worker.bundle.heads import head_nodes

MODEL, CHANNELS, SIZE, WIDTH, CLASSES, LAYERS = "tiny", 3, 20, 32, 5, 6
SHAPE = (CHANNELS, SIZE, SIZE)
NOISE = 0.002
ROUNDED_TO = 4  # decimals
CONFUSED, UNSURE = [1, 2], np.float32(0.1)  # classes, and what is left of a head's certainty
LAYER_SECONDS, HEAD_SECONDS = 4e-4, 1e-5
RAMPS = tuple(
    RampSpec(f"r{i:02}-linear", f"c{i}", i, (i + 1) / LAYERS, "pooled-linear", WIDTH) for i in range(LAYERS - 1)
)
Array = npt.NDArray[Any]


def inputs(n: int, *, seed: int = 1) -> npt.NDArray[np.float32]:
    """(n, 3, 20, 20) inputs; each has a mean of its own so that answers vary."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(n, *SHAPE)) + rng.normal(0.0, 1.5, size=(n, CHANNELS, 1, 1))).astype(np.float32)


def answers(bundle: Path, x: Array) -> npt.NDArray[np.int64]:
    """What the untouched model says."""
    session = _session((bundle / "backbone.onnx").read_bytes())
    return np.asarray(session.run(["logits"], {"x": x})[0]).argmax(axis=1)


@functools.lru_cache(maxsize=4)
def _session(model: bytes) -> ort.InferenceSession:
    """On one thread: those that wait for more would take the processor from the worker."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def write_bundle(
    folder: Path,
    *,
    seed: int = 0,
    with_int8: bool = False,
    layers_behind: int = 0,
    failing_share: float = 0.0,
    confused: float = 0.0,
) -> Path:
    """Write the bundle; returns its folder.

    ``with_int8`` adds the model with rounded weights: like int8 nearly right. What it is said to save is invented.
    ``layers_behind`` are further layers behind the last ramp, which take time and change nothing. About
    ``failing_share`` of the inputs make a batch fail that has one of them; none of those that a worker tries before it
    serves. The ramps take the classes of ``CONFUSED`` for each other where it is above 0, so many times as sure of them
    as of the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = _backbone(np.random.default_rng(seed), layers_behind)
    own = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    if confused:
        own |= {name: _confused(own[name], confused) for name in ("w", "b")}
    tensors: dict[str, Array] = {
        f"{r.id}/{name}": own[t].copy() for r in RAMPS for name, t in (("w1", "w"), ("b1", "b"))
    }
    x = inputs(400, seed=seed + 1)
    logits, heads = _run_tapped(model, tensors, x)
    for ramp, said in zip(RAMPS, heads, strict=True):
        tensors[f"{ramp.id}/quantiles"] = quantile_table(raw_score(said))
    highest = logits.max(axis=1)
    limit = float(np.quantile(highest, 1 - failing_share))
    tried = np.flatnonzero(highest < 0.9 * limit)[:8] if failing_share else np.arange(8)
    if failing_share:
        model = _failing_above(model, limit)
    files = {
        "backbone.onnx": model.SerializeToString(),
        "ramps.safetensors": safetensors.numpy.save(tensors),
        "records.npz": _records(tensors, logits, heads, layers_behind),
        "profile.json": msgspec.json.encode(_profile(layers_behind)),
        "probe.npz": _npz(x=x[tried], logits=logits[tried]),
    }
    precisions = (PrecisionSpec("int8", "backbone.int8.onnx", "rounded"),) if with_int8 else ()
    if with_int8:
        files |= _int8_files(model, tensors, x, logits, heads)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    manifest = Manifest(
        schema_version=1,
        name=MODEL,
        backbone_digest="sha256:" + hashes["backbone.onnx"],
        ramp_set_digest=ramp_set_digest(RAMPS, hashes, precisions),
        precisions=precisions,
        inputs=(TensorSpec("x", "FP32", SHAPE),),
        outputs=(TensorSpec("logits", "FP32", (CLASSES,)),),
        n_classes=CLASSES,
        ramps=RAMPS,
        files=hashes,
        source="tests",
    )
    for name, content in {**files, "manifest.json": msgspec.json.encode(manifest)}.items():
        (folder / name).write_bytes(content)
    return folder


def _confused(weights: Array, times: float) -> Array:
    made = UNSURE * weights
    made[..., CONFUSED] = times * made[..., CONFUSED[::-1]]
    return made.astype(np.float32)


def _int8_files(
    model: onnx.ModelProto, tensors: dict[str, Array], x: Array, logits: Array, heads: list[Array]
) -> dict[str, bytes]:
    fast = onnx.ModelProto()
    fast.CopyFrom(model)
    for tensor in fast.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).round(ROUNDED_TO), tensor.name))
    session = _session(fast.SerializeToString())
    said = np.asarray(session.run(None, {"x": x})[0])
    tensors["int8/final/quantiles"] = quantile_table(raw_score(said))
    of_fp32 = np.load(io.BytesIO(_records(tensors, logits, heads)))
    profile = Profile(
        "onnxruntime-cpu",
        1,
        tuple(replace(b, precisions={"int8": ChainProfile((0.1 * b.exact_seconds,), ())}) for b in _profile().batches),
    )
    columns = (
        *(RampInfo(r.id, r.position, r.depth, r.head, "fp32") for r in RAMPS),
        RampInfo("int8/final", 9, 1.0, "final", "int8"),
    )
    score = uncertainty(said, tensors["int8/final/quantiles"])
    records = _npz(
        uncertainty=np.column_stack([of_fp32["uncertainty"], score]),
        prediction=np.column_stack([of_fp32["prediction"], said.argmax(axis=1)]),
        final=of_fp32["final"],
        **profile_arrays(profile),
        **column_arrays(columns),
    )
    return {
        "backbone.int8.onnx": fast.SerializeToString(),
        "ramps.safetensors": safetensors.numpy.save(tensors),
        "records.npz": records,
        "profile.json": msgspec.json.encode(profile),
    }


def _backbone(rng: np.random.Generator, layers_behind: int = 0) -> onnx.ModelProto:
    nodes, weights, source, channels = [], [], "x", CHANNELS
    for i in range(LAYERS):
        kernel = rng.normal(0.0, 0.3 if i == 0 else NOISE, size=(WIDTH, channels, 3, 3)).astype(np.float32)
        if i > 0:
            kernel[np.arange(WIDTH), np.arange(WIDTH), 1, 1] += 1.0
        weights.append(numpy_helper.from_array(kernel, f"k{i}"))
        nodes.append(helper.make_node("Conv", [source, f"k{i}"], [f"a{i}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"a{i}"], [f"c{i}"]))
        source, channels = f"c{i}", WIDTH
    if layers_behind:
        weights.append(numpy_helper.from_array(_same(9), "same"))
    for i in range(LAYERS, LAYERS + layers_behind):
        nodes.append(helper.make_node("Conv", [source, "same"], [f"a{i}"], pads=[4, 4, 4, 4]))
        nodes.append(helper.make_node("Relu", [f"a{i}"], [f"c{i}"]))
        source = f"c{i}"
    weights.append(numpy_helper.from_array(rng.normal(0.0, 2.0, size=(WIDTH, CLASSES)).astype(np.float32), "w"))
    weights.append(numpy_helper.from_array(rng.normal(0.0, 0.2, size=CLASSES).astype(np.float32), "b"))
    nodes += [
        helper.make_node("GlobalAveragePool", [source], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"], axis=1),
        helper.make_node("Gemm", ["flat", "w", "b"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["batch", *SHAPE])],
        [helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", CLASSES])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _same(size: int) -> Array:
    """A kernel that changes nothing."""
    kernel = np.zeros((WIDTH, WIDTH, size, size), dtype=np.float32)
    kernel[np.arange(WIDTH), np.arange(WIDTH), size // 2, size // 2] = 1.0
    return kernel


def _failing_above(model: onnx.ModelProto, limit: float) -> onnx.ModelProto:
    """The same model, which looks up its highest logit, in times of ``limit``, in a table of one entry."""
    fails = onnx.ModelProto()
    fails.CopyFrom(model)
    for node in fails.graph.node:
        node.output[:] = ["said" if name == "logits" else name for name in node.output]
    fails.graph.initializer.extend(
        [numpy_helper.from_array(np.zeros(1, np.float32), "table"), numpy_helper.from_array(np.float32(limit), "limit")]
    )
    fails.graph.node.extend(
        [
            helper.make_node("ReduceMax", ["said"], ["highest"], axes=[1], keepdims=1),
            helper.make_node("Div", ["highest", "limit"], ["ratio"]),
            helper.make_node("Relu", ["ratio"], ["above"]),
            helper.make_node("Cast", ["above"], ["index"], to=onnx.TensorProto.INT64),
            helper.make_node("Gather", ["table", "index"], ["nothing"]),
            helper.make_node("Add", ["said", "nothing"], ["logits"]),
        ]
    )
    return fails


def _run_tapped(model: onnx.ModelProto, tensors: dict[str, Array], x: Array) -> tuple[Array, list[Array]]:
    heads = [
        head_nodes(
            ramp,
            {k.rpartition("/")[2]: v for k, v in tensors.items() if k.startswith(ramp.id + "/")},
            height=SIZE,
            width=SIZE,
        )
        for ramp in RAMPS
    ]
    session = _session(tapped_model(model, heads).SerializeToString())
    logits, *said = session.run(None, {"x": x})
    return logits, said


def _records(tensors: dict[str, Array], logits: Array, heads: list[Array], layers_behind: int = 0) -> bytes:
    batch = _profile(layers_behind).batches[0]
    scores = [uncertainty(h, tensors[f"{r.id}/quantiles"]) for r, h in zip(RAMPS, heads, strict=True)]
    return _npz(
        uncertainty=np.stack(scores, axis=1),
        prediction=np.stack([h.argmax(axis=1) for h in heads], axis=1).astype(np.int32),
        final=logits.argmax(axis=1).astype(np.int32),
        segment_seconds=np.array(batch.segment_seconds),
        ramp_seconds=np.array(batch.ramp_seconds),
    )


def _profile(layers_behind: int = 0) -> Profile:
    """Invented seconds, proportional to the batch: regrouping pays, so exits save compute."""
    layers = (1,) * (LAYERS - 1) + (1 + layers_behind,)
    batches = tuple(
        BatchProfile(
            size,
            size * sum(layers) * LAYER_SECONDS,
            tuple(size * n * LAYER_SECONDS for n in layers),
            (size * HEAD_SECONDS,) * len(RAMPS),
            1e-5,
        )
        for size in (1, 8, 32)
    )
    return Profile("onnxruntime-cpu", 1, batches)


def _npz(**arrays: Array) -> bytes:
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    return content.getvalue()
