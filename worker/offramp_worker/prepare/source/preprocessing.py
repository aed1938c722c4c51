"""The steps before a model, as its author wrote them down: transformers' ``preprocessor_config.json``.

Decoding, resizing and cropping are done by workers (:mod:`offramp_worker.preprocess.images`). Scale, mean and deviation
become the first operators of the graph, so that pixels of eight bits are what batches, caches and captures hold, and
every executor computes the rest alike. What the file says and is not understood is refused: a step that is left out
silently makes a worse model of a good one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper, numpy_helper

from offramp_core.bundle import ImageSteps, Preprocess, TensorSpec, TextSteps
from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_worker.bundle.graph import input_name
from offramp_worker.documents import parse_document
from offramp_worker.prepare.source.data import TEXT_SUFFIXES, FloatArray, InputArray, image_files
from offramp_worker.prepare.source.halves import read_instead
from offramp_worker.prepare.source.locations import local_path, model_file
from offramp_worker.prepare.source.sources import Backbone
from offramp_worker.preprocess.images import RESAMPLES, check_steps, decoded
from offramp_worker.preprocess.texts import TextReader

if TYPE_CHECKING:
    from offramp_worker.prepare.pipeline import PrepareRequest

PREPROCESSOR_FILE = "preprocessor_config.json"
MAX_CONFIG_BYTES = 1024 * 1024
RGB_MAX = 255.0
LARGEST = float(np.finfo(np.float32).max)  # what graphs compute in
#: Of transformers' fields: what is read, and what changes no pixel.
READ = frozenset(
    {
        *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"),
        *("do_normalize", "image_mean", "image_std", "do_convert_rgb", "data_format"),
    }
)
IDLE = frozenset(
    {
        *("image_processor_type", "feature_extractor_type", "processor_class", "return_tensors", "input_data_format"),
        *("_valid_processor_keys", "default_to_square", "device", "disable_grouping"),
    }
)


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the graph does to pixels first: ``factor`` and ``shift`` for each channel, in float32."""

    factor: tuple[float, ...]
    shift: tuple[float, ...]
    channels_first: bool

    def of(self, pixels: InputArray) -> FloatArray:
        """Rows (n, ...) as the model takes them."""
        scaled: FloatArray = pixels.astype(np.float32) * self._shaped(self.factor) + self._shaped(self.shift)
        return scaled

    def before(self, backbone: Backbone) -> Backbone:
        """The model behind the scaling; its input is pixels."""
        model = onnx.ModelProto()
        model.CopyFrom(backbone.model)
        entry, scaled = input_name(model), f"{input_name(model)}/scaled"
        (value,) = [each for each in model.graph.input if each.name == entry]
        kind = value.type.tensor_type.elem_type
        read_instead(model.graph, entry, scaled)
        names = {part: f"{entry}/{part}" for part in ("float", "factor", "shift")}
        nodes = [
            helper.make_node("Cast", [entry], [names["float"]], to=onnx.TensorProto.FLOAT),
            helper.make_node("Mul", [names["float"], names["factor"]], [f"{entry}/larger"]),
            helper.make_node("Add", [f"{entry}/larger", names["shift"]], [f"{entry}/moved"]),
            helper.make_node("Cast", [f"{entry}/moved"], [scaled], to=kind),
        ]
        rest = list(model.graph.node)
        del model.graph.node[:]
        model.graph.node.extend([*nodes, *rest])
        model.graph.initializer.extend(
            numpy_helper.from_array(self._shaped(values), names[part])
            for part, values in (("factor", self.factor), ("shift", self.shift))
        )
        value.type.tensor_type.elem_type = onnx.TensorProto.UINT8
        spec = replace(backbone.input, datatype="UINT8")
        return replace(backbone, model=model, input=spec, program=None)

    def _shaped(self, values: tuple[float, ...]) -> FloatArray:
        shape = (len(values), 1, 1) if self.channels_first else (len(values),)
        return np.array(values, dtype=np.float32).reshape(shape)


