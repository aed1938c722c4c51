"""Named architectures that ``--model family:NAME?weights=FILE.safetensors`` can build.

A checkpoint needs to hold tensors only, named as the wider world's checkpoints name them: a family is code that is here
(:mod:`cifar`, :mod:`encoders`) or in torchvision. What can be read off the tensors' shapes (classes, layers, widths)
is; what cannot is a parameter of the URI, or stands in the ``config.json`` beside the weights.

| names | checkpoints |
|---|---|
| ``resnet``, ``cifar-resnet20/32/44/56`` | residual networks for small images; ``resnet`` takes ``blocks=N`` |
| ``resnet18/34/50``, ``vgg11/16(_bn)``, ``mobilenet_v2``, ``densenet121`` | torchvision's names |
| ``bert``, ``minilm``, ``distilbert``, ``vit`` | transformers' names, with a classifier; ``heads=N`` where no
config.json says it |

cifar.py     residual networks for small images
encoders.py  transformer encoders: BERT, DistilBERT and ViT
vision.py    convolutional networks for photographs, built by torchvision
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from offramp_core.errors import InvalidArgumentError
from offramp_worker.prepare.families.cifar import ResNet
from offramp_worker.prepare.families.encoders import Shapes, build_bert, build_distilbert, build_vit
from offramp_worker.prepare.families.vision import build_torchvision

Tensors = Mapping[str, Tensor]
MAX_CONFIG = 1024 * 1024  # characters; those in the world have some thousand


@dataclass(frozen=True, slots=True)
class Family:
    """How a named architecture is built: of the URI's whole-number parameters, the tensors' shapes and the checkpoint's
    config."""

    build: Callable[[Mapping[str, int], Shapes, Mapping[str, Any]], nn.Module]
    required: tuple[str, ...] = ()
    optional: Mapping[str, int] = field(default_factory=dict)


def _cifar(depth: int) -> Family:
    def build(values: Mapping[str, int], _shapes: Shapes, _config: Mapping[str, Any]) -> nn.Module:
        return ResNet(blocks=(depth - 2) // 6, classes=values["classes"])

    return Family(build, optional={"classes": 10})


def _torchvision(name: str) -> Family:
    return Family(lambda _values, shapes, _config: build_torchvision(name, shapes))


FAMILIES: Mapping[str, Family] = {
    "resnet": Family(
        lambda values, _shapes, _config: ResNet(**values),
        required=("blocks",),
        optional={"width": 16, "channels": 3, "classes": 10},
    ),
    **{f"cifar-resnet{depth}": _cifar(depth) for depth in (20, 32, 44, 56)},
    **{
        name: _torchvision(name)
        for name in (
            "resnet18",
            "resnet34",
            "resnet50",
            "vgg11",
            "vgg11_bn",
            "vgg16",
            "vgg16_bn",
            "mobilenet_v2",
            "densenet121",
        )
    },
    "bert": Family(build_bert, optional={"heads": 0}),
    "minilm": Family(build_bert, optional={"heads": 0}),
    "distilbert": Family(build_distilbert, optional={"heads": 0}),
    "vit": Family(build_vit, optional={"heads": 0}),
}


def check_family(name: str, parameters: Mapping[str, str]) -> dict[str, int]:
    """Refuse an unknown name or parameter, before any file is read; the values of all parameters.

    Raises
    ------
    InvalidArgumentError
        The name is none of :data:`FAMILIES`, or a parameter is unknown, missing or not a positive whole number.
    """
    if name not in FAMILIES:
        raise InvalidArgumentError(f"model family {name!r} is unknown; choose one of {', '.join(sorted(FAMILIES))}")
    return _integers(parameters, required=FAMILIES[name].required, optional=FAMILIES[name].optional)


def build_family(
    name: str, parameters: Mapping[str, str], tensors: Tensors | None = None, *, folder: Path | None = None
) -> nn.Module:
    """An untrained model of a family, in evaluation mode.

    Parameters
    ----------
    parameters : mapping
        The URI's parameters as text, without ``weights``.
    tensors : mapping, optional
        The checkpoint whose shapes say how large the model is.
    folder : Path, optional
        Where the checkpoint lies; its ``config.json``, if any, is read.

    Raises
    ------
    InvalidArgumentError
        The family or one of its parameters is unknown, missing or not a positive whole number; or the shapes do not
        fit.
    """
    values = check_family(name, parameters)
    shapes = {key: tuple(tensor.shape) for key, tensor in checkpoint_tensors(tensors or {}).items()}
    return FAMILIES[name].build(values, shapes, _config(folder)).eval()


def checkpoint_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """A checkpoint's parameters in float32 under today's names, without the buffers that some versions of a library
    save."""
    renamed = {
        key.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias"): value
        for key, value in tensors.items()
        if not key.endswith("position_ids")
    }
    return {key: value.float() if value.dtype.is_floating_point else value for key, value in renamed.items()}


def _config(folder: Path | None) -> Mapping[str, Any]:
    file = folder / "config.json" if folder is not None else None
    if file is None or not file.is_file():
        return {}
    try:
        with file.open(encoding="utf-8") as opened:
            config = json.loads(opened.read(MAX_CONFIG))
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidArgumentError(f"model config {file} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgumentError(f"model config {file} is no JSON object")
    return config


def _integers(
    parameters: Mapping[str, str], *, required: tuple[str, ...], optional: Mapping[str, int]
) -> dict[str, int]:
    unknown = sorted(set(parameters) - set(required) - set(optional))
    if unknown:
        known = ", ".join((*required, *optional)) or "weights only"
        raise InvalidArgumentError(f"model parameter {unknown[0]!r} is unknown; this family takes {known}")
    missing = [key for key in required if key not in parameters]
    if missing:
        raise InvalidArgumentError(f"model parameter {missing[0]!r} is missing; add {missing[0]}=N to the model URI")
    values = dict(optional)
    for key, text in parameters.items():
        if not text.isdecimal() or int(text) < 1:
            raise InvalidArgumentError(f"model parameter {key} is {text!r}; it must be a whole number >= 1")
        values[key] = int(text)
    return values
