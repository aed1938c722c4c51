"""The exit bundle: what ``offramp prepare`` writes and a worker loads. No member is ever unpickled.

    manifest.json       this module's :class:`Manifest`, with a SHA-256 of every other file
    backbone.onnx       the model as the user gave it (the reference); its tensors are named
    ramps.safetensors   per ramp ``<id>/<parameter>`` tensors, and ``<id>/quantiles``
    (see :mod:`offramp_core.uncertainty`) records.npz         bootstrap records (a records file,
    see :mod:`offramp_core.records`) of inputs that trained no head profile.json        this module's :class:`Profile`:
    seconds per segment, ramp and regrouping, by batch size probe.npz           ``x`` [P, ...] and ``logits`` [P, C]:
    inputs with the reference's outputs; a worker checks itself on them backbone.<p>.onnx   per further precision p,
    such as int8: the same backbone in a cheaper form; tensors that ramps read keep their names and
                        are float32
    ramp-<id>.onnx      per ramp of head ``model``: a small model at the input, whose one output is the logits
    tokenizer.json      where clients send texts: what divides them into tokens

Two digests name the content. ``backbone_digest`` is the SHA-256 of ``backbone.onnx``, and of the steps before it where
clients send images or texts: changing it is a model rollout. ``ramp_set_digest`` is the SHA-256 of the canonical JSON
of the ramp specs and the digests of ``ramps.safetensors``, of the backbone at other precisions and of the models at the
input: changing it is a canary.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from offramp_core.columns import FINAL_HEAD, final_id
from offramp_core.plan import canonical_json
from offramp_core.precision import EXACT, Precision
from offramp_core.protocol import RampInfo
from offramp_core.scale import Scale
from offramp_core.task import LABEL, Task, TaskSpec, task_of

SCHEMA_VERSION = 1
TASK_SCHEMA_VERSION = 2  # of a bundle whose task is not the top label: workers of before would serve it as if it were
RAMP_ID = re.compile(r"^([a-z0-9]+/)?[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")  # as the CRDs have it
MAX_RAMP_ID = 63
BACKBONE_FILE = "backbone.onnx"
RAMPS_FILE = "ramps.safetensors"
RECORDS_FILE = "records.npz"
PROFILE_FILE = "profile.json"
PROBE_FILE = "probe.npz"
MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
BYTES = "BYTES"  # the protocol's datatype of strings

HeadKind = str  # the worker knows them: an entry each in its `bundle/heads.py`, and "model"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One model input or output, batch axis left out. ``datatype`` is Open Inference Protocol's (FP32, ...).

    Inputs of tokens say more. An axis of -1 varies from request to request, up to ``longest``; rows of one batch are
    filled up with ``pad`` to a common length, which changes no answer. Values lie in [0, ``values``), the embedding
    table's rows; a value outside would fail the whole batch.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    pad: int | None = None
    longest: int = 0
    values: int = 0

    @property
    def varies(self) -> bool:
        """Whether rows may differ in length."""
        return -1 in self.shape

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a row of this shape is taken."""
        if self.datatype == BYTES:  # a row is one string, or so many in a line
            return shape in ((), *((n,) for n in range(1, self.longest + 1)))
        sizes = [(self.longest if want < 0 else want, want < 0) for want in self.shape]
        return len(shape) == len(sizes) and all(
            1 <= got <= size if varies else got == size for got, (size, varies) in zip(shape, sizes, strict=True)
        )


@dataclass(frozen=True, slots=True)
class ImageSteps:
    """From a JPEG or PNG to a row of the model's input, uint8; scale and mean are part of the graph.

    ``resize`` is the shorter side, or [height, width]; ``crop`` [height, width] is cut out of the middle afterwards.
    Either may be empty, not both. ``resample`` is Pillow's filter. ``mode`` is RGB or L (gray).
    """

    resize: tuple[int, ...] = ()
    crop: tuple[int, ...] = ()
    resample: Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"] = "bilinear"
    mode: Literal["RGB", "L"] = "RGB"
    channels_first: bool = True


