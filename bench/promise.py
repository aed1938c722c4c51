"""The promise, simulated: `python -m bench.promise`.

(a) A certificate is wrong in at most a share delta of draws. (b) After a jump to 5 % the exits go off within so many
labels. (c) Over a year of drift, with a re-tuning every day, at most the budgeted share of all requests is answered
differently.

The world of (b) and (c) is one ramp whose scores are uniform and whose chance of a wrong answer is known at every
score, so the truth of every threshold is a formula and a year takes a tenth of a second. Allowance, exact test, planner
and detector are the product's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core import binomial
from offramp_core.certify import allowance, labels_for
from offramp_core.evaluate import evaluate_plan
from offramp_core.evidence import detector
from offramp_core.records import ExitCosts, Records
from offramp_core.tuning import TESTABLE_RATE, Proposed, TuningRequest, tune

Floats = npt.NDArray[np.float64]

BUDGET, DELTA = 0.01, 0.05
BLOCK = 20  # labels between two looks of the detector in the simulated year
RUN_LENGTH = 1_000_000.0  # offramp_core.protocol's default for the workers' detector


# --- a world with a known truth --------------------------------------------------------------------

_BASE, _POWER = 0.4, 3.0  # P(wrong | u) = min(1, _BASE u^_POWER e^hardness)
_DEPTH = 0.4  # of the backbone in front of the ramp
CUTS: Floats = np.linspace(0.0, 0.9, 61)[1:]


def true_rates(hardness: float) -> Floats:
    """Disagreement of the thresholds ``CUTS`` over all requests, (60,)."""
    scale = _BASE * np.exp(hardness)
    edge = min(1.0, scale ** (-1 / _POWER))  # beyond it every answer is wrong
    inside = np.minimum(CUTS, edge)
    return np.asarray(scale * inside ** (_POWER + 1) / (_POWER + 1) + np.maximum(0.0, CUTS - edge))


def sample(rng: np.random.Generator, hardness: float, n: int) -> npt.NDArray[np.int64]:
    """Cumulated disagreements of ``n`` audited requests under each threshold of ``CUTS``, (60,)."""
    per_cut = np.diff(true_rates(hardness), prepend=0.0)
    counts = rng.multinomial(n, np.append(per_cut, 1 - per_cut.sum()))[:-1]
    return np.cumsum(counts)


# --- (a) -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Certification:
    """``draws`` of ``labels`` each: how many certified a plan, how many of those break the budget; savings in
    fractions."""

    labels: int
    draws: int
    certified: int
    broken: int
    median_saving: float
    best_saving: float


def certification(pool: Records, *, labels: int, draws: int, seed: int = 0, best_saving: float = 0.0) -> Certification:
    """Tune on draws with replacement; the pool is the population, its rate the truth."""
    ids = tuple(f"r{i:02d}" for i in range(pool.n_ramps))
    request = TuningRequest(
        max_disagreement=BUDGET, delta=DELTA, test_index=1, ramp_ids=ids, backbone_digest="b", ramp_set_digest="r"
    )
    rng, savings, broken = np.random.default_rng(seed), [], 0
    for _ in range(draws):
        drawn = replace(pool.take(rng.integers(0, len(pool), labels)), time=np.arange(labels, dtype=np.float64))
        outcome = tune(drawn, request)
        seen = evaluate_plan(pool, outcome.plan, ids) if isinstance(outcome, Proposed) else None
        savings.append(0.0 if seen is None else seen.saving)
        broken += seen is not None and seen.disagreement > BUDGET
    proven = sum(s > 0 for s in savings)
    return Certification(labels, draws, proven, broken, float(np.median(savings)), best_saving)


def one_ramp_pool(n: int, *, seed: int) -> Records:
    """The world of this page as records."""
    rng = np.random.default_rng(seed)
    u = np.rint(rng.random((n, 1)) * 1e6) / 1e6
    wrong = rng.random((n, 1)) < np.minimum(1.0, _BASE * u**_POWER)
    costs = ExitCosts(np.array([_DEPTH, 1 - _DEPTH]), np.array([0.01]))
    return Records(u.astype(np.float32), ~wrong, np.ones(n, dtype=bool), costs)


# --- (b) -------------------------------------------------------------------------------------------


def labels_until_off(rate: float, *, seed: int, quiet: int = 3000, quiet_rate: float = 0.005, most: int = 5000) -> int:
    """Labels from an abrupt change to ``rate`` until the detector alarms, after ``quiet`` labels of a plan well within
    its budget."""
    rng = np.random.default_rng(seed)
    before = detector.watch(detector.init(), rng.random(quiet) < quiet_rate, p0=BUDGET, run_length=RUN_LENGTH)
    after = detector.watch(before.state, rng.random(most) < rate, p0=BUDGET, run_length=RUN_LENGTH)
    return after.alarm_after or most


# --- (c) -------------------------------------------------------------------------------------------

Spending = Callable[[int], float]  # level of test number j since the allowance began


def lasting(j: int) -> float:
    """The product's: sums to delta over all tests for ever."""
    return allowance(DELTA, j)


