"""Whether a canary that is slower than allowed is noticed: batch times that scatter little or much, and texts of mixed
length.

    python -m bench.slowness [--runs 400] [--rate 400] [--json]

Limits, exposure and gate are the product's own. *Before* means limits by batch size alone and never more than 2,000
judged batches. Simulated with fixed seeds, batches independent; :mod:`bench.evidence` has bursts.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from offramp_core.control.objects import ArmTally, BothArms
from offramp_core.control.rollouts.gates import HARMFUL_SLOWDOWN, GateInput, gate_level, slowness
from offramp_core.control.rollouts.slowness import SlownessBasis, slowness_basis
from offramp_core.evidence.slow import BatchShape, SlowLimits, length_class
from offramp_core.evidence.two_arm import log_e_share
from offramp_core.sketch import SecondsSketch, bucket_index

WEIGHTS = (5, 25, 50)
CONFIDENCE = 0.99
LEVEL = gate_level(confidence=CONFIDENCE, spent=0.0, n_steps=len(WEIGHTS), left=len(WEIGHTS))
MAX_OVERHEAD = 0.05
LARGEST = 32  # rows of a batch
SEEN_BEFORE = 4000  # batches of the stable plan, before the step
LONG_STEP = 4000  # judged batches of a step in which nothing is wrong
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batches:
    """Rows, class of the length and seconds of batches under the stable plan; all [n]."""

    rows: Ints
    length: Ints
    seconds: Floats


Traffic = Callable[[np.random.Generator, int], Batches]


def narrow(rng: np.random.Generator, n: int) -> Batches:
    """Images on a quiet machine."""
    return _images(rng, n, spread=0.08)


def wide(rng: np.random.Generator, n: int) -> Batches:
    """Images on a machine that others use too."""
    return _images(rng, n, spread=0.6)


def texts(rng: np.random.Generator, n: int) -> Batches:
    """Texts of 4 to 512 tokens, most of them short, on a quiet machine."""
    rows = _rows(rng, n)
    tokens = np.clip(rng.lognormal(math.log(60), 0.9, n), 4, 512).astype(np.int64)
    kinds, kind = np.unique(tokens, return_inverse=True)
    length = np.asarray([length_class(t) for t in kinds.tolist()])[kind]
    return Batches(rows, length, (0.002 + 2e-5 * rows * length) * rng.lognormal(0, 0.08, n))


TRAFFIC: dict[str, Traffic] = {"narrow": narrow, "wide": wide, "texts": texts}


def _rows(rng: np.random.Generator, n: int) -> Ints:
    return np.minimum(LARGEST, rng.geometric(0.35, n))


def _images(rng: np.random.Generator, n: int, *, spread: float) -> Batches:
    rows = _rows(rng, n)
    return Batches(rows, np.zeros(n, dtype=np.int64), (0.004 + 0.0008 * rows) * rng.lognormal(0, spread, n))


# --- a step ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Judge:
    """How a canary is judged: whether lengths are told apart, and the requests a second that say how many batches are
    cheap."""

    by_length: bool
    request_rate: float

    def basis(self, batches: Batches, *, weight: int) -> SlownessBasis:
        """What a step freezes when the stable plan's batches were these."""
        return slowness_basis(
            sketches_of(self.seen(batches)), request_rate=self.request_rate, weight=weight, level=LEVEL
        )

    def seen(self, batches: Batches) -> Batches:
        """Batches as far as they are told apart."""
        return batches if self.by_length else replace(batches, length=np.zeros_like(batches.length))


BEFORE = Judge(by_length=False, request_rate=0.0)


def sketches_of(batches: Batches) -> dict[BatchShape, SecondsSketch]:
    """Execution sketches by shape, as workers report them."""
    buckets = map(bucket_index, batches.seconds.tolist())
    counts: dict[BatchShape, dict[int, int]] = {}
    for (*shape, index), n in Counter(
        zip(batches.rows.tolist(), batches.length.tolist(), buckets, strict=True)
    ).items():
        counts.setdefault(BatchShape(*shape), {})[index] = n
    return {shape: SecondsSketch(histogram) for shape, histogram in counts.items()}


