"""When requests come. All functions return rising times in seconds, the first request at or after 0."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from offramp_core.bundle import Profile
from offramp_core.errors import InvalidArgumentError

SecondsArray = npt.NDArray[np.float64]
Generator = Callable[[int, float, np.random.Generator], SecondsArray]

BURST_FACTOR = 5.0  # a burst comes five times as fast as the calm between bursts,
BURST_SHARE = 0.2  # lasts a fifth of the time,
BURST_SECONDS = 1.0  # and a second on average


def poisson(n: int, rate: float, rng: np.random.Generator) -> SecondsArray:
    """``n`` requests of independent users, ``rate`` a second on average."""
    return np.cumsum(rng.exponential(1.0 / rate, n))


def fixed(n: int, rate: float, _rng: np.random.Generator) -> SecondsArray:
    """One request every 1 / ``rate`` seconds, like the frames of a camera."""
    return np.arange(n, dtype=np.float64) / rate


def bursts(n: int, rate: float, rng: np.random.Generator) -> SecondsArray:
    """A Markov-modulated Poisson process of two states, ``rate`` a second on average.

    Bursts come :data:`BURST_FACTOR` times as fast as the calm between them, take :data:`BURST_SHARE` of the time and
    last :data:`BURST_SECONDS` on average; both states last exponentially long. Source: Fischer and Meier-Hellstern,
    "The Markov-modulated Poisson process (MMPP) cookbook", Performance Evaluation 18 (1993).
    """
    calm_rate = rate / (1 + BURST_SHARE * (BURST_FACTOR - 1))
    mean_seconds = (BURST_SECONDS * (1 - BURST_SHARE) / BURST_SHARE, BURST_SECONDS)
    rates = (calm_rate, BURST_FACTOR * calm_rate)
    # A Poisson process of unit rate, stretched by the inverse of the random cumulative rate.
    unit = np.cumsum(rng.exponential(1.0, n))
    state = int(rng.random() < BURST_SHARE)
    times, reached, seconds, total = [0.0], [0.0], 0.0, 0.0
    while total <= unit[-1]:
        length = float(rng.exponential(mean_seconds[state]))
        seconds, total = seconds + length, total + length * rates[state]
        times.append(seconds)
        reached.append(total)
        state = 1 - state
    return np.interp(unit, reached, times)


ARRIVALS: dict[str, Generator] = {"poisson": poisson, "fixed": fixed, "bursts": bursts}


def spread(counts: npt.ArrayLike, *, interval_seconds: float, rng: np.random.Generator) -> SecondsArray:
    """Arrival times from counts per interval: as many uniform times in each. A trace of counts knows no more."""
    per_interval = np.asarray(counts, dtype=np.int64)
    begins = np.repeat(np.arange(len(per_interval), dtype=np.float64), per_interval)
    return np.sort(begins + rng.random(len(begins))) * interval_seconds


def scaled(times: SecondsArray, *, rate: float) -> SecondsArray:
    """The trace played faster or slower, so that ``rate`` requests come a second on average; begins at 0.

    Raises
    ------
    InvalidArgumentError
        Fewer than two requests, all at one moment, or a rate that is not positive.
    """
    if len(times) < 2 or not times[-1] > times[0]:
        raise InvalidArgumentError(f"arrivals hold {len(times)} requests at one moment; a rate needs two moments")
    if not 0 < rate < np.inf:
        raise InvalidArgumentError(f"rate is {rate}; it must be a positive number of requests a second")
    seconds = float(times[-1] - times[0])
    return (times - float(times[0])) * ((len(times) - 1) / (rate * seconds))


def capacity(profile: Profile, *, max_batch: int) -> float:
    """Requests a second that one worker without exits can serve, at its best measured batch size up to
    ``max_batch``."""
    fits = [batch for batch in profile.batches if batch.batch_size <= max_batch] or list(profile.batches[:1])
    return max(batch.batch_size / batch.exact_seconds for batch in fits)