def slower(j: int) -> float:
    """1 / (j log^2 (j + 1)), normalised: decays more slowly and starts lower."""
    return float(DELTA / 3.388 / (j * np.log(j + 1) ** 2))


@dataclass(frozen=True, slots=True)
class Drift:
    """How hard the inputs are, in log multiples of the error rate: a slow walk around a season, and jumps."""

    walk: float = 0.03
    season: float = 0.4
    jumps_per_year: float = 4.0
    jump: float = 1.2


@dataclass(frozen=True, slots=True)
class Year:
    """One simulated year. Rates and savings are weighted by requests."""

    disagreement: float
    saving: float
    days_above: int
    days_off: int
    tests: int
    alarms: int


@dataclass
class _Service:
    """What a service remembers from day to day."""

    spending: Spending
    renewing: bool
    cut: int = -1  # index into CUTS of the plan that serves; -1: exits off
    tests: int = 0
    since: int = 0  # tests since the allowance began
    alarms: int = 0
    state: detector.DetectorState = field(default_factory=detector.init)
    fresh_n: int = 0
    fresh: npt.NDArray[np.int64] | None = None
    older_n: int = 0
    older: npt.NDArray[np.int64] | None = None

    def collect(self, n: int, counts: npt.NDArray[np.int64]) -> None:
        self.fresh_n, self.fresh = self.fresh_n + n, counts if self.fresh is None else self.fresh + counts

    def alarm(self) -> None:
        """Exits off; what was recorded says nothing about what comes."""
        self.alarms += 1
        self.cut, self.state = -1, detector.init()
        self.fresh_n, self.fresh, self.older_n, self.older = 0, None, 0, None
        if self.renewing:
            self.since = 0

    def retune(self) -> None:
        """One attempt: a test when there are labels enough and something to gain; its records are then used up."""
        level = self.spending(self.since + 1)
        if self.fresh is None or self.fresh_n < _wanted(level) or not self._promising():
            return
        self.tests, self.since = self.tests + 1, self.since + 1
        passed = binomial.cdf(self.fresh, np.full(len(CUTS), self.fresh_n), BUDGET) <= level
        reach = int(np.argmin(passed)) if not passed.all() else len(CUTS)
        if reach - 1 > self.cut:
            self.cut, self.state = reach - 1, detector.init()
        self.older_n, self.older, self.fresh_n, self.fresh = self.fresh_n, self.fresh, 0, None

    def _promising(self) -> bool:
        """Whether the records of the last test let hope for a plan two steps bolder than the one that serves."""
        if self.cut < 0 or self.older is None:
            return True
        hoped = int(np.searchsorted(self.older / self.older_n, 0.6 * BUDGET, side="right")) - 1
        return hoped >= self.cut + 2


_WANTED: dict[float, int] = {}


def _wanted(level: float) -> int:
    if level not in _WANTED:
        _WANTED[level] = labels_for(BUDGET * TESTABLE_RATE, budget=BUDGET, level=level, power=0.8) or 10**9
    return _WANTED[level]


def year(
    seed: int,
    *,
    drift: Drift | None = None,
    labels_per_day: int = 400,
    spending: Spending = lasting,
    renewing: bool = False,
    watched: bool = True,
) -> Year:
    """A year of daily re-tuning. The detector looks every ``BLOCK`` labels and turns the exits off for as long as there
    is no new plan."""
    rng, service = np.random.default_rng(seed), _Service(spending, renewing)
    hardness = hardness_by_day(rng, drift or Drift())
    weight = traffic_by_day()
    rates, saved, above, off = np.zeros(365), np.zeros(365), 0, 0
    for day in range(365):
        truth = true_rates(float(hardness[day]))
        rate = float(truth[service.cut]) if service.cut >= 0 else 0.0
        saving = float(CUTS[service.cut]) * (1 - _DEPTH) - 0.01 if service.cut >= 0 else 0.0
        share = _watch(service, rng, rate, labels_per_day) if watched and service.cut >= 0 else 1.0
        rates[day], saved[day] = share * rate, share * saving
        above += int(rates[day] > BUDGET)
        off += int(service.cut < 0)
        service.collect(labels_per_day, sample(rng, float(hardness[day]), labels_per_day))
        service.retune()
    total = float(weight.sum())
    return Year(float(weight @ rates) / total, float(weight @ saved) / total, above, off, service.tests, service.alarms)


