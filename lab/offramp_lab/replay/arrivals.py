"""``--arrivals``: times from a file, or a generator with a rate."""

from __future__ import annotations

import csv
import zipfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offramp_cli.npz import read_npz
from offramp_core.errors import InvalidArgumentError
from offramp_lab.simulate.arrivals import ARRIVALS, scaled
from offramp_lab.simulate.serving import check_rising

SecondsArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """An arrival trace to be: ``recorded`` times, or a generator's ``kind`` and ``rate`` (None: taken from the
    load)."""

    spec: str
    kind: str
    rate: float | None = None
    recorded: SecondsArray | None = None

    def times(self, n: int, *, rate: float | None, rng: np.random.Generator) -> SecondsArray:
        """At most ``n`` arrival times from 0 on, ``rate`` a second; without a rate as they were recorded, or as the
        spec says.

        Raises
        ------
        InvalidArgumentError
            A generator has no rate, or a trace too few requests.
        """
        if self.recorded is not None:
            times = self.recorded[:n]
            return times - float(times[0]) if rate is None else scaled(times, rate=rate)
        wanted = self.rate if rate is None else rate
        if wanted is None:
            raise InvalidArgumentError(f"--arrivals {self.spec} has no rate; give {self.kind}:RATE or --load")
        return ARRIVALS[self.kind](n, wanted, rng)


def parse_arrivals(spec: str) -> Arrivals:
    """``poisson:RATE``, ``fixed:RATE``, ``bursts:RATE`` (the rate may be left out), else a file.

    Raises
    ------
    InvalidArgumentError
        Unknown, unreadable, or not rising times.
    """
    kind, colon, rate = spec.partition(":")
    if kind in ARRIVALS:
        return Arrivals(spec, kind, _rate(spec, rate) if colon else None)
    path = Path(spec)
    if path.suffix not in (".npz", ".csv"):
        raise InvalidArgumentError(
            f"--arrivals {spec} is unknown; give a .npz or .csv file, or "
            f"{', '.join(f'{name}:RATE' for name in ARRIVALS)}"
        )
    times = _from_npz(path) if path.suffix == ".npz" else _from_csv(path)
    if len(times) == 0:
        raise InvalidArgumentError(f"--arrivals {spec} holds no times")
    try:
        check_rising(times)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"--arrivals {spec}: {error}") from error
    return Arrivals(spec, path.stem, recorded=times)


def _rate(spec: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = float("nan")
    if not 0 < rate < float("inf"):
        raise InvalidArgumentError(f"--arrivals {spec}: {text!r} is no rate; give requests a second, such as 50")
    return rate


def _from_npz(path: Path) -> SecondsArray:
    if path.is_file() and not zipfile.is_zipfile(path):
        raise InvalidArgumentError(f"--arrivals {path} is not an .npz file")
    arrays = read_npz(path)
    named: list[str] = [name for name in ("time", "arrivals") if name in arrays] or list(arrays)
    if not named or (len(named) > 1 and named[0] not in ("time", "arrivals")):
        raise InvalidArgumentError(f"--arrivals {path} holds {sorted(arrays)}; it needs one array of times, `time`")
    times = arrays[named[0]]
    if times.ndim != 1 or times.dtype.kind not in "fiu":
        raise InvalidArgumentError(
            f"--arrivals {path}: {named[0]} has shape {times.shape} and dtype {times.dtype}; it needs a row of numbers"
        )
    return times.astype(np.float64)


def _from_csv(path: Path) -> SecondsArray:
    """The first column; a first line that is no number is a heading."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            cells = [(number, row[0].strip()) for number, row in enumerate(csv.reader(file), 1) if row]
    except OSError as error:
        raise InvalidArgumentError(f"--arrivals {path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidArgumentError(f"--arrivals {path} is no text of comma-separated values: {error}") from error
    start = 0 if not cells or _is_number(cells[0][1]) else 1
    for number, text in islice(cells, start, None):
        if not _is_number(text):
            raise InvalidArgumentError(f"--arrivals {path}, line {number}: {text!r} is no number of seconds")
    return np.array([float(text) for _, text in cells[start:]], dtype=np.float64)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
