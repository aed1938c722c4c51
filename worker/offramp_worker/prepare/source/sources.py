"""From a model URI to ``backbone.onnx``: loading, exporting and checking the model as the user gave it.

Everything after this module works on the ONNX graph alone. Nothing is unpickled or evaluated: families read
safetensors, and of an archive of ``torch.export`` torch sees what :mod:`offramp_worker.prepare.exported` made of it.
Text models become graphs of one input, the token ids (:mod:`offramp_worker.prepare.source.tokens`).
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import onnx
from onnx.external_data_helper import load_external_data_for_tensor

from offramp_core.bundle import TensorSpec
from offramp_core.errors import InvalidArgumentError, ModelRefusedError, OfframpError
from offramp_core.scale import LOGITS, Scale
from offramp_core.task import Task, TaskSpec, task_of
from offramp_worker.bundle.graph import input_name, output_name
from offramp_worker.bundle.lengths import bucket_length, used_length
from offramp_worker.bundle.load import NUMPY_TYPES
from offramp_worker.bundle.tensors import external_tensors
from offramp_worker.devices import open_session
from offramp_worker.prepare.exported import checked_archive
from offramp_worker.prepare.heads.scales import add_logits
from offramp_worker.prepare.places.packing import pack_exits
from offramp_worker.prepare.source.data import FloatArray, InputArray, in_type
from offramp_worker.prepare.source.halves import HALF_RTOL, has_halves, in_single_precision
from offramp_worker.prepare.source.locations import FAMILY, model_file
from offramp_worker.prepare.source.task import FoundTask, add_column_axis, declared_task
from offramp_worker.prepare.source.tokens import (
    DEFAULT_PAD,
    IDS,
    MASK,
    TYPES,
    check_padding,
    derive_inputs,
    ids_input,
    ids_spec,
    takes_tokens,
    torch_inputs,
)

SAMPLE_ROWS = 16
LOGITS_RTOL = 1e-3  # of the largest logit; folding batch normalisation moves the last bits
MAX_INPUTS = 3  # ids, mask, token types
FIXED_WEIGHTS_VERSION = 4  # of the format: from it on a weight need not be an input
OLDEST_OPSET = 13  # whose ReduceSum and Unsqueeze read their axes as inputs, as the nodes added here have them
PROGRAM_TYPES = ("float32", "float16", "uint8")  # of a program's one input that is no token ids
# Of a model's one input that is no token ids: what the protocol calls it.
PLAIN = {onnx.TensorProto.FLOAT: "FP32", onnx.TensorProto.FLOAT16: "FP16", onnx.TensorProto.UINT8: "UINT8"}
DYNAMIC_SHAPES_HINT = 'torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))'


@dataclass(frozen=True, slots=True)
class Backbone:
    """The reference model as one ONNX graph with a dynamic batch axis, checked on sample inputs.

    ``program`` is what torch.export made of it, where torch had it.
    ``exits`` are tensors with logits of exits that the network brings with it. ``sep`` is the token id that ends each
    text of a pair. ``task`` is what the model does, ``scale`` that of its answers, ``found`` what says so, where it was
    loaded just now.
    """

    model: Any  # onnx.ModelProto
    name: str
    input: TensorSpec
    output: TensorSpec
    program: Any = None  # torch.export.ExportedProgram
    exits: tuple[str, ...] = ()
    sep: int | None = None
    found: FoundTask | None = None
    scale: Scale = LOGITS
    declared: TaskSpec | None = None

    @property
    def n_classes(self) -> int:
        """Width of the logits."""
        return self.output.shape[0]

    @property
    def task(self) -> Task:
        """How its outputs are read."""
        return task_of(self.declared, width=self.n_classes, scale=self.scale)


def load_backbone(
    uri: str,
    x: InputArray,
    *,
    pad: int | None = None,
    sep: int | None = None,
    own_exits: tuple[str, ...] = (),
    task: TaskSpec | None = None,
) -> Backbone:
    """Load a model and turn it into a checked ONNX graph.

    Parameters
    ----------
    uri : str
        ``family:NAME?weights=FILE.safetensors[&parameter=value]``, or the path or ``file://`` URI of a ``.pt2`` or an
        ``.onnx`` file.
    x : (N, ...) float32, float16 or uint8, or (N, length) int64 of token ids
        Inputs; the first 16 are run to check the model.
    pad : int, optional
        The token id that fills rows up; None: 0.
    sep : int, optional
        The token id that ends each text of a pair; a model that reads token types needs it.
    own_exits : tuple of str
        Outputs that are earlier exits of the network's own, in its order; all but the one that is served.
    task : TaskSpec, optional
        What the model does; None: the top label.

    Raises
    ------
    InvalidArgumentError
        The URI, a file it names, or the shape of the inputs is at fault.
    ModelRefusedError
        The model does another task, or has more than one input or one output besides its own exits, or its answers
        depend on the batch.
    """
    sample, pad = x[:SAMPLE_ROWS], DEFAULT_PAD if pad is None else pad
    program = None
    file = model_file(uri)
    if uri.startswith(FAMILY):
        model, program, name = _from_family(uri, sample, pad=pad, sep=sep)
    elif file.suffix == ".pt2":
        (model, program), name = _from_exported(_existing(file), sample, pad=pad, sep=sep), file.stem
    elif file.suffix == ".onnx":
        model, name = _from_onnx(_existing(file)), file.stem
    else:
        raise InvalidArgumentError(
            f"model {uri!r} is none of family:NAME?weights=FILE.safetensors, FILE.pt2 and FILE.onnx; "
            "other checkpoints: export them with torch.export.save or torch.onnx.export"
        )
    model = _in_single_precision(_normalised(model), sample)
    backbone = _checked(model, name=name, sample=sample, pad=pad, sep=sep, own_exits=own_exits, task=task)
    return replace(backbone, program=program, sep=sep)


def fitted_rows(x: InputArray, spec: TensorSpec) -> InputArray:
    """Data as the model's input takes it, in its type; token ids are filled up where their length is fixed."""
    if spec.pad is None:
        return in_type(x, NUMPY_TYPES[spec.datatype])
    x = x.astype(NUMPY_TYPES[spec.datatype], copy=False)
    return x if spec.varies else _with_length(x, spec.shape[0], pad=spec.pad)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InvalidArgumentError(f"model {path} does not exist or is not a file")
    return path