def _watch(service: _Service, rng: np.random.Generator, rate: float, labels: int) -> float:
    """The share of the day until the detector turned the exits off; 1 when it did not."""
    for block, k in enumerate(rng.binomial(BLOCK, rate, labels // BLOCK).tolist(), start=1):
        service.state = detector.update(service.state, BLOCK, k, p0=BUDGET)
        if detector.alarm(service.state, run_length=RUN_LENGTH):
            service.alarm()
            return block * BLOCK / labels
    return 1.0


def traffic_by_day() -> Floats:
    """Requests of each day, relative to the quietest: weeks have busy days, (365,)."""
    return np.asarray(1 + 0.5 * np.sin(2 * np.pi * np.arange(365) / 7) ** 2)


def hardness_by_day(rng: np.random.Generator, drift: Drift) -> Floats:
    """A year of it, (365,)."""
    days = np.arange(365)
    season = drift.season * np.sin(2 * np.pi * (days / 365 + rng.random()))
    jumps = np.where(rng.random(365) < drift.jumps_per_year / 365, rng.normal(0, drift.jump, 365), 0.0)
    return np.asarray(season + np.cumsum(rng.normal(0, drift.walk, 365) + jumps).clip(-2, 2))


# --- output ----------------------------------------------------------------------------------------


def years(runs: int, **options: Any) -> dict[str, Any]:
    """Summary of several simulated years; ``options`` are those of :func:`year`."""
    seen = [year(seed, **options) for seed in range(runs)]
    worst = [y.disagreement for y in seen]
    return {
        "runs": runs,
        "kept": sum(y.disagreement <= BUDGET for y in seen),
        "median_disagreement": float(np.median(worst)),
        "worst_disagreement": max(worst),
        "median_saving": float(np.median([y.saving for y in seen])),
        "median_days_above": float(np.median([y.days_above for y in seen])),
        "most_days_above": max(y.days_above for y in seen),
        "median_days_off": float(np.median([y.days_off for y in seen])),
        "median_tests": float(np.median([y.tests for y in seen])),
        "median_alarms": float(np.median([y.alarms for y in seen])),
    }


def figures(*, draws: int, runs: int) -> dict[str, Any]:
    """All figures of this page."""
    pool = one_ramp_pool(100_000, seed=1)
    until = [labels_until_off(0.05, seed=s) for s in range(1000)]
    return {
        "certification": [asdict(certification(pool, labels=n, draws=draws)) for n in (1000, 2000)],
        "labels_until_off_after_jump_to_5_percent": {str(q): float(np.quantile(until, q)) for q in (0.5, 0.95, 0.99)},
        "year": {
            "lasting": years(runs),
            "slower": years(runs, spending=slower),
            "renewed at each alarm": years(runs, renewing=True),
            "lasting, no jumps": years(runs, drift=Drift(jumps_per_year=0.0)),
            "lasting, ten times the walk": years(runs, drift=Drift(walk=0.3)),
        },
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.promise", description="The promise, simulated.")
    parser.add_argument("--draws", type=int, default=200, help="certifications per sample size")
    parser.add_argument("--runs", type=int, default=200, help="simulated years per row")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    value = figures(draws=options.draws, runs=options.runs)
    if options.json:
        json.dump(value, sys.stdout, indent=2)
        print()
        return
    for c in value["certification"]:
        print(
            f"(a) {c['labels']:>5} labels: {c['certified']} of {c['draws']} draws certified, {c['broken']} break the "
            "budget, "
            f"median saving {c['median_saving']:.1%}"
        )
    off = value["labels_until_off_after_jump_to_5_percent"]
    print(
        f"(b) exits off after a jump to 5 %: median {off['0.5']:.0f} labels, 95 % within {off['0.95']:.0f}, 99 % "
        f"within {off['0.99']:.0f}"
    )
    for name, y in value["year"].items():
        print(
            f"(c) {name}: kept in {y['kept']} of {y['runs']} years; disagreement median "
            f"{y['median_disagreement']:.2%}, worst "
            f"{y['worst_disagreement']:.2%}; days above budget median {y['median_days_above']:.0f}, most "
            f"{y['most_days_above']}; "
            f"saving {y['median_saving']:.1%}, {y['median_tests']:.0f} tests, {y['median_alarms']:.0f} alarms, off "
            f"{y['median_days_off']:.0f} days"
        )


if __name__ == "__main__":
    main()