@dataclass(frozen=True, slots=True)
class TextSteps:
    """From a text, or a pair of texts, to token ids by the bundle's ``tokenizer.json``; longer ones are cut to
    ``tokens``."""

    tokens: int


@dataclass(frozen=True, slots=True)
class Preprocess:
    """What clients send in the place of the model's input, of datatype BYTES: encoded images or texts."""

    image: ImageSteps | None = None
    text: TextSteps | None = None

    @property
    def input(self) -> TensorSpec:
        """The input that clients see: a string for each row, or for texts that come in pairs two."""
        return TensorSpec("image" if self.image is not None else "text", BYTES, (), longest=1 if self.image else 2)


@dataclass(frozen=True, slots=True)
class OutputNames:
    """What replies call the outputs: the ``usual`` ones come when a request asks for none by name, the model's ``own``
    name may be asked for as well."""

    usual: tuple[str, ...]
    own: str


TOP_LABEL = OutputNames(("logits", LABEL), "logits")


@dataclass(frozen=True, slots=True)
class RampSpec:
    """One candidate exit.

    ``tensor`` is the backbone's cut tensor that feeds it, ``position`` the index of its place in network order
    (several ramps may share a place), ``depth`` the share of the backbone's time up to it, in [0, 1].
    ``head`` is pooled-linear (global average pooling and one linear layer), grid-linear (4x4 average and maximum
    pooling and one linear layer), grid-mlp (the same pooling and an MLP with one hidden layer), conv (three small
    convolutions before the same pooling and one linear layer), mean-linear or mean-mlp (over the mean of a sequence's
    tokens), own (an exit of the network itself: ``output`` is the tensor with its logits) or model (a whole small model
    at the input, in a file of its own: :func:`side_model_file`). ``hidden`` is the width of the hidden layer or of the
    convolutions. ``precision`` names the graph that holds ``tensor``; empty is fp32, or all of them where ``tensor`` is
    the model's input. A ramp ``int8/<id>`` may use the weights of ``<id>``: what ``ramps.safetensors`` does not hold
    for it is taken from there.
    """

    id: str
    tensor: str
    position: int
    depth: float
    head: HeadKind
    channels: int
    hidden: int = 0
    precision: Precision | Literal[""] = ""
    output: str = ""