@dataclass(frozen=True, slots=True)
class ImageReader:
    """How images become rows. ``scaling`` is None where the model takes pixels."""

    steps: ImageSteps
    scaling: Scaling | None

    def read(self, uri: str) -> npt.NDArray[np.uint8]:
        """The images of a folder in order of name, as workers decode them.

        Raises
        ------
        InvalidArgumentError
            Names the file.
        """
        path = local_path(uri, field="data")
        if not path.is_dir():
            raise InvalidArgumentError(f"data {uri} is no folder; --encoded takes images as clients send them")
        rows = []
        for file in image_files(path):
            try:
                with file.open("rb") as content:
                    rows.append(decoded(content, self.steps))
            except (OSError, ValueError) as error:
                raise InvalidArgumentError(f"data {file} {error}") from error
        return np.stack(rows)


@dataclass(frozen=True, slots=True)
class StepsBefore:
    """What goes into the bundle: how images are read, or the bytes of a tokenizer, how many ids it has, and how many
    tokens of a text are kept."""

    images: ImageReader | None = None
    tokenizer: bytes = b""
    ids: int = 0
    tokens: int = 0

    @property
    def scaling(self) -> Scaling | None:
        return self.images.scaling if self.images is not None else None

    def check(self, spec: TensorSpec) -> None:
        """Raise InvalidArgumentError where texts become ids that the model's input does not take."""
        if self.images is None and self.ids > spec.values:
            raise InvalidArgumentError(f"the tokenizer has ids up to {self.ids - 1}; the model knows {spec.values}")

    def declared(self, spec: TensorSpec) -> Preprocess:
        """The steps as the manifest has them; ``spec`` is the model's input."""
        if self.images is not None:
            return Preprocess(image=self.images.steps)
        return Preprocess(text=TextSteps(min(self.tokens, spec.longest)))


def steps_before(request: PrepareRequest, tokenizer: Path | None, texts: TextReader | None) -> StepsBefore:
    """The steps of a request whose clients send what its data holds.

    Raises
    ------
    InvalidArgumentError
        The data is neither images nor texts, or what reads them is missing.
    """
    path = local_path(request.data, field="data")
    if path.is_dir():
        return StepsBefore(images=load_preprocessor(find_preprocessor(request.model, request.preprocessor)))
    if path.suffix not in TEXT_SUFFIXES:
        raise InvalidArgumentError(
            f"data {request.data} is neither a folder of images nor JSON lines of text, which --encoded takes as "
            "clients send them"
        )
    if tokenizer is None or texts is None:
        raise InvalidArgumentError("texts need the model's tokenizer; give --tokenizer FILE")
    return StepsBefore(tokenizer=tokenizer.read_bytes(), ids=texts.ids, tokens=request.max_tokens)


def find_preprocessor(model: str, given: str) -> Path:
    """The file given, else the one beside the model.

    Raises
    ------
    InvalidArgumentError
        There is none.
    """
    file = local_path(given, field="preprocessor") if given else model_file(model).parent / PREPROCESSOR_FILE
    if not file.is_file():
        raise InvalidArgumentError(
            f"preprocessor {file} does not exist; put {PREPROCESSOR_FILE} beside the model or give --preprocessor "
            "FILE: it says how images are resized and scaled"
        )
    return file


def load_preprocessor(file: Path) -> ImageReader:
    """Read a ``preprocessor_config.json``.

    Raises
    ------
    InvalidArgumentError
        Names the field and what it must be.
    """
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise InvalidArgumentError(f"preprocessor {file} has more than {MAX_CONFIG_BYTES} bytes")
        config = parse_document(file.read_bytes(), dict[str, Any])
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"preprocessor {file} is no JSON object: {error}") from error
    try:
        return _reader(config)
    except (InvalidArgumentError, InvalidBundleError) as error:
        raise InvalidArgumentError(f"preprocessor {file}: {error}") from error