def _from_family(uri: str, sample: InputArray, *, pad: int, sep: int | None) -> tuple[onnx.ModelProto, Any, str]:
    import torch
    from safetensors.torch import load_file

    from offramp_worker.prepare.families import check_family

    name, _, query = uri.removeprefix(FAMILY).partition("?")
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    if not parameters.pop("weights", ""):
        raise InvalidArgumentError(f"model {uri!r} names no weights; write family:{name}?weights=FILE.safetensors")
    check_family(name, parameters)
    weights = model_file(uri)
    try:
        tensors = load_file(_existing(weights))
    except InvalidArgumentError:
        raise
    except Exception as error:  # the library raises types of its own, and others for values that torch does not know
        raise InvalidArgumentError(f"model weights {weights} are not a readable safetensors file: {error}") from error
    with torch.device("meta"):  # the shapes of a checkpoint decide how large a model is made: first one without memory
        _filled(name, parameters, tensors, weights)
    module = _filled(name, parameters, tensors, weights)
    return (*_export(module, sample, pad=pad, sep=sep), name)


def _filled(name: str, parameters: Mapping[str, str], tensors: Mapping[str, Any], weights: Path) -> Any:
    """A family's module with the weights of a checkpoint."""
    from offramp_worker.prepare.families import build_family, checkpoint_tensors

    try:
        module = build_family(name, parameters, tensors, folder=weights.parent)
        module.load_state_dict(checkpoint_tensors(tensors), assign=True)
    except OfframpError:
        raise
    except RuntimeError as error:
        first = str(error).partition("\n")[2].strip().partition("\n")[0]
        raise InvalidArgumentError(f"model weights {weights} do not fit family {name}: {first or error}") from error
    except Exception as error:  # shapes that contradict each other, or a config of other types
        raise InvalidArgumentError(
            f"model weights {weights} do not fit family {name}: {type(error).__name__}: {_line(error)}"
        ) from error
    return module