@dataclass(frozen=True, slots=True)
class PrecisionSpec:
    """The backbone at one precision: its graph in ``file``, made by ``method`` (static-percentile, static-entropy,
    dynamic, ...)."""

    name: Precision
    file: str
    method: str = ""

    @property
    def is_reference(self) -> bool:
        """Whether it is the model as the user gave it, which says what the right answers are."""
        return self.name == EXACT


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle says about itself. ``files`` maps every other file to its SHA-256 (hex).

    ``ramps`` are in the order of records: those at the input, those of the fp32 graph, those of each other precision as
    ``precisions`` has them; within these by position. ``scale`` is that of the model's answers, in which its ramps
    answer too. It changes no label and no decision and is in no digest; bundles of before there was one have none, and
    their ramps answer with logits. ``n_classes`` is the width of the output, whatever ``task`` says that it means; None
    is the top label.
    """

    schema_version: int
    name: str
    backbone_digest: str
    ramp_set_digest: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    n_classes: int
    ramps: tuple[RampSpec, ...]
    files: dict[str, str]
    source: str = ""
    data: dict[str, Any] | None = None
    precisions: tuple[PrecisionSpec, ...] = ()
    scale: Scale | None = None
    task: TaskSpec | None = None
    preprocess: Preprocess | None = None

    @property
    def asks_for(self) -> tuple[TensorSpec, ...]:
        """The inputs as clients send them."""
        return self.inputs if self.preprocess is None else (self.preprocess.input,)

    @property
    def does(self) -> Task:
        """How its outputs are read."""
        return task_of(self.task, width=self.n_classes, scale=self.scale)

    @property
    def replies(self) -> tuple[TensorSpec, ...]:
        """The outputs that a reply has when it asks for none by name. Top labels come beside ``logits``, of any other
        task beside what the model itself calls its output."""
        shape = self.does.label_shape
        name = "logits" if self.task is None else self.outputs[0].name
        own = TensorSpec(name, "FP32", (self.n_classes,))
        return (own,) if shape is None else (own, TensorSpec(LABEL, "INT64", shape))

    @property
    def output_names(self) -> OutputNames:
        """What a request may call the outputs."""
        return OutputNames(tuple(spec.name for spec in self.replies), self.outputs[0].name)

    def precision_of(self, ramp: RampSpec) -> Precision | Literal[""]:
        """Which graph feeds a ramp; empty where it reads the model's input."""
        return ramp.precision or ("" if ramp.tensor == self.inputs[0].name else EXACT)

    @property
    def backbones(self) -> tuple[PrecisionSpec, ...]:
        """Every precision of the backbone in the order of records, the reference first. What each costs stands in the
        profile."""
        return (PrecisionSpec(EXACT, BACKBONE_FILE), *self.precisions)

    def file_of(self, precision: Precision) -> str:
        """Name of the file with the backbone at a precision of this bundle."""
        return next(spec.file for spec in self.backbones if spec.name == precision)

    @property
    def columns(self) -> tuple[RampInfo, ...]:
        """The columns of records: all ramps, and behind those of each other precision what its whole backbone
        answers."""
        of = [(self.precision_of(r), r) for r in self.ramps]
        columns = [RampInfo(r.id, r.position, r.depth, r.head, p) for p, r in of if p in ("", EXACT)]
        end = 1 + max((r.position for r in self.ramps), default=-1)
        for spec in self.precisions:
            columns += [RampInfo(r.id, r.position, r.depth, r.head, p) for p, r in of if p == spec.name]
            columns.append(RampInfo(final_id(spec.name), end, 1.0, FINAL_HEAD, spec.name))
        return tuple(columns)


@dataclass(frozen=True, slots=True)
class ChainProfile:
    """Seconds of another precision's chain at one batch size.

    Its R' ramps are the input ramps and then its own; ``segment_seconds`` has R' + 1 entries, the last one runs to its
    output.
    """

    segment_seconds: tuple[float, ...]
    ramp_seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatchProfile:
    """Measured seconds at one batch size, in the units of a records file.

    ``segment_seconds`` has one entry more than there are ramps: entry j is the backbone between ramp j-1 and
    ramp j (0 where they share a place), the last one runs to the output. They price the input ramps and those of the
    fp32 graph; ``precisions`` prices the chains of the others. ``exact_seconds`` is the whole fp32 backbone in one
    piece, which is what exits-off runs.
    """

    batch_size: int
    exact_seconds: float
    segment_seconds: tuple[float, ...]
    ramp_seconds: tuple[float, ...]
    regroup_seconds: float
    precisions: dict[str, ChainProfile] = field(default_factory=dict)

    @property
    def chain_seconds(self) -> float:
        """The backbone of this chain without ramps."""
        return sum(self.segment_seconds)


@dataclass(frozen=True, slots=True)
class Profile:
    """Profiles by rising batch size, and the executor they were measured with.

    ``executors`` tells how long the whole backbone takes on others: executor to batch size to seconds. For people;
    nothing decides by it.
    """

    executor: str
    threads: int
    batches: tuple[BatchProfile, ...]
    executors: dict[str, dict[str, float]] = field(default_factory=dict)

    def at(self, batch_size: int) -> BatchProfile:
        """The profile of the smallest measured size that holds ``batch_size``, else of the largest."""
        for batch in self.batches:
            if batch.batch_size >= batch_size:
                return batch
        return self.batches[-1]

    def of(self, precision: Precision) -> Profile:
        """The profile of one chain, priced like any other; ``exact_seconds`` stays that of the fp32 backbone."""
        if precision == EXACT:
            return replace(self, batches=tuple(replace(b, precisions={}) for b in self.batches))
        chains = [(b, b.precisions[precision]) for b in self.batches]
        return replace(
            self,
            batches=tuple(
                replace(b, segment_seconds=c.segment_seconds, ramp_seconds=c.ramp_seconds, precisions={})
                for b, c in chains
            ),
        )


