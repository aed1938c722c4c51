"""The graph that cheaper forms are made of: constants folded, normalization merged into convolutions."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

import onnx
import onnxruntime as ort

from offramp_worker.bundle.graph import with_outputs
from offramp_worker.bundle.tensors import closed_options


def folded(model: onnx.ModelProto, *, keep: Collection[str]) -> onnx.ModelProto:
    """A copy with constants folded and normalization merged into convolutions; tensors in ``keep`` survive."""
    probe, outputs = with_outputs(model, sorted(keep)), len(model.graph.output)
    options = closed_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        ort.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
        optimised = onnx.load(options.optimized_model_filepath)
    del optimised.graph.output[outputs:]
    for index, node in enumerate(optimised.graph.node):
        node.name = f"n{index}"  # nodes are excluded by name, and the exporter's need not be unique
    return optimised


def tidied(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without notes, so that the bytes depend on the graph alone."""
    model.producer_name, model.producer_version, model.doc_string = "offramp", "", ""
    del model.metadata_props[:]
    del model.graph.value_info[:]
    return model
