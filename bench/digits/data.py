"""The 1,797 handwritten digits that scikit-learn ships, in three sets that share no image."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

FloatArray = npt.NDArray[np.float32]
LabelArray = npt.NDArray[np.int64]

SIZE = 24  # pixels per side: the model's own compute must dominate a request, so digits are enlarged threefold
BACKBONE_ROWS, HEAD_ROWS = 850, 500  # the rest, 447 images, is traffic


@dataclass(frozen=True, slots=True)
class DigitSet:
    """Images ``x`` (n, 1, 24, 24) in [0, 1] and what they show, ``y`` (n,)."""

    x: FloatArray
    y: LabelArray


@dataclass(frozen=True, slots=True)
class DigitSets:
    """Disjoint sets: one trains the backbone, one trains heads and makes bootstrap records, one is traffic."""

    backbone: DigitSet
    heads: DigitSet
    traffic: DigitSet


def load_digit_sets(*, seed: int) -> DigitSets:
    """Shuffle the digits by ``seed``, drop repeated images and divide them."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(seed).permutation(len(digits.target))
    raw, y = digits.images[order].astype(np.float32), digits.target[order].astype(np.int64)
    digests = [hashlib.sha256(image.tobytes()).digest() for image in raw]
    unique = sorted({digest: index for index, digest in reversed(list(enumerate(digests)))}.values())
    x, y = enlarge(raw[unique] / 16), y[unique]
    ends = (0, BACKBONE_ROWS, BACKBONE_ROWS + HEAD_ROWS, len(x))
    return DigitSets(*(DigitSet(x[a:b], y[a:b]) for a, b in itertools.pairwise(ends)))


def enlarge(images: FloatArray) -> FloatArray:
    """(n, 8, 8) → (n, 1, 24, 24), bilinear."""
    rows = [
        np.asarray(Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR), dtype=np.float32)
        for image in images
    ]
    return np.ascontiguousarray(np.stack(rows)[:, None])
