"""CIFAR-10 images and ResNet checkpoints in the folder OFFRAMP_DATA (default ``../shared/data``)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

FloatArray = npt.NDArray[np.float32]

CHECKPOINTS = {
    20: "resnet20-12fca82f.th",
    32: "resnet32-d509ac18.th",
    44: "resnet44-014dd654.th",
    56: "resnet56-4bfd9763.th",
}
TILES = 100  # each file is a mosaic of 100 x 100 images
SIDE = 32
# What the checkpoints were trained on: ImageNet's channel means and deviations.
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)[:, None, None]
DEVIATION = np.array([0.229, 0.224, 0.225], dtype=np.float32)[:, None, None]


class DataMissingError(Exception):
    """OFFRAMP_DATA does not hold the files needed."""


@dataclass(frozen=True, slots=True)
class Images:
    """``train`` trained the backbones (so it may teach heads but never judge them); ``test`` did not. (n, 3, 32,
    32)."""

    train: FloatArray
    test: FloatArray


def data_folder() -> Path:
    """Where the files are looked for."""
    return Path(os.environ.get("OFFRAMP_DATA", "../shared/data"))


def missing_files(*, depth: int = 56) -> list[Path]:
    """The files a bundle needs that are not there."""
    needed = [_mosaic("train0"), _mosaic("test"), _checkpoint(depth)]
    return [path for path in needed if not path.is_file()]


def require_files(*, depth: int) -> None:
    """Raise :class:`DataMissingError` naming the first file that is not there."""
    missing = missing_files(depth=depth)
    if missing:
        raise DataMissingError(
            f"{missing[0]} is missing; point OFFRAMP_DATA to the folder that holds {missing[0].parent.name}/"
        )


def load_images() -> Images:
    """Read and normalise both mosaics."""
    return Images(train=_read(_mosaic("train0")), test=_read(_mosaic("test")))


def load_checkpoint(depth: int) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint under the names of family cifar-resnetN. Only tensors are unpickled."""
    archive = torch.load(_checkpoint(depth), map_location="cpu", weights_only=True)
    return {name.removeprefix("module."): tensor.contiguous() for name, tensor in archive["state_dict"].items()}


def _mosaic(part: str) -> Path:
    return data_folder() / "img_cifar10" / f"cifar10_{part}.webp"


def _checkpoint(depth: int) -> Path:
    return data_folder() / "ckpt_resnet_cifar10" / CHECKPOINTS[depth]


def _read(path: Path) -> FloatArray:
    with Image.open(path) as mosaic:
        pixels = np.asarray(mosaic.convert("RGB"), dtype=np.float32) / 255
    tiles = pixels.reshape(TILES, SIDE, TILES, SIDE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE)
    return np.ascontiguousarray((tiles - MEAN) / DEVIATION, dtype=np.float32)
