"""Inputs for ``offramp prepare``: reading them, and deciding which of them train heads.

Rows that train or steer a head never become records: a plan tuned on them would look better than it is.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidArgumentError
from offramp_core.npz import read_npz
from offramp_worker.prepare.source.locations import local_path
from offramp_worker.prepare.source.texts import read_texts
from offramp_worker.preprocess.texts import TextReader

FloatArray = npt.NDArray[np.float32]
InputArray = npt.NDArray[np.float32 | np.float16 | np.uint8 | np.int64]  # images and other features, or token ids
SplitName = Literal["default", "apparate"]

TEXT_SUFFIXES = frozenset({".json", ".jsonl", ".ndjson"})
IMAGE_SUFFIXES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".webp"})
IMAGE_FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
MAX_PIXELS = 64 * 1024 * 1024  # of one image; a small file can say that it has billions
MIN_ROWS = 40
MIN_HEAD_ROWS = 200
MAX_HEAD_SHARE = 0.8
MAX_DOUBLED_SHARE = 0.5
# (training, validation) shares of the head rows
SPLITS: dict[SplitName, tuple[float, float]] = {"default": (0.9, 0.1), "apparate": (0.1, 0.9)}
MIN_VALIDATION_ROWS = 20


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """How the rows of the data divide: [0, train) trains heads, [train, head) validates, [head, total) are records."""

    train: int
    head: int
    total: int

    @property
    def validation(self) -> int:
        """Rows that choose when to stop, which heads stay, and the quantile tables."""
        return self.head - self.train

    @property
    def records(self) -> int:
        """Rows that no head has seen."""
        return self.total - self.head


def load_inputs(uri: str, *, texts: TextReader | None = None) -> InputArray:
    """Read model inputs.

    Parameters
    ----------
    uri : str
        A path or ``file://`` URI of: an ``.npz`` file with an array ``x``, floats or uint8 [N, ...], or token ids
        [N, length] as int64 (other arrays, such as labels, are not read); a folder of images of one size (read in order
        of name, scaled to [0, 1], channels first: [N, 3 or 1, H, W]); or JSON lines of text.
    texts : TextReader, optional
        Divides texts into tokens.

    Returns
    -------
    (N, ...) float32, or float16 and uint8 where the file holds them; or (N, longest) int64

    Raises
    ------
    InvalidArgumentError
        Names the file or array and what it must look like.
    """
    path = local_path(uri, field="data")
    if not path.exists():
        raise InvalidArgumentError(
            f"data {uri} does not exist; give an .npz with x [N, ...], a folder of images, or a .jsonl file of texts"
        )
    if path.suffix in TEXT_SUFFIXES:
        if texts is None:
            raise InvalidArgumentError(
                f"data {uri}: texts need the model's tokenizer; put tokenizer.json beside the model or give "
                "--tokenizer FILE"
            )
        return texts.encode(read_texts(path))
    return _load_folder(path) if path.is_dir() else _load_npz(path)


def plan_split(total: int, *, name: SplitName, share: float, doublings: int = 0) -> HeadSplit | None:
    """Which rows train heads when the first ``share`` of the data, doubled ``doublings`` times, is given to them.

    Parameters
    ----------
    total : int
        Rows of data.
    share : float
        Share of the rows for heads, in (0, 0.8]. At least 200 rows are taken (heads cannot be learned from a
        handful) as far as that is not more than half of the data.

    Returns
    -------
    HeadSplit or None
        None when doubling would take more than half of the data.

    Raises
    ------
    InvalidArgumentError
        ``share`` is out of range or there are too few rows.
    """
    if not 0 < share <= MAX_HEAD_SHARE:
        raise InvalidArgumentError(f"head-share is {share}; it must lie in (0, {MAX_HEAD_SHARE}]")
    if total < MIN_ROWS:
        raise InvalidArgumentError(f"data has {total} rows; at least {MIN_ROWS} are needed, hundreds to be useful")
    most = int(total * MAX_DOUBLED_SHARE)
    first = max(round(total * share), min(most, MIN_HEAD_ROWS))
    head = first * 2**doublings
    if doublings and head > most:
        return None
    validation = max(round(head * SPLITS[name][1]), min(MIN_VALIDATION_ROWS, head // 2))
    return HeadSplit(train=head - validation, head=head, total=total)


def remove_repeats(x: InputArray, *, of: InputArray) -> InputArray:
    """The rows of ``x`` whose content does not occur in ``of``; both (N, ...)."""
    known = {_digest(row) for row in of}
    keep = [index for index, row in enumerate(x) if _digest(row) not in known]
    return x[keep]


def with_one_length(a: InputArray, b: InputArray, *, pad: int) -> tuple[InputArray, InputArray]:
    """Two sets of token rows, the shorter ones filled up."""
    width = max(a.shape[1], b.shape[1])
    first, second = (np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=pad) for x in (a, b))
    return first, second


def shifted_copies(x: FloatArray, *, copies: int, seed: int) -> FloatArray:
    """Variations of images that keep what they show: small shifts, a little noise.

    Parameters
    ----------
    x : (N, C, H, W)
    copies : int
        Variations per image.

    Returns
    -------
    (N * copies, C, H, W) float32
        Each shifted by up to 1/16 of its size (edges repeated), with noise of up to 5 % of the data's deviation.
    """
    rng = np.random.default_rng(seed)
    reach = tuple(max(1, size // 16) for size in x.shape[2:])
    noise = 0.05 * float(x.std())
    padded = np.pad(x, ((0, 0), (0, 0), (reach[0],) * 2, (reach[1],) * 2), mode="edge")
    out = np.empty((len(x) * copies, *x.shape[1:]), dtype=np.float32)
    for index in range(len(out)):
        top, left = rng.integers(0, 2 * reach[0] + 1), rng.integers(0, 2 * reach[1] + 1)
        window = padded[index % len(x), :, top : top + x.shape[2], left : left + x.shape[3]]
        out[index] = window + rng.uniform(0, noise) * rng.standard_normal(window.shape, dtype=np.float32)
    return out


def content_digest(x: InputArray) -> str:
    """SHA-256 (hex) of an array's values, for the manifest."""
    return _digest(x)