def _reader(config: dict[str, Any]) -> ImageReader:
    unknown = sorted(name for name in set(config) - READ - IDLE if config[name] not in (None, False))
    if unknown:
        raise InvalidArgumentError(f"{unknown[0]} is not understood; the steps are {', '.join(sorted(READ))}")
    _choice(config, "do_convert_rgb", (True, False))
    steps = ImageSteps(
        resize=_sides(config, "size") if _asked(config, "do_resize", "size") else (),
        crop=_sides(config, "crop_size", square=True) if _asked(config, "do_center_crop", "crop_size") else (),
        resample=_resample(config),
        mode="L" if len(_numbers(config, "image_mean", [0.5])) == 1 and "image_mean" in config else "RGB",
        channels_first=_choice(config, "data_format", ("channels_first", "channels_last")) != "channels_last",
    )
    check_steps(steps)
    return ImageReader(steps, _scaling(config, steps))


def _scaling(config: dict[str, Any], steps: ImageSteps) -> Scaling | None:
    channels = len(steps.mode)
    rescaled = _choice(config, "do_rescale", (True, False), default=True)
    normalized = _asked(config, "do_normalize", "image_mean")
    if not rescaled and not normalized:
        return None
    (factor,) = _numbers(config, "rescale_factor", [1 / RGB_MAX]) if rescaled else [1.0]
    mean = _numbers(config, "image_mean", []) if normalized else [0.0] * channels
    deviation = _numbers(config, "image_std", []) if normalized else [1.0] * channels
    if len(mean) != channels or len(deviation) != channels or min(deviation) <= 0 or factor <= 0:
        raise InvalidArgumentError(
            f"image_mean is {mean}, image_std {deviation} and rescale_factor {factor}; for {steps.mode} they need "
            f"{channels} numbers each, deviations and factor above 0"
        )
    scaling = Scaling(
        tuple(factor / d for d in deviation),
        tuple(-m / d for m, d in zip(mean, deviation, strict=True)),
        steps.channels_first,
    )
    if not (np.abs([scaling.factor, scaling.shift]) * RGB_MAX < LARGEST).all():
        raise InvalidArgumentError(
            f"image_std {deviation} and rescale_factor {factor} make no finite numbers of pixels"
        )
    return scaling


def _asked(config: dict[str, Any], name: str, detail: str) -> bool:
    """Whether a step is to be done: where the file does not say, whether it has the step's detail."""
    return bool(_choice(config, name, (True, False), default=config.get(detail) is not None))


def _choice(config: dict[str, Any], name: str, known: tuple[Any, ...], *, default: Any = None) -> Any:
    value = config.get(name)
    if value is None:
        return default
    if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be one of {', '.join(map(str, known))}")
    return value


def _sides(config: dict[str, Any], name: str, *, square: bool = False) -> tuple[int, ...]:
    value = config.get(name)
    sides: tuple[Any, ...]
    if isinstance(value, dict) and set(value) == {"height", "width"}:
        sides = (value["height"], value["width"])
    elif isinstance(value, dict) and set(value) == {"shortest_edge"}:
        sides = (value["shortest_edge"],) * (2 if square else 1)
    else:
        sides = (value,) * 2 if square and type(value) is int else ()  # of a size, classes differ in what it means
    if not sides or any(type(side) is not int for side in sides):
        raise InvalidArgumentError(
            f'{name} is {value!r}; it must be {{"shortest_edge": N}} or {{"height": N, "width": N}}, in pixels'
        )
    return sides


def _resample(config: dict[str, Any]) -> Any:
    value = config.get("resample", RESAMPLES.index("bilinear"))
    if value in RESAMPLES:
        return value
    if type(value) is not int or not 0 <= value < len(RESAMPLES):
        raise InvalidArgumentError(f"resample is {value!r}; it must be 0 to 5, Pillow's {', '.join(RESAMPLES)}")
    return RESAMPLES[value]


def _numbers(config: dict[str, Any], name: str, default: list[float]) -> list[float]:
    value = config.get(name, default)
    values = value if isinstance(value, list) else [value]
    if not values or any(type(v) not in (int, float) or not abs(v) < LARGEST for v in values):
        raise InvalidArgumentError(f"{name} is {value!r}; it must be a number for each channel")
    return [float(v) for v in values]
