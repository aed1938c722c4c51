"""From a model URI to ``backbone.onnx``: loading, exporting and checking the model as the user gave it.

Everything after this module works on the ONNX graph alone. Nothing is unpickled: families read safetensors,
and an archive of ``torch.export`` is opened only where it holds no pickled objects.
"""

from __future__ import annotations

import logging
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import onnx
import onnxruntime as ort

from offramp_core.bundle import TensorSpec
from offramp_core.errors import InvalidArgumentError, ModelRefusedError
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.prepare.data import FloatArray

SAMPLE_ROWS = 16
LOGITS_RTOL = 1e-3  # of the largest logit; folding batch normalisation moves the last bits
DYNAMIC_SHAPES_HINT = 'torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))'


@dataclass(frozen=True, slots=True)
class Backbone:
    """The reference model as one ONNX graph with a dynamic batch axis, checked on sample inputs.

    ``program`` is what torch.export made of it, where torch had it.
    """

    model: Any  # onnx.ModelProto
    name: str
    input: TensorSpec
    output: TensorSpec
    program: Any = None  # torch.export.ExportedProgram

    @property
    def n_classes(self) -> int:
        """Width of the logits."""
        return self.output.shape[0]


def load_backbone(uri: str, x: FloatArray) -> Backbone:
    """Load a model and turn it into a checked ONNX graph.

    Parameters
    ----------
    uri : str
        ``family:NAME?weights=FILE.safetensors[&parameter=value]``, a ``.pt2`` file or an ``.onnx`` file.
    x : (N, ...) float32
        Inputs; the first 16 are run to check the model.

    Raises
    ------
    InvalidArgumentError
        The URI, a file it names, or the shape of the inputs is at fault.
    ModelRefusedError
        The model is no classifier with one input and one output, or its answers depend on the batch.
    """
    sample = x[:SAMPLE_ROWS]
    program = None
    if uri.startswith("family:"):
        model, program, name = _from_family(uri, sample)
    elif uri.endswith(".pt2"):
        (model, program), name = _from_exported(_existing(uri), sample), Path(uri).stem
    elif uri.endswith(".onnx"):
        model, name = _from_onnx(_existing(uri)), Path(uri).stem
    else:
        raise InvalidArgumentError(
            f"model {uri!r} is none of family:NAME?weights=FILE.safetensors, FILE.pt2 and FILE.onnx; "
            "other checkpoints: export them with torch.export.save or torch.onnx.export"
        )
    return replace(_checked(_normalised(model), name=name, sample=sample), program=program)


def open_session(model: onnx.ModelProto, *, threads: int, optimised: bool = False) -> ort.InferenceSession:
    """An ONNX Runtime session on the CPU that spins on no core while it waits. An ``optimised`` graph is left as it is."""
    options = ort.SessionOptions()
    if optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise InvalidArgumentError(f"model {path} does not exist or is not a file")
    return Path(path)


def _from_family(uri: str, sample: FloatArray) -> tuple[onnx.ModelProto, Any, str]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from offramp_worker.prepare.families import build_family

    name, _, query = uri.removeprefix("family:").partition("?")
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    weights = parameters.pop("weights", "")
    if not weights:
        raise InvalidArgumentError(f"model {uri!r} names no weights; write family:{name}?weights=FILE.safetensors")
    module = build_family(name, parameters)
    try:
        tensors = load_file(_existing(weights))
    except (SafetensorError, OSError) as error:
        raise InvalidArgumentError(f"model weights {weights} are not a readable safetensors file: {error}") from error
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        first = str(error).partition("\n")[2].strip().partition("\n")[0]
        raise InvalidArgumentError(f"model weights {weights} do not fit family {name}: {first}") from error
    return (*_export(module, sample), name)


def _from_exported(path: Path, sample: FloatArray) -> tuple[onnx.ModelProto, Any]:
    import torch

    _refuse_pickled(path)
    with _weights_only():
        try:
            program = torch.export.load(path)
        except Exception as error:  # torch raises whatever the broken member makes it raise
            raise InvalidArgumentError(
                f"model {path} is not a readable torch.export program: {_line(error)}"
            ) from error
    try:
        module = program.module()
        reference = _answers(module, sample)
    except AssertionError as error:
        raise _shape_error(path, error) from error
    return _onnx_program(program, sample, reference), program


