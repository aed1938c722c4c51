"""Certificates: a held-out test that a plan keeps its accuracy budget.

A plan found by search looks better on its own records than it is: tuned to 1 % it truly disagrees more often
in most cases. So the records are split by time. The older part (A) finds a plan; its thresholds, scaled
together in A's own rank space from cautious to bold, make a path; the newer part (B) tests the path in that
order with an exact binomial test each, and stops at the first failure. Testing in a fixed order costs nothing:
with probability at least 1 - level *every* accepted plan keeps the budget (fixed-sequence Learn-then-Test:
Angelopoulos, Bates, Candès, Jordan and Lei, 2021, arXiv:2110.01052), so the one that saves most may be taken.

Plans are tested as they will be served: with thresholds rounded down to the six decimals a plan stores.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import numpy as np

from offramp_core import binomial
from offramp_core.errors import InvalidArgumentError
from offramp_core.evaluate import Evaluation, evaluate_plan
from offramp_core.evidence.one_arm import check_counts, check_rate
from offramp_core.plan import Execution, Plan, RampThreshold
from offramp_core.records import Records
from offramp_core.search.grid import cautious_threshold

METHOD = "rank-path"
# How far the thresholds of the plan found on A are scaled: from a tenth of their ranks to half as bold again.
PATH_SCALES = tuple(float(g) for g in np.linspace(0.1, 1.5, 36))

NotCertifiedReason = Literal["TooFewLabels", "NothingSaves", "OverBudget"]


@dataclass(frozen=True, slots=True)
class Certificate:
    """A plan passed a held-out test.

    Attributes
    ----------
    plan_hash : str
        Content hash of the plan, thresholds as served.
    budget, delta : float
        P(disagreement > budget) <= delta over all tests ever run for the service.
    test_index : int
        Which test this was, from 1; failed ones count.
    level : float
        What this test was allowed of ``delta``, see :func:`allowance`.
    n, k : int
        Held-out requests, and disagreements among them, non-exits included.
    p_value : float
        P(Bin(n, budget) <= k).
    records_digest : str
        SHA-256 over the held-out records.
    """

    method: str
    plan_hash: str
    budget: float
    delta: float
    test_index: int
    level: float
    n: int
    k: int
    p_value: float
    backbone_digest: str
    ramp_set_digest: str
    records_digest: str

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; rates are decimal strings that read back to the same number."""
        return {
            "method": self.method,
            "planHash": self.plan_hash,
            "budget": repr(self.budget),
            "delta": repr(self.delta),
            "testIndex": self.test_index,
            "level": repr(self.level),
            "n": self.n,
            "k": self.k,
            "pValue": repr(self.p_value),
            "backboneDigest": self.backbone_digest,
            "rampSetDigest": self.ramp_set_digest,
            "recordsDigest": self.records_digest,
        }

    @classmethod
    def from_mapping(cls, value: dict[str, Any]) -> Certificate:
        """Parse :meth:`to_mapping`.

        Raises
        ------
        InvalidArgumentError
            A field is missing or is not what it should be.
        """
        try:
            return cls(
                method=str(value["method"]),
                plan_hash=str(value["planHash"]),
                budget=float(value["budget"]),
                delta=float(value["delta"]),
                test_index=int(value["testIndex"]),
                level=float(value["level"]),
                n=int(value["n"]),
                k=int(value["k"]),
                p_value=float(value["pValue"]),
                backbone_digest=str(value["backboneDigest"]),
                ramp_set_digest=str(value["rampSetDigest"]),
                records_digest=str(value["recordsDigest"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidArgumentError(f"not a certificate ({error}): {value!r}") from error


@dataclass(frozen=True, slots=True)
class NotCertified:
    """No plan passed. ``needed_more`` labels would probably change that; None when more of the same would not."""

    reason: NotCertifiedReason
    needed_more: int | None = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What a certificate is about, besides thresholds: the names and digests that make threshold vectors plans."""

    ramp_ids: tuple[str, ...]
    backbone_digest: str
    ramp_set_digest: str
    execution: Execution = "Auto"

    def plan(self, active: Sequence[int], thresholds: Sequence[Decimal]) -> Plan:
        """The plan of a threshold vector; ramps that nothing can leave at are left out."""
        ramps = tuple(RampThreshold(self.ramp_ids[i], t) for i, t in zip(active, thresholds, strict=True) if t > 0)
        return Plan(self.backbone_digest, self.ramp_set_digest, ramps, execution=self.execution)


@dataclass(frozen=True, slots=True)
class Certified:
    """A plan, its certificate, and what it did on the records that tested it."""

    plan: Plan
    certificate: Certificate
    on_test: Evaluation


def allowance(delta: float, test_index: int) -> float:
    """The share of ``delta`` that test number ``test_index`` (from 1) may spend: 6 delta / (pi^2 j^2), which sums to delta.

    Raises
    ------
    InvalidArgumentError
        ``delta`` is not in (0, 1), or the index is below 1.
    """
    check_rate("delta", delta)
    if test_index < 1:
        raise InvalidArgumentError(f"test_index is {test_index}; tests are counted from 1")
    return 6 * delta / (math.pi**2 * test_index**2)


def p_value(k: int, n: int, *, budget: float) -> float:
    """P(Bin(n, budget) <= k): how often a plan exactly at its budget would look this good."""
    check_counts(k, n)
    check_rate("budget", budget)
    return float(binomial.cdf(k, n, budget))


def rank_path(records_a: Records, active: Sequence[int], thresholds: Sequence[Decimal]) -> list[tuple[Decimal, ...]]:
    """The plan's thresholds scaled together in A's rank space, cautious first, rounded down, without repeats.

    A threshold's rank is the number of records of A below it at that ramp, leavers at earlier ramps included.
    """
    sorted_scores = [np.sort(records_a.uncertainty[:, i]) for i in active]
    ranks = [int(np.searchsorted(s, np.float32(float(t)))) for s, t in zip(sorted_scores, thresholds, strict=True)]
    path: list[tuple[Decimal, ...]] = []
    for scale in PATH_SCALES:
        step = tuple(
            cautious_threshold(float(s[min(len(s) - 1, int(scale * rank))])) if rank else Decimal(0)
            for s, rank in zip(sorted_scores, ranks, strict=True)
        )
        if any(step) and step not in path:
            path.append(step)
    return path


def rank_path_certificate(
    records_a: Records,
    records_b: Records,
    *,
    active: Sequence[int],
    thresholds: Sequence[Decimal],
    subject: Subject,
    budget: float,
    delta: float,
    test_index: int = 1,
) -> Certified | NotCertified:
    """Test the rank path of a plan found on A on the held-out records B.

    Parameters
    ----------
    records_a, records_b : Records
        B must be disjoint from A, newer, and unused by any earlier test.
    active, thresholds
        The plan found on A, ramp columns and thresholds.
    subject : Subject
        Names and digests.
    budget, delta : float
        Allowed disagreement over all requests, and the probability with which the promise may fail.
    test_index : int
        Number of this test for the service, from 1.

    Returns
    -------
    Certified or NotCertified
        Too little data is a value, never an exception.
    """
    level = allowance(delta, test_index)
    path = rank_path(records_a, active, thresholds)
    if not path:
        return NotCertified("NothingSaves")
    n = len(records_b)
    least = fewest_labels(budget, level)
    if n < least:
        return NotCertified("TooFewLabels", least - n)
    accepted: list[tuple[Plan, Evaluation]] = []
    for step in path:
        plan = subject.plan(active, step)
        seen = evaluate_plan(records_b, plan, subject.ramp_ids)
        if p_value(seen.disagreements, n, budget=budget) > level:
            if not accepted:
                return NotCertified("OverBudget", more_labels(seen.disagreements, n, budget=budget, level=level))
            break
        accepted.append((plan, seen))
    plan, seen = max(accepted, key=lambda pair: pair[1].saving)
    if seen.saving <= 0:
        return NotCertified("NothingSaves")
    certificate = Certificate(
        METHOD, plan.content_hash, budget, delta, test_index, level, n, seen.disagreements,
        p_value(seen.disagreements, n, budget=budget), plan.backbone_digest, plan.ramp_set_digest, records_digest(records_b),
    )  # fmt: skip
    return Certified(plan, certificate, seen)


def verify_certificate(
    certificate: Certificate, plan: Plan, *, records: Records | None = None, ramp_ids: Sequence[str] = ()
) -> str | None:
    """Re-check a certificate: None when it holds, else the first reason why not.

    Without ``records`` only what follows from the certificate and the plan is checked; with the held-out records (and the names of
    their columns) the counts are made again.
    """
    reason = _against_plan(certificate, plan) or _against_its_own_counts(certificate)
    return reason if reason or records is None else _against_records(certificate, plan, records, ramp_ids)


def _against_plan(certificate: Certificate, plan: Plan) -> str | None:
    if certificate.plan_hash != plan.content_hash:
        return f"it belongs to plan {certificate.plan_hash}, not to {plan.content_hash}"
    if (certificate.backbone_digest, certificate.ramp_set_digest) != (plan.backbone_digest, plan.ramp_set_digest):
        return "its digests are not the plan's"
    return None


def _against_its_own_counts(certificate: Certificate) -> str | None:
    try:
        level = allowance(certificate.delta, certificate.test_index)
        value = p_value(certificate.k, certificate.n, budget=certificate.budget)
    except InvalidArgumentError as error:
        return str(error)
    if certificate.method != METHOD:
        return f"method {certificate.method!r} is unknown; only {METHOD} can be verified"
    if certificate.level > level * (1 + 1e-9):
        return f"level {certificate.level} exceeds the allowance {level} of test {certificate.test_index}"
    if value > certificate.level:
        return f"k={certificate.k} of n={certificate.n} has p={value:.3g}, above the level {certificate.level:.3g}"
    if not math.isclose(value, certificate.p_value, rel_tol=1e-6, abs_tol=1e-300):
        return f"p_value {certificate.p_value} is not that of its counts ({value})"
    return None


def _against_records(certificate: Certificate, plan: Plan, records: Records, ramp_ids: Sequence[str]) -> str | None:
    if records_digest(records) != certificate.records_digest:
        return "these are not the records it was made from"
    seen = evaluate_plan(records, plan, ramp_ids)
    if (seen.n, seen.disagreements) != (certificate.n, certificate.k):
        return f"the records give k={seen.disagreements} of n={seen.n}; it says {certificate.k} of {certificate.n}"
    return None


def records_digest(records: Records) -> str:
    """SHA-256 (hex) over scores, agreements and times, independent of the machine."""
    digest = hashlib.sha256(repr(records.uncertainty.shape).encode())
    digest.update(np.ascontiguousarray(records.uncertainty, dtype="<f4").tobytes())
    digest.update(np.packbits(records.agrees).tobytes())
    digest.update(np.packbits(records.final_agrees).tobytes())
    if records.time is not None:
        digest.update(np.ascontiguousarray(records.time, dtype="<f8").tobytes())
    return digest.hexdigest()


# --- planning --------------------------------------------------------------------------------------


def fewest_labels(budget: float, level: float) -> int:
    """Held-out labels below which not even a plan without a single disagreement passes."""
    check_rate("budget", budget)
    check_rate("level", level)
    return math.ceil(math.log(level) / math.log1p(-budget) - 1e-9)


def labels_for(rate: float, *, budget: float, level: float, power: float = 0.9) -> int | None:
    """Held-out labels with which a plan of true disagreement ``rate`` passes with ``power``; None when it never does.

    The power saws a little with n, so this is an n that suffices and not always the very first.
    """
    if rate >= budget:
        return None
    low = fewest_labels(budget, level) - 1
    high = low + 1
    while _pass_probability(high, rate, budget=budget, level=level) < power:
        low, high = high, high * 2
        if high > 100_000_000:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if _pass_probability(middle, rate, budget=budget, level=level) >= power:
            high = middle
        else:
            low = middle
    return high


def more_labels(k: int, n: int, *, budget: float, level: float) -> int | None:
    """About how many more labels a plan with ``k`` of ``n`` needs to pass if it goes on like that; None if it would not."""
    needed = labels_for((k + 0.5) / (n + 1), budget=budget, level=level, power=0.5)
    return None if needed is None else max(1, needed - n)


def largest_passing_count(n: int, *, budget: float, level: float) -> int:
    """Most disagreements among ``n`` labels that still pass; -1 when none does."""
    k = int(binomial.ppf(level, n, budget))  # smallest k with cdf >= level
    while k >= 0 and binomial.cdf(k, n, budget) > level:
        k -= 1
    return k


def _pass_probability(n: int, rate: float, *, budget: float, level: float) -> float:
    k = largest_passing_count(n, budget=budget, level=level)
    return float(binomial.cdf(k, n, rate)) if k >= 0 else 0.0


__all__ = [
    "METHOD", "Certificate", "Certified", "NotCertified", "Subject", "allowance", "fewest_labels", "labels_for", "largest_passing_count",
    "more_labels", "p_value", "rank_path", "rank_path_certificate", "records_digest", "verify_certificate",
]  # fmt: skip
