"""Sentiment texts: SST-2 sentences, IMDB reviews and Amazon reviews, without repeats, divided by purpose."""

from __future__ import annotations

import csv
import gzip
import lzma
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.cifar.data import data_folder

LabelArray = npt.NDArray[np.int64]

STREAM_SHARE = 0.1  # of the held-out texts: heads may learn from these
DOMAINS = ("books", "dvd", "electronics", "kitchen_housewares")
SST2_TUNING, IMDB_TUNING, AMAZON_TUNING = 4_000, 1_200, 1_200
IMDB_HELD_OUT = 5_556  # 5,000 in the pool
_REVIEW = re.compile(r"<review>(.*?)</review>", re.DOTALL)
_BODY = re.compile(r"<review_text>(.*?)</review_text>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Text:
    """A text, its sentiment (1 is positive), the group it belongs to, and whether the data set meant it for
    training."""

    text: str
    label: int
    group: int = 0
    training: bool = True


@dataclass(frozen=True, slots=True)
class Corpus:
    """Texts by purpose; no text is in two parts, not even a copy.

    ``tuning`` fine-tunes the model (and teaches heads), ``stream`` teaches heads, ``pool`` is recorded. ``row`` gives
    each pool text's place among all texts of the data set's files, in their order.
    """

    tuning: tuple[Text, ...]
    stream: tuple[Text, ...]
    pool: tuple[Text, ...]
    row: LabelArray


def sst2_files() -> list[Path]:
    """What :func:`load_sst2` reads."""
    return [data_folder() / "nlp_sst2" / f"sentences_{part}.tsv" for part in ("train", "dev", "test")]


def imdb_files() -> list[Path]:
    """What :func:`load_imdb` reads."""
    return [data_folder() / "nlp_imdb" / "imdb50k.csv.xz"]


def amazon_files() -> list[Path]:
    """What :func:`load_amazon` reads."""
    folder = data_folder() / "nlp_amazon_mds"
    return [folder / f"{domain}.{mood}.review.gz" for domain in DOMAINS for mood in ("negative", "positive")]


def load_sst2(*, seed: int) -> Corpus:
    """4,000 training sentences tune; the other training sentences and those for development and test are held out."""
    texts = [
        Text(sentence, int(label), training=path.stem.endswith("train"))
        for path in sst2_files()
        for sentence, _, label in (line.rpartition("\t") for line in path.read_text(encoding="utf-8").splitlines())
    ]
    return divide(texts, tuning=SST2_TUNING, seed=seed)


def load_imdb(*, seed: int) -> Corpus:
    """1,200 reviews of the training half tune; 5,556 of the test half are held out."""
    csv.field_size_limit(10**9)
    with lzma.open(imdb_files()[0], "rt", encoding="utf-8", newline="") as file:
        texts = [
            Text(row["text"].replace("<br />", " "), int(row["label"]), training=row["split"] == "train")
            for row in csv.DictReader(file)
        ]
    return divide(texts, tuning=IMDB_TUNING, held_out=IMDB_HELD_OUT, mixed=False, seed=seed)


def load_amazon(*, seed: int) -> Corpus:
    """1,200 reviews of four kinds of goods tune, the others are held out; the group is the kind of goods."""
    texts = [
        Text(body.strip(), int(".positive." in path.name), group=DOMAINS.index(path.name.partition(".")[0]))
        for path in amazon_files()
        for body in _bodies(gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace"))
    ]
    return divide(texts, tuning=AMAZON_TUNING, seed=seed)


def divide(texts: Sequence[Text], *, tuning: int, held_out: int | None = None, mixed: bool = True, seed: int) -> Corpus:
    """Drop repeated texts, shuffle, and divide.

    Parameters
    ----------
    tuning : int
        How many texts meant for training tune the model.
    held_out : int, optional
        At most so many texts are held out; None: all others.
    mixed : bool
        Whether training texts that tune nothing are held out too.
    """
    distinct = list({_normalised(t.text): (i, t) for i, t in reversed(list(enumerate(texts)))}.values())
    order = np.random.default_rng(seed).permutation(len(distinct))
    shuffled = [distinct[i] for i in order]
    training = [pair for pair in shuffled if pair[1].training]
    others = [pair for pair in shuffled if not pair[1].training]
    rest = [*training[tuning:], *others] if mixed else others
    # Both sources of held-out texts must be spread over stream and pool.
    held = [rest[i] for i in np.random.default_rng(seed + 1).permutation(len(rest))][:held_out]
    cut = round(STREAM_SHARE * len(held))
    return Corpus(
        tuning=tuple(t for _, t in training[:tuning]),
        stream=tuple(t for _, t in held[:cut]),
        pool=tuple(t for _, t in held[cut:]),
        row=np.array([i for i, _ in held[cut:]], dtype=np.int64),
    )


def _bodies(markup: str) -> Iterator[str]:
    for review in _REVIEW.finditer(markup):
        body = _BODY.search(review.group(1))
        if body is not None:
            yield body.group(1)


def _normalised(text: str) -> str:
    return " ".join(text.lower().split())
