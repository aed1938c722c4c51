"""Encoded images to pixels of eight bits: decoded, resized, and cut out of the middle, as Pillow computes it.

What comes from a client may be anything, so all that costs memory is bounded by what the file's head says before it is
decoded.
"""

from __future__ import annotations

import io
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import ImageSteps
from offramp_core.errors import InvalidBundleError

FORMATS = ("JPEG", "PNG")
MAX_PIXELS = 16_000_000  # of one image, as it comes and as it is resized: each takes four bytes, twice if converted
MAX_SCANS = 64  # of a JPEG: each passes over all pixels again, 53 bytes are enough for one, and ten are usual
JPEG, SCAN = b"\xff\xd8", b"\xff\xda"  # begin a file, and a scan: within what is coded no 255 is followed by this
MAX_SIDE = 8192  # that a bundle may ask for
MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"})  # of eight bits or fewer
RESAMPLES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # in the order of Pillow's numbers

Pixels = npt.NDArray[np.uint8]


class _RefusedError(Exception):
    """An image that could be decoded and is not."""


class Budget:
    """Pixels that the images of one request may still have together."""

    def __init__(self, pixels: int) -> None:
        self.total = self._left = pixels

    def take(self, pixels: int) -> None:
        """Refuse an image that has more than are left."""
        self._left -= pixels
        if self._left < 0:
            raise _RefusedError(f"the images of a request have more than {self.total} pixels together; send fewer")


def check_steps(steps: ImageSteps) -> None:
    """Refuse steps that do not end in rows of one size.

    Raises
    ------
    InvalidBundleError
        Says which step, without the name of a file.
    """
    sides = (*steps.resize, *steps.crop)
    if any(not 1 <= side <= MAX_SIDE for side in sides) or len(steps.resize) > 2 or len(steps.crop) not in (0, 2):
        raise InvalidBundleError(
            f"resize {list(steps.resize)} and crop {list(steps.crop)} must be sides of 1 to {MAX_SIDE} pixels"
        )
    if len(steps.resize) != 2 and not steps.crop:
        raise InvalidBundleError("images must end in one size: resize to [height, width], or crop")
    if not steps.crop and len(steps.resize) == 2:
        return
    smallest = steps.resize if len(steps.resize) == 2 else steps.resize * 2
    if smallest and any(cut > side for cut, side in zip(steps.crop, smallest, strict=True)):
        raise InvalidBundleError(f"crop {list(steps.crop)} is larger than resize {list(steps.resize)}")


def row_shape(steps: ImageSteps) -> tuple[int, ...]:
    """Shape of an image's row."""
    height, width = steps.crop or steps.resize
    channels = len(steps.mode)
    return (channels, height, width) if steps.channels_first else (height, width, channels)


def decoded(content: bytes | IO[bytes], steps: ImageSteps, *, budget: Budget | None = None) -> Pixels:
    """One image as a row of the model's input.

    Parameters
    ----------
    content : bytes or file
        A JPEG or PNG.
    budget : Budget, optional
        Of the request that it belongs to.

    Returns
    -------
    (channels, height, width) or (height, width, channels) uint8

    Raises
    ------
    ValueError
        It is no such image, or too large; says which.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        if isinstance(content, bytes):
            _check_scans(content)
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content, formats=FORMATS) as image:
            _check(image, steps)
            if budget is not None:
                budget.take(image.width * image.height)
            return _row(image, steps)
    except UnidentifiedImageError:
        raise ValueError("is no JPEG or PNG") from None
    except _RefusedError as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # decoders raise what a broken file makes them raise
        raise ValueError(f"cannot be decoded: {str(error)[:200] or type(error).__name__}") from error


def _check_scans(content: bytes) -> None:
    scans = content.count(SCAN) if content.startswith(JPEG) else 0
    if scans > MAX_SCANS:
        raise _RefusedError(f"has {scans} scans; a JPEG may have {MAX_SCANS}")


def _check(image: Any, steps: ImageSteps) -> None:
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _RefusedError(f"has {width}x{height} pixels; an image may have {MAX_PIXELS}")
    if image.format == "PNG" and getattr(image, "n_frames", 1) > 1:
        raise _RefusedError(f"is an animation of {image.n_frames} frames; send one image")
    if image.mode not in MODES:
        raise _RefusedError(f"has pixels of the kind {image.mode}; send eight bits a channel")
    resized = _resized(width, height, steps)
    if resized[0] * resized[1] > MAX_PIXELS:
        raise _RefusedError(f"has {width}x{height} pixels, too long a side to resize")
    if steps.crop and (resized[1] < steps.crop[0] or resized[0] < steps.crop[1]):
        raise _RefusedError(f"has {width}x{height} pixels; at least {steps.crop[1]}x{steps.crop[0]} are needed")


def _resized(width: int, height: int, steps: ImageSteps) -> tuple[int, int]:
    """Width and height behind the first step; the longer side is rounded down, as torchvision does."""
    if len(steps.resize) == 2:
        return steps.resize[1], steps.resize[0]
    if not steps.resize:
        return width, height
    (edge,) = steps.resize
    return (edge, max(1, edge * height // width)) if width <= height else (max(1, edge * width // height), edge)


def _row(image: Any, steps: ImageSteps) -> Pixels:
    from PIL import Image

    image.load()
    plain = image if image.mode == steps.mode else image.convert(steps.mode)
    size = _resized(plain.width, plain.height, steps)
    if size != plain.size:
        plain = plain.resize(size, Image.Resampling(RESAMPLES.index(steps.resample)))
    if steps.crop:
        height, width = steps.crop
        left, top = round((plain.width - width) / 2), round((plain.height - height) / 2)
        plain = plain.crop((left, top, left + width, top + height))
    pixels: Pixels = np.asarray(plain, dtype=np.uint8)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return np.ascontiguousarray(pixels.transpose(2, 0, 1) if steps.channels_first else pixels)