def rejects(
    rng: np.random.Generator,
    traffic: Traffic,
    judge: Judge,
    *,
    basis: SlownessBasis,
    weight: int,
    n: int,
    slowdown: float,
) -> bool:
    """Whether the gate rejects within ``n`` judged batches, looking after every batch, a canary of ``slowdown`` times
    the time."""
    ran = judge.seen(traffic(rng, n))
    canary = rng.random(n) < weight / 100
    limit = limits_of(ran, basis.limits)
    slow = ran.seconds * np.where(canary, slowdown, 1.0) > limit * np.where(canary, 1 + MAX_OVERHEAD, 1.0)
    of_canary, of_both = np.cumsum(slow & canary), np.cumsum(slow)
    looks = np.flatnonzero(slow & canary)  # evidence rises at no other batch
    evidence = [log_e_share(int(of_canary[i]), int(of_both[i]), share=weight / 100) for i in looks]
    if not evidence:
        return False
    most = int(np.argmax(evidence))
    at = looks[most]
    tally = BothArms(
        ArmTally(batches=n, judged=int(canary[: at + 1].sum()), slow=int(of_canary[at])),
        ArmTally(batches=n, judged=int((~canary[: at + 1]).sum()), slow=int(of_both[at] - of_canary[at])),
    )
    given = GateInput(tally, weight, 0.01, CONFIDENCE, len(WEIGHTS), basis.needed, certified=True, level=LEVEL)
    return slowness(given).state == "Rejected"


def limits_of(batches: Batches, limits: SlowLimits) -> Floats:
    """The limit of every batch; infinite where it has none."""
    shapes = {BatchShape(*shape) for shape in set(zip(batches.rows.tolist(), batches.length.tolist(), strict=True))}
    found = np.full(len(batches.rows), math.inf)
    for shape in shapes:
        limit = limits.of(shape)
        if limit is not None:
            found[(batches.rows == shape.rows) & (batches.length == shape.length)] = limit
    return found


# --- what is noticed -------------------------------------------------------------------------------


def noticed(rng: np.random.Generator, traffic: Traffic, judge: Judge, *, weight: int, runs: int) -> dict[str, Any]:
    """Share of canaries 1.2 x slower beyond the allowance that a step rejects by the time it may pass, each with limits
    of its own."""
    bases = [judge.basis(traffic(rng, SEEN_BEFORE), weight=weight) for _ in range(runs)]
    slower = (1 + MAX_OVERHEAD) * HARMFUL_SLOWDOWN
    found = sum(
        rejects(rng, traffic, judge, basis=basis, weight=weight, n=basis.needed, slowdown=slower) for basis in bases
    )
    middle = sorted(bases, key=lambda basis: basis.needed)[runs // 2]
    return {"waited": middle.needed, "excluded": middle.excluded, "noticed": found / runs}


def falsely_rejected(rng: np.random.Generator, traffic: Traffic, judge: Judge, *, runs: int, slowdown: float) -> int:
    """Rollouts of three long steps, of ``runs``, in which a canary within its allowance is rejected."""
    rejected = 0
    for _ in range(runs):
        basis = judge.basis(traffic(rng, SEEN_BEFORE), weight=min(WEIGHTS))  # whose limits are those of all steps
        rejected += any(
            rejects(rng, traffic, judge, basis=basis, weight=weight, n=LONG_STEP, slowdown=slowdown)
            for weight in WEIGHTS
        )
    return rejected


def report(*, runs: int, rate: float) -> list[dict[str, Any]]:
    """One row for each traffic, before and now."""
    rows = []
    for name, traffic in TRAFFIC.items():
        for when, judge in (("before", BEFORE), ("now", Judge(by_length=True, request_rate=rate))):
            rng = np.random.default_rng(5)
            steps = {weight: noticed(rng, traffic, judge, weight=weight, runs=runs) for weight in WEIGHTS}
            false = {
                str(slowdown): falsely_rejected(rng, traffic, judge, runs=runs, slowdown=slowdown) / runs
                for slowdown in (1.0, 1 + MAX_OVERHEAD)
            }
            rows.append({"traffic": name, "judged": when, "steps": steps, "falsely rejected": false})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="canaries of each kind")
    parser.add_argument("--rate", type=float, default=400.0, help="requests a second")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    rows = report(runs=options.runs, rate=options.rate)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(f"{row['traffic']}, {row['judged']}: falsely rejected {row['falsely rejected']}")
        for weight, step in row["steps"].items():
            print(
                f"  {weight:2} %: 1.2 x noticed in {step['noticed']:6.1%}; {step['waited']:,} batches, which exclude "
                f"{step['excluded']:g} x"
            )


if __name__ == "__main__":
    main()
