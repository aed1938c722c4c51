"""Ten years of a tuner that never rests: ``python -m bench.decade [--json]``.

The product's tuner is asked in every hour that it may be, by traffic and budget. A test takes all fresh labels; one in
five fails by little and asks for half as many again, the others end with a plan or with none that is better. A month is
lived through, then as many tests are counted as ten years of its pace come to, which is more than there would be, since
each is stricter than the last; then a month more. Told are the time to the first certificate and to the last test, and
the share of the last month in which audits were more than a quiet service has.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.control_fleet import MANIFEST, service_of
from bench.control_world import BACKBONE, RAMP_SET
from bench.replays import OUT as OUT_FOLDER
from bench.report.streams import span
from offramp_core.control.objects import Config, ConfigStatus, Service, TuningStatus
from offramp_core.control.snapshot import Gathered, Load, Observed, RecordStore, Snapshot
from offramp_core.control.stable.audit import eager_rate, quiet_rate
from offramp_core.control.tuning.tuner import TunerView, tune_or_wait
from offramp_core.plan import exits_off_plan
from offramp_core.reasons import Reason
from offramp_core.records import ExitCosts, Records
from offramp_core.tuning import NeedsLabels, NoGain, TuningOutcome

OUT = OUT_FOLDER / "decade.json"
RATES = (0.1, 1.0, 10.0, 1000.0)  # requests per second
BUDGETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
UTILIZATION = 0.3
FAILING = 5  # every so many tests fail by little
MONTH, YEAR = 30 * 86_400.0, 365 * 86_400.0
BEGIN = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Decade:
    """``first`` and ``last`` are seconds to the first certificate and to the last test, from when labels for it were
    wanted; ``eager`` is a share of time. ``hopeless`` is what the status says where no test is ever run."""

    rate: float
    budget: float
    tests: int
    first: float
    last: float
    eager: float
    hopeless: str = ""


def decade(rate: float, budget: float, *, years: float = 10.0) -> Decade:
    """Live through some years of attempts."""
    objective = {"latency": {"threshold": "1s"}, "accuracy": {"maxDisagreement": f"{budget:g}"}}
    service = service_of({**MANIFEST, "objective": objective})
    stable = Config(
        "sim-off", exits_off_plan(backbone_digest=BACKBONE, ramp_set_digest=RAMP_SET), ConfigStatus("Baseline")
    )
    life = _Life(service, stable, Load(rate, UTILIZATION, rate))
    life.live(MONTH)
    if life.hopeless:
        return Decade(rate, budget, 0, 0.0, 0.0, 0.0, life.hopeless)
    life.status = replace(life.status, tests_run=round(life.status.tests_run * years * YEAR / MONTH))
    life.eager = 0.0
    life.live(MONTH)
    return Decade(rate, budget, life.status.tests_run, life.first, life.last, life.eager / MONTH)


@dataclass
class _Life:
    """A service's tuner and audits; ``labels`` are fresh, ``first`` and ``last`` the seconds that tests waited for
    theirs."""

    service: Service
    stable: Config
    load: Load
    status: TuningStatus = field(default_factory=TuningStatus)
    now: float = BEGIN
    labels: float = 0.0
    wanted_since: float = BEGIN
    first: float = 0.0
    last: float = 0.0
    eager: float = 0.0
    outcome: TuningOutcome | None = None
    hopeless: str = ""

    def live(self, seconds: float) -> None:
        """So long, or until there is no hope."""
        end = self.now + seconds
        while self.now < end and not self.hopeless:
            pause = self._pass()
            many = self.status.audit == "Eager"
            self.eager += pause * (many and self.status.audit_rate > quiet_rate(self.load))
            self.labels += pause * self.load.request_rate * self.status.audit_rate * many
            self.now += pause

    def _pass(self) -> float:
        """One look of the tuner; how long nothing happens then."""
        store = RecordStore(_fresh(int(self.labels), self.now), ("r00",), BACKBONE, RAMP_SET)
        configs = {self.stable.name: self.stable}
        snapshot = Snapshot(Gathered(self.service, configs), Observed((), store, load=self.load), self.outcome)
        told = tune_or_wait(TunerView(snapshot, self.status, self.stable, None, self.now))
        self.outcome, self.status = None, _audited(told.status, self.load, self.now)
        status = self.status
        if told.request is not None:
            self.outcome = _outcome(status, self.now)
            self.last, self.labels = self.now - self.wanted_since, 0.0
            self.first = self.first or (self.last if isinstance(self.outcome, NoGain) else 0.0)
            return 1.0
        if status.state == Reason.COLLECTING_LABELS:
            return max(1.0, (status.labels_needed - self.labels) / (self.load.request_rate * status.audit_rate))
        if status.labels_needed and not status.tests_run:
            self.hopeless = status.message
        pause = max(1.0, (status.next_attempt_at or self.now) - self.now)
        self.wanted_since, self.labels = (
            self.now + pause,
            0.0,
        )  # few, and with those of before only as few of these count
        return pause


def _outcome(status: TuningStatus, now: float) -> TuningOutcome:
    if status.tests_run % FAILING == FAILING - 1:
        return NeedsLabels(0, round(1.5 * status.labels_needed), 1, now)
    return NoGain("NotBetter", 0.2, status.labels, 1, now)


def _audited(status: TuningStatus, load: Load, now: float) -> TuningStatus:
    """Audits as a pass of the control loop sets them."""
    wanted = "Eager" if status.state in (Reason.COLLECTING_LABELS, Reason.TUNING) else "Quiet"
    if wanted == status.audit:
        return status
    if wanted == "Eager":
        return replace(status, audit="Eager", audit_rate=eager_rate(load), eager_since_at=now)
    return replace(status, audit="Quiet", audit_rate=quiet_rate(load), eager_since_at=None)


def _fresh(n: int, now: float) -> Records:
    costs = ExitCosts(np.ones(2), np.zeros(1))
    return Records(
        np.zeros((n, 1), np.float32), np.ones((n, 1), bool), np.ones(n, bool), costs, time=np.full(n, now - 1e-3)
    )


def table(decades: Sequence[Decade]) -> Table:
    """For people."""
    shown = Table("requests/s", "budget", "tests", "first certificate", "next, at the end", "audits many")
    for d in decades:
        if d.hopeless:
            shown.add_row(f"{d.rate:g}", f"{d.budget:.2%}", "0", d.hopeless)
        else:
            shown.add_row(
                f"{d.rate:g}", f"{d.budget:.2%}", f"{d.tests:,}", span(d.first), span(d.last), f"{d.eager:.1%}"
            )
    return shown


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit code 1 where a tuner comes to a stop without saying why."""
    parser = argparse.ArgumentParser(prog="bench.decade", description="ten years of a tuner that never rests")
    parser.add_argument("--years", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(arguments)
    cells = [(rate, budget) for rate in RATES for budget in BUDGETS]
    found = [
        decade(rate, budget, years=options.years)
        for rate, budget in track(cells, "decades", console=Console(stderr=True))
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(d) for d in found], indent=1) + "\n")
    if options.json:
        print(json.dumps([asdict(d) for d in found]))
    else:
        Console().print(table(found))
    return 1 if any(not d.tests and not d.hopeless for d in found) else 0


if __name__ == "__main__":
    sys.exit(main())
