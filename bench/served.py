"""Exits on against off through HTTP: ``python -m bench.served [NAME...] [--rounds 7] [--seconds 6] [--out
build/bench/served.json]``.

One worker on a core of its own, a client on another one, Poisson arrivals with latency from the intended send time.
Plans are found as in :mod:`bench.engine`, for single requests, on the first half of the inputs; the other half is sent.
Arms take turns with the same arrivals and inputs: ``off`` (exact, no exits), ``fp32`` (certified exits in the fp32
network), ``any`` (certified with every approximation) and the two ``uncertified`` (the boldest that hold the budget on
the inputs that are sent). Plans are audited at the rate that the product has after a certificate; exits off needs none.

Reported: the highest rate whose p95 over *all* requests (refused ones count as late) meets the objective, and a tight
one of four times the model's own time; at 0.3, 0.6 and 0.9 of what exits off can do the ratios of mean (of what was
answered), p50 and p95 of each round, their median and range, and the share refused; and how many answers differ from
the reference.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console

from bench.engine import keep, measured_profile, plans, scored
from bench.front import CAPACITY_SHARE, CLIENT_CORE, SERVER_CORE, find_capacities, on_core
from bench.openloop import OpenLoopClient, Target, Trial, infer
from bench.subjects import SUBJECTS, make_subject
from bench.validate_simulator import LoopbackWorker
from offramp_core.plan import Plan
from offramp_core.records import Records, records_from_arrays
from offramp_worker.bundle.lengths import used_length
from offramp_worker.bundle.load import Bundle, load_bundle
from offramp_worker.engine.execution.sessions import Sessions

LOADS = (0.3, 0.6, 0.9)
AUDIT_RATE = 0.02
ARMS = {
    "fp32": "fp32 certified",
    "fp32-uncertified": "fp32 uncertified",
    "any": "any certified",
    "any-uncertified": "any uncertified",
}
OBJECTIVE_SECONDS, OBJECTIVE_FACTOR = 0.05, 10.0  # the larger of this and so many times the model's own time
TIGHT_FACTOR = 4.0
DEFAULT = ("resnet56", "sst2")
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A bundle, the plans of the arms, the requests that are sent, and the labels of the reference for them."""

    bundle: Bundle
    plans: Mapping[str, Plan]
    requests: Sequence[bytes]
    reference: npt.NDArray[np.int64]
    model_seconds: float
    #: The scores of all inputs, of which the first half found the plans.
    records: Records


@dataclass(frozen=True, slots=True)
class Round:
    """Of one trial: mean of the answered requests, p50 and p95 of all (a refused one is infinitely late), in
    milliseconds; share refused."""

    mean: float
    p50: float
    p95: float
    refused: float


@dataclass
class Measured:
    """Of one arm: by load what each round gave, and what was answered."""

    capacity: float = 0.0
    tight_capacity: float = 0.0
    rounds: dict[float, list[Round]] = field(default_factory=dict)
    answered: int = 0
    refused: int = 0
    differ: int = 0


def prepared(bundle: Bundle, x: Array, *, seconds: float) -> Prepared:
    """Score the inputs, find plans on the first half, and encode the other half."""
    sessions = Sessions(bundle, threads=1)
    profile = measured_profile(bundle, x, seconds=seconds)
    arrays = scored(sessions, bundle, x, profile)
    half = len(x) // 2
    everything = records_from_arrays(arrays, batch_size=1)
    found = plans(everything.take(slice(0, half)), everything.take(slice(half, None)), bundle)
    manifest = bundle.manifest
    arms = {"off": Plan(manifest.backbone_digest, manifest.ramp_set_digest)}
    arms |= {arm: plan for arm, name in ARMS.items() if isinstance(plan := found.get(name), Plan)}
    spec = manifest.inputs[0]
    requests = []
    for row in x[half:]:
        one = row[None]
        if spec.varies and spec.pad is not None:  # without the padding, as a client would send it
            one = np.ascontiguousarray(one[:, : used_length(one, pad=spec.pad)])
        requests.append(infer(one, model=manifest.name, input_name=spec.name))
    return Prepared(bundle, arms, requests, arrays["reference"][half:], profile.batches[0].exact_seconds, everything)


class Arms:
    """One worker that serves the arms in turn, and its client."""

    def __init__(self, worker: LoopbackWorker, client: OpenLoopClient, made: Prepared) -> None:
        self._worker, self._client, self._made = worker, client, made
        self.measured = {arm: Measured() for arm in made.plans}

    def run(self, arm: str, *, rate: float, seconds: float, seed: int) -> Trial:
        """Load under one arm's plan."""
        self._worker.put_in_force(self._made.plans[arm], audit_rate=0.0 if arm == "off" else AUDIT_RATE)
        self._client.one_by_one(20, seed=seed)
        trial, seen = self._client.run(rate=rate, seconds=seconds, seed=seed), self.measured[arm]
        seen.answered += int(trial.ok.sum())
        seen.refused += int((~trial.ok).sum())
        seen.differ += int((trial.label != self._made.reference[trial.row])[trial.ok].sum())
        return trial

    def capacities(self, *, objective: float, seconds: float) -> dict[str, float]:
        """The highest rate of each arm whose p95 meets the objective."""

        def trial(arm: str, rate: float, seed: int) -> Trial:
            return self.run(arm, rate=rate, seconds=CAPACITY_SHARE * seconds, seed=seed)

        one = 1 / self._made.model_seconds
        return dict(find_capacities(trial, self.measured, objective=objective, low=0.1 * one, high=6.0 * one))

    def compare(self, *, load: float, rounds: int, seconds: float) -> None:
        """All arms under the same arrivals; who begins changes from round to round."""
        rate, arms = load * max(self.measured["off"].capacity, 1.0), list(self.measured)
        for seed in range(rounds):
            for arm in arms[seed % len(arms) :] + arms[: seed % len(arms)]:
                trial = self.run(arm, rate=rate, seconds=seconds, seed=seed)
                self.measured[arm].rounds.setdefault(load, []).append(as_round(trial))