def side_model_file(ramp_id: str) -> str:
    """Name of the bundle's file with the model of a ramp of head ``model``."""
    return f"ramp-{ramp_id}.onnx"


def backbone_digest(files: Mapping[str, str], preprocess: Preprocess | None = None) -> str:
    """Digest of a model: of its graph, and of the steps before it where there are any. ``sha256:`` and 64 hex digits.

    ``files`` maps the bundle's files to their SHA-256 (hex).
    """
    if preprocess is None:
        return "sha256:" + files[BACKBONE_FILE]
    content: list[Any] = [files[BACKBONE_FILE], asdict(preprocess)]
    if preprocess.text is not None:
        content.append(files[TOKENIZER_FILE])
    return "sha256:" + hashlib.sha256(canonical_json(content)).hexdigest()


def ramp_set_digest(
    ramps: tuple[RampSpec, ...],
    files: Mapping[str, str],
    precisions: tuple[PrecisionSpec, ...] = (),
    task: TaskSpec | None = None,
) -> str:
    """Digest of a ramp set: specs, weights, models at the input, other precisions and the task. ``sha256:`` and 64 hex
    digits.

    ``files`` maps the bundle's files to their SHA-256 (hex). Without models at the input, other precisions and another
    task than the top label it is what it was before there were any.
    """
    specs = [_digested(ramp) for ramp in ramps]
    content: list[Any] = [specs, files[RAMPS_FILE]]
    models = {r.id: files[side_model_file(r.id)] for r in ramps if r.head == "model"}
    if models or precisions:
        content.append({"models": models, "precisions": [[p.name, files[p.file]] for p in precisions]})
    if task is not None:
        content.append({"task": asdict(task)})
    return "sha256:" + hashlib.sha256(canonical_json(content)).hexdigest()


def _digested(ramp: RampSpec) -> dict[str, Any]:
    """What says what a ramp computes; fields added later count where they differ from their default."""
    spec: dict[str, Any] = {
        "id": ramp.id,
        "tensor": ramp.tensor,
        "position": ramp.position,
        "head": ramp.head,
        "channels": ramp.channels,
        "hidden": ramp.hidden,
    }
    later = {"precision": ramp.precision, "output": ramp.output}
    return spec | {name: value for name, value in later.items() if value}


def profile_arrays(profile: Profile) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """The per-batch cost arrays of a records file: ``batch_size`` [B], ``segment_seconds`` [B, R+1], ...

    Another precision's chain has ``<precision>_segment_seconds`` and ``<precision>_ramp_seconds``.
    """
    arrays = {
        "batch_size": np.array([b.batch_size for b in profile.batches], dtype=np.float64),
        "segment_seconds": np.array([b.segment_seconds for b in profile.batches], dtype=np.float64),
        "ramp_seconds": np.array([b.ramp_seconds for b in profile.batches], dtype=np.float64),
        "regroup_seconds": np.array([b.regroup_seconds for b in profile.batches], dtype=np.float64),
    }
    for name in profile.batches[0].precisions:
        chains = [b.precisions[name] for b in profile.batches]
        arrays[f"{name}_segment_seconds"] = np.array([c.segment_seconds for c in chains], dtype=np.float64)
        arrays[f"{name}_ramp_seconds"] = np.array([c.ramp_seconds for c in chains], dtype=np.float64)
    return arrays


def column_arrays(columns: tuple[RampInfo, ...]) -> dict[str, np.ndarray[Any, np.dtype[np.str_]]]:
    """The arrays of a records file that name its columns: ``ramp_id`` and ``ramp_precision`` [R], text."""
    return {
        "ramp_id": np.array([c.id for c in columns], dtype=np.str_),
        "ramp_precision": np.array([c.precision for c in columns], dtype=np.str_),
    }