def _from_exported(path: Path, sample: InputArray, *, pad: int, sep: int | None) -> tuple[onnx.ModelProto, Any]:
    import torch

    with checked_archive(path) as archive, _weights_only():
        try:
            program = torch.export.load(archive)
        except Exception as error:  # torch raises whatever the broken member makes it raise
            raise InvalidArgumentError(
                f"model {path} is not a readable torch.export program: {_line(error)}"
            ) from error
    try:
        return _onnx_program(program, sample, pad=pad, sep=sep), program
    except OfframpError:
        raise
    except (AssertionError, RuntimeError) as error:
        raise _shape_error(path, error) from error
    except Exception as error:  # a program that contradicts itself makes torch raise anything
        raise ModelRefusedError(
            f"the program in {path} cannot be run or converted: {type(error).__name__}: {_line(error)}"
        ) from error


def _from_onnx(path: Path) -> onnx.ModelProto:
    try:
        model = onnx.load(path, load_external_data=False)
        _load_external(model, path)
        onnx.checker.check_model(model)
    except InvalidArgumentError:
        raise
    except Exception as error:  # protobuf's and onnx's errors share no base but Exception
        raise InvalidArgumentError(f"model {path} is not a valid ONNX file: {_line(error)}") from error
    _make_weights_constant(model)
    return model


def _make_weights_constant(model: onnx.ModelProto) -> None:
    """Before version 4 of the format every weight is an input too, which may be given another value: exits need them
    fixed, and who changes a weight's shape would have to change both."""
    weights = {tensor.name for tensor in model.graph.initializer}
    given = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(given)
    model.ir_version = max(model.ir_version, FIXED_WEIGHTS_VERSION)


def _load_external(model: onnx.ModelProto, path: Path) -> None:
    """Take in the weights that the model keeps in files beside it; no file elsewhere is read."""
    for place, tensor in external_tensors(model):
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        file = path.parent / location
        if not location or Path(location).name != location or file.is_symlink() or not file.is_file():
            raise InvalidArgumentError(
                f"model {path} keeps the weights of {place} in {location[:80]!r}; "
                "only plain files in the model's own folder are read: save it with the weights inside or beside it"
            )
        load_external_data_for_tensor(tensor, str(path.parent))
        tensor.data_location = onnx.TensorProto.DEFAULT
        del tensor.external_data[:]


def _export(module: Any, sample: InputArray, *, pad: int, sep: int | None) -> tuple[onnx.ModelProto, Any]:
    """Export a family's module, which takes images, or token ids, their mask and, where it is ``typed``, their
    types."""
    import torch

    module = module.eval()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=getattr(module, "longest", None))
    rows = torch.from_numpy(sample[:2] if sample.dtype.kind == "i" else in_type(sample[:2], np.float32))
    arguments: tuple[Any, ...] = (rows,)
    shapes: tuple[dict[int, Any], ...] = ({0: batch},)
    if getattr(module, "longest", 0):
        if sample.dtype.kind != "i" or sample.ndim != 2:
            raise InvalidArgumentError(
                f"data x is {sample.dtype} {list(sample.shape[1:])}; the model takes token ids [length]"
            )
        names = (IDS, MASK, TYPES) if getattr(module, "typed", False) else (IDS, MASK)
        arguments = tuple(torch.from_numpy(v) for v in torch_inputs(names, sample[:2], pad=pad, sep=sep))
        shapes = ({0: batch, 1: length},) * len(names)
    try:
        with torch.inference_mode():
            module(*arguments)
    except (RuntimeError, IndexError) as error:
        shape = list(sample.shape[1:])
        raise InvalidArgumentError(
            f"data x has rows of shape {shape}, which do not fit the model: {_line(error)}"
        ) from error
    with _quiet():
        program = torch.export.export(module, arguments, dynamic_shapes=shapes)
    return _onnx_program(program, sample, pad=pad, sep=sep), program