def as_round(trial: Trial) -> Round:
    """What one trial says."""
    mean = float(trial.seconds[trial.ok].mean()) * 1e3 if trial.ok.any() else float("inf")
    return Round(mean, trial.percentile_ms(50), trial.percentile_ms(95), float((~trial.ok).mean()))


def summary(measured: Mapping[str, Measured]) -> dict[str, Any]:
    """Plain numbers; ratios are of the rounds' own pairs."""
    off = measured["off"]
    out: dict[str, Any] = {}
    for arm, seen in measured.items():
        row: dict[str, Any] = {
            "capacity": seen.capacity,
            "capacity_ratio": seen.capacity / off.capacity if off.capacity else None,
            "tight_capacity": seen.tight_capacity,
            "answered": seen.answered,
            "refused": seen.refused,
            "disagreement": seen.differ / max(1, seen.answered),
            "loads": {},
        }
        for load, rounds in seen.rounds.items():
            row["loads"][str(load)] = {"refused": float(np.mean([each.refused for each in rounds]))} | {
                name: _compared(
                    [getattr(each, name) for each in rounds], [getattr(each, name) for each in off.rounds[load]]
                )
                for name in ("mean", "p50", "p95")
            }
        out[arm] = row
    return out


def _compared(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float | None]:
    """Median, and median and range of the ratios; none where too many were refused in one of them for a figure."""
    ms = float(np.median(ours))
    if not np.isfinite([*ours, *theirs]).all():
        return {"ms": ms if np.isfinite(ms) else None, "ratio": None, "low": None, "high": None}
    ratios = np.array(ours) / np.array(theirs)
    return {"ms": ms, "ratio": float(np.median(ratios)), "low": float(ratios.min()), "high": float(ratios.max())}


@contextmanager
def serving(made: Prepared, *, objective: float) -> Iterator[Arms]:
    """A worker for a latency objective, in seconds, and its client, each on its core."""
    with on_core(SERVER_CORE):
        worker = LoopbackWorker(made.bundle.path, settings={"OFFRAMP_LATENCY_SECONDS": str(objective)})
    with worker, on_core(CLIENT_CORE):
        target = Target(
            "offramp",
            int(worker.url.rpartition(":")[2]),
            made.requests,
            lambda body: int(json.loads(body)["outputs"][0]["data"][0]),
        )
        with OpenLoopClient(target) as client:
            yield Arms(worker, client, made)


def bench(made: Prepared, *, rounds: int, seconds: float, console: Console) -> dict[str, Any]:
    """Everything about one bundle."""
    objective, tight = max(OBJECTIVE_SECONDS, OBJECTIVE_FACTOR * made.model_seconds), TIGHT_FACTOR * made.model_seconds
    with serving(made, objective=tight) as arms:
        of_tight = arms.capacities(objective=tight, seconds=seconds)
    with serving(made, objective=objective) as arms:
        for arm, capacity in arms.capacities(objective=objective, seconds=seconds).items():
            arms.measured[arm].capacity, arms.measured[arm].tight_capacity = capacity, of_tight[arm]
        for title, ms in (("capacity", objective), ("tight_capacity", tight)):
            rates = {arm: round(getattr(seen, title)) for arm, seen in arms.measured.items()}
            console.print(f"within {1e3 * ms:.1f} ms", rates)
        for load in LOADS:
            arms.compare(load=load, rounds=rounds, seconds=seconds)
            rows = summary(arms.measured).items()
            console.print(load, {arm: row["loads"].get(str(load)) for arm, row in rows if arm != "off"})
    return {
        "model_ms": 1e3 * made.model_seconds,
        "objective_ms": 1e3 * objective,
        "tight_ms": 1e3 * tight,
        "rounds": rounds,
        "seconds": seconds,
        "plans": {arm: plan.to_mapping() for arm, plan in made.plans.items()},
        "arms": summary(arms.measured),
    }


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="bench.served", description="exits on against off through HTTP")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(SUBJECTS)}; default: {' '.join(DEFAULT)}"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=6.0, help="of every trial")
    parser.add_argument("--price-seconds", type=float, default=30.0, help="to measure what the pieces cost, about")
    parser.add_argument("--out", type=Path, default=Path("build/bench/served.json"))
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(SUBJECTS):
        parser.error(f"{unknown.pop()} is none of {', '.join(SUBJECTS)}")
    console = Console()
    for name in options.names or DEFAULT:
        subject = make_subject(name, console)
        made = prepared(load_bundle(subject.bundle), subject.x, seconds=options.price_seconds)
        console.print(f"{name}: {', '.join(made.plans)}; one row takes {1e3 * made.model_seconds:.2f} ms")
        keep(options.out, name, bench(made, rounds=options.rounds, seconds=options.seconds, console=console))
    return 0


if __name__ == "__main__":
    sys.exit(main())
