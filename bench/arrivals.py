"""Real arrival traces as files for ``offramp replay --arrivals``: ``python -m bench.arrivals [NAME...] --out
build/arrivals``.

| name | what | source (folder of OFFRAMP_DATA) |
|---|---|---|
| azure-functions | 11,868 invocations of 21 functions in 300 s, to the millisecond | trace_azure_functions, Ilúvatar's
sample of Azure 2021 |
| azure-functions-minutes | 4,525 invocations of 4 functions; counts per minute, spread within each |
trace_azure_functions, Azure 2019 |
| azure-llm-code, azure-llm-conv | 8,819 and 19,366 requests in an hour | trace_azure_llm, Azure 2023 |
| twitter | an hour of 1,899,061 counts per second, spread within each | trace_twitter, archive.org 2021-08 |

Counts say nothing about moments within their interval; they are spread uniformly, seeded. A file holds one array,
``time``: seconds from 0 on, as recorded; ``--rate`` plays them so that so many come a second on average.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tarfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from offramp_lab.simulate.arrivals import scaled, spread

SecondsArray = npt.NDArray[np.float64]
TWITTER_BEGIN, TWITTER_SECONDS = 15 * 3600, 3600  # an afternoon hour of the first day
FIRST_MINUTE_COLUMN = 4


class MissingTraceError(Exception):
    """The data of a trace are not on this machine; names the file."""


def data_folder() -> Path:
    """Where the traces lie."""
    return Path(os.environ.get("OFFRAMP_DATA", "../shared/data"))


def azure_functions(_rng: np.random.Generator) -> SecondsArray:
    """Millisecond times of all functions together."""
    rows = _csv("trace_azure_functions/iluvatar_trace_300s.csv")
    return _from_zero(np.array([float(row["invoke_time_ms"]) for row in rows]) / 1e3)


def azure_functions_minutes(rng: np.random.Generator) -> SecondsArray:
    """Counts per minute of all functions together."""
    rows = _csv("trace_azure_functions/azure2019_invocations_per_min_sample.csv")
    counts = np.array([[int(value) for value in list(row.values())[FIRST_MINUTE_COLUMN:]] for row in rows])
    return _from_zero(spread(counts.sum(axis=0), interval_seconds=60.0, rng=rng))


def azure_llm_code(_rng: np.random.Generator) -> SecondsArray:
    """Requests for code completion."""
    return _timestamps("trace_azure_llm/AzureLLMInferenceTrace_code.csv")


def azure_llm_conv(_rng: np.random.Generator) -> SecondsArray:
    """Requests of conversations."""
    return _timestamps("trace_azure_llm/AzureLLMInferenceTrace_conv.csv")


def azure_functions_by_name() -> dict[str, SecondsArray]:
    """Times of each function, from the first one of all on; the busiest function first."""
    found: dict[str, list[float]] = {}
    for row in _csv("trace_azure_functions/iluvatar_trace_300s.csv"):
        found.setdefault(row["func_name"], []).append(float(row["invoke_time_ms"]) / 1e3)
    begin = min(min(times) for times in found.values())
    busiest = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return {name: np.sort(times) - begin for name, times in busiest}


#: Traces that say who was asked.
BY_NAME = ("azure-functions", "azure-functions-minutes", "azure-functions-2021")


def asked_by_name(trace: str) -> list[tuple[float, str]]:
    """When whom a trace of ``BY_NAME`` asked, in order."""
    if trace == "azure-functions":
        asked = [(at, name) for name, times in azure_functions_by_name().items() for at in times.tolist()]
    elif trace == "azure-functions-2021":
        rows = _csv("trace_azure_functions/azure2021_200.csv")
        asked = [(float(row["end_timestamp"]) - float(row["duration"]), row["func"]) for row in rows]
    else:
        rng, asked = np.random.default_rng(0), []
        for row in _csv("trace_azure_functions/azure2019_invocations_per_min_sample.csv"):
            counts = np.array([int(value) for value in list(row.values())[FIRST_MINUTE_COLUMN:]])
            times = spread(counts, interval_seconds=60.0, rng=rng).tolist()
            asked += [(at, row["HashFunction"]) for at in times]
    return sorted(asked)


def twitter_counts() -> npt.NDArray[np.int64]:
    """Tweets in each second of 22 days."""
    with tarfile.open(_existing("trace_twitter/workload.tbz2")) as archive:
        member = archive.extractfile(archive.getmembers()[0])
        assert member is not None
        return np.array(member.read().split(), dtype=np.int64)


def twitter(rng: np.random.Generator) -> SecondsArray:
    """An hour of tweets."""
    hour = twitter_counts()[TWITTER_BEGIN : TWITTER_BEGIN + TWITTER_SECONDS]
    return _from_zero(spread(hour, interval_seconds=1.0, rng=rng))


TRACES: dict[str, Callable[[np.random.Generator], SecondsArray]] = {
    "azure-functions": azure_functions,
    "azure-functions-minutes": azure_functions_minutes,
    "azure-llm-code": azure_llm_code,
    "azure-llm-conv": azure_llm_conv,
    "twitter": twitter,
}


def load_trace(name: str, *, seed: int = 0) -> SecondsArray:
    """A trace by name, from 0 on.

    Raises
    ------
    MissingTraceError
        Its data are not on this machine.
    """
    return TRACES[name](np.random.default_rng(seed))


def write_trace(name: str, folder: Path, *, seed: int = 0, rate: float | None = None) -> Path:
    """Write a trace as npz."""
    times = load_trace(name, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.npz"
    np.savez(path, time=times if rate is None else scaled(times, rate=rate))
    return path


def describe(times: SecondsArray) -> str:
    """Requests, seconds, rate, and the coefficient of variation of the gaps (1: Poisson)."""
    gaps = np.diff(times)
    return (
        f"{len(times):,} requests in {times[-1]:,.0f} s, {len(times) / times[-1]:.2f} a second, gaps vary "
        f"{gaps.std() / gaps.mean():.2f}"
    )


def _from_zero(times: SecondsArray) -> SecondsArray:
    rising = np.sort(times)
    return rising - float(rising[0])


def _existing(name: str) -> Path:
    path = data_folder() / name
    if not path.is_file():
        raise MissingTraceError(f"{path} is not there; set OFFRAMP_DATA to the folder of the traces")
    return path


def _csv(name: str) -> list[dict[str, str]]:
    with _existing(name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _timestamps(name: str) -> SecondsArray:
    """Times of day with seven decimals, one more than datetime reads."""
    texts = [row["TIMESTAMP"] for row in _csv(name)]
    whole = np.array([datetime.fromisoformat(text[:19]).timestamp() for text in texts])
    return _from_zero(whole + np.array([float(f"0.{text[20:] or 0}") for text in texts]))


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 when a trace is missing."""
    parser = argparse.ArgumentParser(prog="bench.arrivals", description="real arrival traces as npz files")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(TRACES)}; all when left out")
    parser.add_argument("--out", type=Path, default=Path("build/arrivals"))
    parser.add_argument("--rate", type=float, default=None, help="requests a second on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = options.names or list(TRACES)
    unknown = [name for name in names if name not in TRACES]
    if unknown:
        parser.error(f"trace {unknown[0]!r} is unknown; choose from {', '.join(TRACES)}")
    try:
        for name in names:
            path = write_trace(name, options.out, seed=options.seed, rate=options.rate)
            with np.load(path) as archive:
                print(f"{path}: {describe(archive['time'])}")
    except MissingTraceError as error:
        print(f"bench.arrivals: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