def _onnx_program(program: Any, sample: InputArray, *, pad: int, sep: int | None) -> onnx.ModelProto:
    """Convert an exported program and compare the graph's answers with PyTorch's."""
    import torch

    names = [str(name) for name in program.graph_signature.user_inputs]
    if len(names) > MAX_INPUTS:
        raise ModelRefusedError(
            f"the program has {len(names)} inputs; exits need one, or token ids with their mask and types"
        )
    values = _program_inputs(names, program, sample, pad=pad, sep=sep)
    reference = _answers(program, values)
    sources = names if len(names) > 1 else [IDS] if values[0].dtype.kind == "i" else ["input"]
    answers = [*(f"exit{number}" for number in range(1, len(reference))), "logits"]
    with _quiet():
        try:
            converted = torch.onnx.export(
                program, dynamo=True, input_names=sources, output_names=answers, verbose=False
            )
        except torch.onnx.OnnxExporterError as error:
            raise ModelRefusedError(f"the model cannot be expressed in ONNX: {_line(error)}") from error
    assert converted is not None
    model = converted.model_proto
    outputs = _run_all(model, dict(zip((i.name for i in model.graph.input), values, strict=True)))
    rtol = HALF_RTOL if has_halves(model) else LOGITS_RTOL
    for got, expected in zip(outputs, reference, strict=True):
        if not _close(got, expected, rtol=rtol):
            gap = float(np.abs(got - expected).max())
            raise ModelRefusedError(
                f"the exported graph differs from the PyTorch model by up to {gap:.3g} in its logits"
            )
    return model


def _program_inputs(
    names: list[str], program: Any, sample: InputArray, *, pad: int, sep: int | None
) -> list[InputArray]:
    """The sample as the program takes it, in the order of ``names``."""
    alone = len(names) == 1
    ids = names[0] if alone else ids_input(names)
    declared = next(node.meta["val"] for node in program.graph.nodes if node.name == ids)
    kind = str(declared.dtype).removeprefix("torch.")
    if alone and kind in PROGRAM_TYPES:
        return [in_type(sample, kind)]
    if (alone and sample.dtype.kind != "i") or declared.dtype.is_floating_point:
        return [sample]
    length = declared.shape[1] if declared.ndim == 2 else None
    width = length if isinstance(length, int) else sample.shape[-1]
    rows = _with_length(sample, width, pad=pad).astype(kind)
    return torch_inputs(names, rows, pad=pad, sep=sep)


def _answers(program: Any, values: list[InputArray]) -> list[FloatArray]:
    """What the program answers: one tensor of logits, or those of a network that brings its own exits."""
    import torch
    from torch.utils._pytree import tree_unflatten

    args, kwargs = tree_unflatten([torch.from_numpy(value) for value in values], program.call_spec.in_spec)
    with torch.inference_mode():
        value = program.module()(*args, **kwargs)
    tensors = list(value) if isinstance(value, (tuple, list)) else [value]
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        raise ModelRefusedError(
            f"the model returns a {type(value).__name__}; it must return a tensor of logits [batch, classes], or one "
            "for each exit"
        )
    return [np.asarray(tensor.detach().numpy(), dtype=np.float32) for tensor in tensors]