def _from_onnx(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(path)
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf's and onnx's errors share no base but Exception
        raise InvalidArgumentError(f"model {path} is not a valid ONNX file: {_line(error)}") from error
    return model


def _export(module: Any, sample: FloatArray) -> tuple[onnx.ModelProto, Any]:
    import torch

    module = module.eval()
    try:
        reference = _answers(module, sample)
    except RuntimeError as error:
        shape = list(sample.shape[1:])
        raise InvalidArgumentError(
            f"data x has rows of shape {shape}, which do not fit the model: {_line(error)}"
        ) from error
    rows = torch.from_numpy(sample[:2])
    with _quiet():
        program = torch.export.export(module, (rows,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    return _onnx_program(program, sample, reference), program


def _onnx_program(program: Any, sample: FloatArray, reference: FloatArray) -> onnx.ModelProto:
    """Convert an exported program and compare the graph's answers with PyTorch's."""
    import torch

    with _quiet():
        try:
            converted = torch.onnx.export(
                program, dynamo=True, input_names=["input"], output_names=["logits"], verbose=False
            )
        except torch.onnx.OnnxExporterError as error:
            raise ModelRefusedError(f"the model cannot be expressed in ONNX: {_line(error)}") from error
    assert converted is not None
    model = converted.model_proto
    answers = _run(model, sample)
    if not _close(answers, reference):
        gap = float(np.abs(answers - reference).max())
        raise ModelRefusedError(f"the exported graph differs from the PyTorch model by up to {gap:.3g} in its logits")
    return model


def _answers(module: Callable[..., Any], sample: FloatArray) -> FloatArray:
    import torch

    with torch.inference_mode():
        value = module(torch.from_numpy(sample))
    if not isinstance(value, torch.Tensor):
        raise ModelRefusedError(
            f"the model returns a {type(value).__name__}; it must return one tensor of logits [batch, classes]"
        )
    return np.asarray(value.detach().numpy(), dtype=np.float32)


def _normalised(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without notes (source lines, folders of the exporting machine), so that its digest names the model only."""
    clean = onnx.ModelProto()
    clean.CopyFrom(model)
    clean.producer_name, clean.producer_version, clean.doc_string = "offramp", "", ""
    del clean.metadata_props[:]
    graph = clean.graph
    graph.doc_string = ""
    del graph.value_info[:]
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    return clean


def _checked(model: onnx.ModelProto, *, name: str, sample: FloatArray) -> Backbone:
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in constants]
    if len(inputs) != 1 or len(model.graph.output) != 1:
        raise ModelRefusedError(
            f"the model has {len(inputs)} inputs and {len(model.graph.output)} outputs; "
            "exits need a classifier with one input and one output of logits"
        )
    if inputs[0].type.tensor_type.elem_type != onnx.TensorProto.FLOAT:
        raise ModelRefusedError(f"input {inputs[0].name!r} is not float32; only float32 inputs are supported")
    _free_batch_axis(inputs[0], model.graph.output[0], sample)
    answers = _run(model, sample)
    _check_answers(model, answers, sample)
    return Backbone(
        model=model,
        name=name,
        input=TensorSpec(input_name(model), "FP32", tuple(int(d) for d in sample.shape[1:])),
        output=TensorSpec(output_name(model), "FP32", (int(answers.shape[1]),)),
    )


def _free_batch_axis(source: onnx.ValueInfoProto, output: onnx.ValueInfoProto, sample: FloatArray) -> None:
    """Check the declared input shape against the data and make the batch axis dynamic in both declarations."""
    declared = source.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in declared]
    fits = len(sizes) == sample.ndim and all(
        want in (0, got) for want, got in zip(sizes[1:], sample.shape[1:], strict=True)
    )
    if sizes and not fits:
        wanted = [size or "any" for size in sizes[1:]]
        raise InvalidArgumentError(f"data x has rows of shape {list(sample.shape[1:])}; the model takes {wanted}")
    for value in (source, output):
        if len(value.type.tensor_type.shape.dim):
            value.type.tensor_type.shape.dim[0].Clear()
            value.type.tensor_type.shape.dim[0].dim_param = "batch"


def _check_answers(model: onnx.ModelProto, answers: FloatArray, sample: FloatArray) -> None:
    if answers.ndim != 2 or len(answers) != len(sample) or answers.shape[1] < 2:
        raise ModelRefusedError(
            f"the model's output has shape {list(answers.shape)} for {len(sample)} inputs; "
            "it must be [batch, classes] with at least two classes"
        )
    if not np.isfinite(answers).all():
        raise ModelRefusedError("the model answers sample inputs with NaN or infinity")
    alone = np.concatenate([_run(model, sample[i : i + 1]) for i in range(min(3, len(sample)))])
    if not _close(alone, answers[: len(alone)]):
        raise ModelRefusedError(
            "an input's answer depends on the other inputs of its batch; export the model in evaluation mode (model.eval())"
        )


def _run(model: onnx.ModelProto, x: FloatArray) -> FloatArray:
    try:
        session = open_session(model, threads=1)
        (value,) = session.run(None, {session.get_inputs()[0].name: x})
    except Exception as error:  # ORT's exceptions share no base but Exception
        raise ModelRefusedError(
            f"ONNX Runtime cannot run the model on a batch of {len(x)} (is its batch axis fixed? {DYNAMIC_SHAPES_HINT}): {_line(error)}"
        ) from error
    return np.asarray(value, dtype=np.float32)


def _close(a: FloatArray, b: FloatArray) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=LOGITS_RTOL * max(1.0, float(np.abs(b).max()))))


def _refuse_pickled(path: Path) -> None:
    """torch.export.load unpickles custom objects; such archives are not opened at all."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = [Path(name).name for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError) as error:
        raise InvalidArgumentError(f"model {path} is not a readable torch.export program: {error}") from error
    for member in members:
        if member.startswith(("custom_obj", "opaque_obj")):
            raise ModelRefusedError(f"model {path} holds a pickled object ({member}), which is never loaded")


@contextmanager
def _weights_only() -> Iterator[None]:
    """Make every torch.load inside refuse anything but tensors, whatever its caller asks for."""
    key = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes about optional packages and its own internals; failures still raise."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _shape_error(path: Path, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"data x does not fit {path}, or its batch axis is fixed ({DYNAMIC_SHAPES_HINT}): {_line(error)}"
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