def _digest(row: InputArray) -> str:
    return hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest()


def _load_npz(path: Path) -> InputArray:
    try:
        with path.open("rb") as file:
            arrays = read_npz(file, names=("x",))
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(f"data {path} is not a readable .npz file: {error}") from error
    if "x" not in arrays:
        raise InvalidArgumentError(f"data {path}: array x is missing; save it with np.savez(FILE, x=inputs)")
    return _checked(arrays["x"], source=str(path))


def _checked(x: npt.NDArray[Any], *, source: str) -> InputArray:
    if x.dtype.kind != "f" and x.dtype not in (np.uint8, np.int32, np.int64):
        raise InvalidArgumentError(
            f"data {source}: x has dtype {x.dtype}; convert it to float32, float16 or uint8 as the model expects it, "
            "or to int64 where it is token ids"
        )
    if x.ndim < 2:
        raise InvalidArgumentError(f"data {source}: x has shape {x.shape}; it needs a row per input, [N, ...]")
    if x.dtype.kind == "i":
        return np.ascontiguousarray(x, dtype=np.int64)
    if x.dtype == np.uint8:
        return np.ascontiguousarray(x)
    finite = np.isfinite(x).all(axis=tuple(range(1, x.ndim)))
    if not finite.all():
        raise InvalidArgumentError(f"data {source}: x[{int(np.argmin(finite))}] is not finite; remove NaN and infinity")
    return np.ascontiguousarray(x, dtype=np.float16 if x.dtype == np.float16 else np.float32)


def in_type(x: InputArray, wanted: npt.DTypeLike) -> InputArray:
    """Rows in the type that the model's input has; floating-point numbers become those of another width.

    Raises
    ------
    InvalidArgumentError
        They are of another kind, or too large.
    """
    dtype = np.dtype(wanted)
    if x.dtype == dtype:
        return x
    if {x.dtype.kind, dtype.kind} != {"f"}:
        raise InvalidArgumentError(f"data x holds {x.dtype}; the model takes {dtype}: save x in that type")
    with np.errstate(over="ignore"):
        fitting: InputArray = x.astype(dtype)
    if not np.isfinite(fitting).all():
        raise InvalidArgumentError(f"data x holds numbers beyond {np.finfo(dtype).max:g}, the largest {dtype}")
    return fitting


def image_files(folder: Path) -> list[Path]:
    """The images in a folder and those below it, in order of name.

    Raises
    ------
    InvalidArgumentError
        There is none.
    """
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
    if not files:
        raise InvalidArgumentError(f"data {folder} holds no images ({', '.join(sorted(IMAGE_SUFFIXES))})")
    return files


def _load_folder(folder: Path) -> FloatArray:
    from PIL import Image

    files = image_files(folder)
    rows: list[FloatArray] = []
    mode = ""
    for file in files:
        try:
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                _check_pixels(image.width, image.height)
                mode = mode or ("L" if image.mode in ("1", "L") else "RGB")
                pixels = np.asarray(image.convert(mode), dtype=np.float32) / 255
        except Exception as error:  # decoders raise what a broken file makes them raise
            raise InvalidArgumentError(f"data {file} is not a readable image: {error}") from error
        row = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        if rows and row.shape != rows[0].shape:
            raise InvalidArgumentError(
                f"data {file} is {row.shape[2]}x{row.shape[1]} pixels, {files[0].name} is "
                f"{rows[0].shape[2]}x{rows[0].shape[1]}; all images must have one size"
            )
        rows.append(row.astype(np.float32))
    return np.ascontiguousarray(np.stack(rows))


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width}x{height} pixels; at most {MAX_PIXELS} are read")