def _normalised(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy without notes (source lines, folders of the exporting machine), so that its digest names the model
    only."""
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
    _share_concatenations(graph)
    return clean


def _share_concatenations(graph: onnx.GraphProto) -> None:
    """Let each concatenation begin with an earlier one of its own first parts, where there is one; no value changes.

    A dense block concatenates all layers so far anew for every layer. Written this way, one tensor stands between
    two layers, where an exit can be attached, and as many bytes are copied as before.
    """
    made: dict[tuple[str, ...], str] = {}
    for node in graph.node:
        if node.op_type != "Concat" or len(node.attribute) != 1:
            continue
        axis, parts = str(node.attribute[0].i), tuple(node.input)
        known = next((n for n in range(len(parts) - 1, 1, -1) if (axis, *parts[:n]) in made), 0)
        if known:
            node.input[:known] = [made[axis, *parts[:known]]]
        made[axis, *parts] = node.output[0]


def _checked(
    model: onnx.ModelProto,
    *,
    name: str,
    sample: InputArray,
    pad: int,
    sep: int | None,
    own_exits: tuple[str, ...],
    task: TaskSpec | None,
) -> Backbone:
    inputs = list(model.graph.input)
    tokens = takes_tokens(inputs)
    if (len(inputs) != 1 and not tokens) or not model.graph.output:
        raise ModelRefusedError(
            f"the model has {len(inputs)} inputs and {len(model.graph.output)} outputs; exits need a classifier with "
            "one input "
            "(or token ids with their mask) and one output of class scores"
        )
    if tokens:
        if sample.dtype.kind != "i":
            raise InvalidArgumentError(f"data x holds {sample.dtype}; the model takes token ids")
        spec, sample = _token_input(model, sample, pad=pad, sep=sep)
    else:
        spec, sample = _plain_input(inputs[0], sample)
    _free_batch_axis(model)
    exits = _take_exits_off(model, sample, own_exits)
    if not tokens:
        pack_exits(model, exits, sample[:2])
    answers = _run(model, sample)
    if not np.isfinite(answers).all():
        raise ModelRefusedError("the model answers sample inputs with NaN or infinity")
    if task is not None and answers.shape == (len(sample),):
        add_column_axis(model)
        answers = answers[:, None]
    found = declared_task(model, output_name(model), answers, n_rows=len(sample), spec=task)
    _check_alone(model, answers, sample)
    if tokens:
        check_padding(model, spec, sample, run=_run, close=_close)
    output = TensorSpec(output_name(model), "FP32", (int(answers.shape[1]),))
    return Backbone(
        model=model, name=name, input=spec, output=output, exits=exits, found=found, scale=found.scale, declared=task
    )


def _plain_input(value: onnx.ValueInfoProto, sample: InputArray) -> tuple[TensorSpec, InputArray]:
    """What an input of numbers is like, and the sample in its type."""
    kind = value.type.tensor_type.elem_type
    if kind not in PLAIN:
        found = onnx.TensorProto.DataType.Name(kind).lower() if kind else "no tensor"
        raise ModelRefusedError(
            f"input {value.name!r} is {found}; supported are float32, float16, uint8 and token ids (int64)"
        )
    _check_shape(value, sample)
    spec = TensorSpec(value.name, PLAIN[kind], tuple(int(d) for d in sample.shape[1:]))
    return spec, in_type(sample, NUMPY_TYPES[spec.datatype])


def _in_single_precision(model: onnx.ModelProto, sample: InputArray) -> onnx.ModelProto:
    """A model with float16 inside, computed in float32; its input keeps its type.

    Raises
    ------
    ModelRefusedError
        It does not answer as before.
    """
    if not has_halves(model):
        return model
    single = in_single_precision(model)
    inputs = model.graph.input
    if len(inputs) == 1 and inputs[0].type.tensor_type.elem_type in PLAIN:
        _, rows = _plain_input(inputs[0], sample[:1])
        answers = (_run_all(each, {inputs[0].name: rows}) for each in (single, model))
        for got, expected in zip(*answers, strict=True):
            if not _close(got, expected, rtol=HALF_RTOL):
                raise ModelRefusedError(
                    "computed in float32 the model answers otherwise than in float16, by up to "
                    f"{float(np.abs(got - expected).max()):.3g}; export it in float32"
                )
    return single


def _take_exits_off(model: onnx.ModelProto, sample: InputArray, own_exits: tuple[str, ...]) -> tuple[str, ...]:
    """Leave the graph one output: the exits of the network's own stay inside it, as tensors with logits that are
    returned."""
    (values,) = _outputs(model, {input_name(model): sample})
    answers = {output.name: value for output, value in zip(model.graph.output, values, strict=True)}
    found = {name: _described(value) for name, value in answers.items()}
    for name in own_exits:
        if name not in found:
            raise InvalidArgumentError(f"own-exits names {name!r}; the model's outputs are {_listing(found)}")
        if own_exits.count(name) > 1:
            raise InvalidArgumentError(f"own-exits names {name!r} twice")
    served = {name: shape for name, shape in found.items() if name not in own_exits}
    if own_exits and len(served) != 1:
        left = f"{len(served)} outputs: {_listing(served)}" if served else "no output"
        raise InvalidArgumentError(f"own-exits leaves {left}; name all outputs but the one whose answers are served")
    if len(served) > 1:
        raise ModelRefusedError(_several_outputs(model, found))
    ((last, shape),) = served.items()
    for name in own_exits:
        if found[name] != shape:
            raise ModelRefusedError(
                f"output {name!r} is {found[name]}, {last!r} is {shape}; exits of a network's own must score the "
                "classes "
                "of its answer, [batch, classes]"
            )
    for output in [value for value in model.graph.output if value.name in own_exits]:
        model.graph.output.remove(output)
    tasks = [declared_task(model, name, answers[name], n_rows=len(sample)) for name in own_exits]
    return tuple(add_logits(model, task.output, task.scale) for task in tasks)


def _several_outputs(model: onnx.ModelProto, found: Mapping[str, str]) -> str:
    """Why a model of several outputs is refused: nothing in a graph tells exits of one task from the answers to two."""
    *others, last = found
    extract = f"onnx.utils.extract_model(FILE, NEW, [{input_name(model)!r}], [{last!r}])"
    exits = f"; if the others are earlier exits of the same task, name them: --own-exits {','.join(others)}"
    return (
        f"the model has {len(found)} outputs: {_listing(found)}; a bundle serves one of them. Export the model with "
        "that one alone "
        f"(ONNX: {extract}; PyTorch: a module whose forward returns it and nothing else)"
        + (exits if len(set(found.values())) == 1 else "")
    )


def _described(value: Any) -> str:
    """What an output is, as far as its kind says: a shape, and the type where it holds no floating-point numbers."""
    if not isinstance(value, np.ndarray):
        return f"a {type(value).__name__}"
    kind = "" if value.dtype.kind == "f" else f"{'text' if value.dtype.kind == 'O' else value.dtype} "
    return f"{kind}{list(value.shape)}"


def _listing(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name!r} {shape}" for name, shape in found.items())


def _token_input(
    model: onnx.ModelProto, sample: InputArray, *, pad: int, sep: int | None
) -> tuple[TensorSpec, InputArray]:
    """Make the ids the graph's only input; what they are like, and the sample as the graph takes it."""
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset < OLDEST_OPSET:
        raise ModelRefusedError(
            f"the ONNX file has opset {opset}; text models need at least {OLDEST_OPSET}: export it again"
        )
    derive_inputs(model, pad=pad, sep=sep)
    (value,) = [v for v in model.graph.input if v.name == input_name(model)]
    _free_batch_axis(model)
    dims = value.type.tensor_type.shape.dim
    if len(dims) == 2 and dims[1].HasField("dim_value"):
        sample = _with_length(sample, int(dims[1].dim_value), pad=pad)
    else:
        width = bucket_length(used_length(sample, pad=pad), longest=sample.shape[1])
        sample = np.ascontiguousarray(sample[:, :width])
    spec = ids_spec(model, value, sample, pad=pad, run=_run)
    if sep is not None and not 0 <= sep < spec.values:
        raise InvalidArgumentError(f"sep-id is {sep}; it must lie in [0, {spec.values - 1}], the model's vocabulary")
    return spec, sample.astype(NUMPY_TYPES[spec.datatype], copy=False)


def _with_length(x: InputArray, length: int, *, pad: int) -> InputArray:
    """Rows of token ids cut or filled up to ``length``; only padding is cut off."""
    if x.ndim != 2 or used_length(x, pad=pad) > length:
        raise InvalidArgumentError(
            f"data x has rows of shape {list(x.shape[1:])}; the model takes [{length}] token ids; shorten them with "
            f"--max-tokens {length}"
        )
    short = x[:, :length]
    return np.pad(short, ((0, 0), (0, length - short.shape[1])), constant_values=pad)


def _check_shape(source: onnx.ValueInfoProto, sample: InputArray) -> None:
    """Check the declared input shape against the data."""
    declared = source.type.tensor_type.shape.dim
    sizes = [dim.dim_value if dim.HasField("dim_value") else 0 for dim in declared]
    fits = len(sizes) == sample.ndim and all(
        want in (0, got) for want, got in zip(sizes[1:], sample.shape[1:], strict=True)
    )
    if sizes and not fits:
        wanted = [size or "any" for size in sizes[1:]]
        raise InvalidArgumentError(f"data x has rows of shape {list(sample.shape[1:])}; the model takes {wanted}")


def _free_batch_axis(model: onnx.ModelProto) -> None:
    """Make the batch axis dynamic in the declarations of inputs and outputs."""
    for value in (*model.graph.input, *model.graph.output):
        if len(value.type.tensor_type.shape.dim):
            value.type.tensor_type.shape.dim[0].Clear()
            value.type.tensor_type.shape.dim[0].dim_param = "batch"


def _check_alone(model: onnx.ModelProto, answers: FloatArray, sample: InputArray) -> None:
    name = input_name(model)
    rows = [{name: sample[i : i + 1]} for i in range(min(3, len(sample)))]
    alone = np.concatenate([_scores(model, values)[0] for values in _outputs(model, *rows)])
    if not _close(alone, answers[: len(alone)]):
        raise ModelRefusedError(
            "an input's answer depends on the other inputs of its batch; export the model in evaluation mode "
            "(model.eval())"
        )


def _run(model: onnx.ModelProto, x: InputArray) -> FloatArray:
    (value,) = _run_all(model, {input_name(model): x})
    return value


def _run_all(model: onnx.ModelProto, values: Mapping[str, InputArray]) -> list[FloatArray]:
    (answered,) = _outputs(model, values)
    return _scores(model, answered)


def _scores(model: onnx.ModelProto, answered: Sequence[Any]) -> list[FloatArray]:
    """What the model's outputs hold, where all of them are scores."""
    found = dict(zip((output.name for output in model.graph.output), answered, strict=True))
    for name, value in found.items():
        if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
            raise ModelRefusedError(
                f"output {name!r} is {_described(value)}, not scores; exits need logits or probabilities in floating "
                "point, "
                "[batch, classes]: export the model with that tensor as its one output"
            )
    return [np.asarray(value, dtype=np.float32) for value in found.values()]


def _outputs(model: onnx.ModelProto, *batches: Mapping[str, InputArray]) -> list[list[Any]]:
    """What ONNX Runtime answers to each batch: arrays, or the lists and maps of classical models."""
    rows, answers = len(next(iter(batches[0].values()))), []
    try:
        session = open_session(model, threads=1)
        for values in batches:
            rows = len(next(iter(values.values())))
            answers.append(list(session.run(None, dict(values))))
    except Exception as error:  # ORT's exceptions share no base but Exception
        raise ModelRefusedError(
            f"ONNX Runtime cannot run the model on a batch of {rows} (is its batch axis fixed? "
            f"{DYNAMIC_SHAPES_HINT}): {_line(error)}"
        ) from error
    return answers


def _close(a: FloatArray, b: FloatArray, *, rtol: float = LOGITS_RTOL) -> bool:
    return a.shape == b.shape and bool(np.allclose(a, b, rtol=0, atol=rtol * max(1.0, float(np.abs(b).max()))))


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
