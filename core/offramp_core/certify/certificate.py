"""What is written down of a passed test, and how anybody checks it again.

A certificate names the plan as it is served, the budget and confidence it was tested for, what the test was allowed and
what it saw, the model and ramps it is about, and the records (by digest) that gave the counts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from offramp_core.certify.means import Losses, least_p_value, p_value
from offramp_core.certify.slices import SliceBudget, SliceResult, in_slice
from offramp_core.certify.tiers import TierResult
from offramp_core.errors import InvalidArgumentError
from offramp_core.evaluate import answered_labels, leave_position, plan_columns, served_losses
from offramp_core.evidence.one_arm import check_rate
from offramp_core.plan import Plan
from offramp_core.records import IndexArray, LabelArray, Records, SecondsArray

METHOD = "rank-path"
METHOD_LOSSES = "rank-path-losses"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A plan passed a held-out test."""

    #: ``rank-path``: exact binomial tests on an equal-weight sample. ``rank-path-losses``: tests of the mean of graded
    #: losses, by betting.
    method: str
    #: Content hash of the plan, thresholds as served.
    plan_hash: str
    #: budget and delta: P(disagreement > budget) <= delta over all tests ever run for the service.
    budget: float
    delta: float
    #: Which test this was, from 1; failed ones count.
    test_index: int
    #: What this test was allowed of ``delta``, see :func:`allowance`; shared evenly with the slices and the tiers.
    level: float
    #: n and k: held-out requests, and disagreements among them, non-exits included.
    n: int
    k: int
    #: P(Bin(n, budget) <= k), of n and k divided by the design effect; of graded losses
    #: :func:`offramp_core.certify.betting.betting_p_value`.
    p_value: float
    backbone_digest: str
    ramp_set_digest: str
    #: SHA-256 over the held-out records.
    records_digest: str
    #: Names of the records' columns, so that the records can be replayed without the bundle.
    ramp_ids: tuple[str, ...] = ()
    #: Time of the newest held-out record: the test had the ``n`` newest up to then.
    records_through: float | None = None
    #: Groups with a promise of their own, some perhaps of answers; those not certified must be stopped.
    slices: tuple[SliceResult, ...] = ()
    #: So many of the ``n`` labels are worth one (:mod:`offramp_core.certify.dependence`); 1 where they are independent.
    design_effect: float = 1.0
    #: Sum of graded losses over the held-out requests, of which ``k`` lost something; None where each disagreement
    #: loses all.
    lost: float | None = None
    #: Tiers whose own plans passed, each at its own budget and level.
    tiers: tuple[TierResult, ...] = ()
    certified: ClassVar[bool] = True

    @property
    def disagreement(self) -> float:
        """Mean loss on the held-out requests."""
        return (self.k if self.lost is None else self.lost) / self.n

    @property
    def seen(self) -> str:
        """What the test saw, for people: ``3 of 1,200 held-out answers differed``."""
        if self.lost is None:
            return f"{self.k} of {self.n:,} held-out answers differed"
        return f"{self.n:,} held-out answers lost {self.disagreement:.2%} on average"

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; rates are decimal strings that read back to the same number, and what does not apply is left
        out."""
        value = {
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
            "rampIds": list(self.ramp_ids),
            "recordsThrough": None if self.records_through is None else repr(self.records_through),
            "slices": [s.to_mapping() for s in self.slices],
            "designEffect": None if self.design_effect == 1 else repr(self.design_effect),
            "lost": None if self.lost is None else repr(self.lost),
            "tiers": [t.to_mapping() for t in self.tiers],
        }
        return {name: item for name, item in value.items() if item is not None and item != []}

    @classmethod
    def from_mapping(cls, value: Mapping[str, Any]) -> Certificate:
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
                ramp_ids=tuple(str(i) for i in value.get("rampIds", ())),
                records_through=_optional(value.get("recordsThrough")),
                slices=tuple(SliceResult.from_mapping(s) for s in value.get("slices", ())),
                design_effect=float(value.get("designEffect", 1.0)),
                lost=_optional(value.get("lost")),
                tiers=tuple(TierResult.from_mapping(t) for t in value.get("tiers", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgumentError(f"not a certificate ({error}): {value!r}") from error


Claim = Certificate | SliceResult | TierResult
"""What a test says of all requests, of a slice, or of a tier."""


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def allowance(delta: float, test_index: int) -> float:
    """The share of ``delta`` that test number ``test_index`` (from 1) may spend: 6 delta / (pi^2 j^2), which sums to
    delta.

    Raises
    ------
    InvalidArgumentError
        ``delta`` is not in (0, 1), or the index is below 1.
    """
    check_rate("delta", delta)
    if test_index < 1:
        raise InvalidArgumentError(f"test_index is {test_index}; tests are counted from 1")
    return 6 * delta / (math.pi**2 * test_index**2)


def verify_certificate(
    certificate: Certificate, plan: Plan, *, records: Records | None = None, ramp_ids: Sequence[str] = ()
) -> str | None:
    """Re-check a certificate: None when it holds, else the first reason why not.

    Parameters
    ----------
    certificate, plan
        Without ``records`` only what follows from these two is checked.
    records : Records, optional
        The held-out records, or a longer file that still holds them: the counts are then made again.
    ramp_ids : sequence of str
        Names of the columns of the plan's precision; by default those in the certificate.
    """
    reason = _against_plan(certificate, plan) or _against_its_own_counts(certificate)
    if reason or records is None:
        return reason
    if plan.precision not in (records.precision, *records.others):
        return f"its plan runs at {plan.precision}, which the records do not hold"
    records = records.at(plan.precision)
    return _against_records(certificate, plan, records, tuple(ramp_ids) or certificate.ramp_ids)


def _against_plan(certificate: Certificate, plan: Plan) -> str | None:
    if certificate.plan_hash != plan.content_hash:
        return f"it belongs to plan {certificate.plan_hash}, not to {plan.content_hash}"
    if (certificate.backbone_digest, certificate.ramp_set_digest) != (plan.backbone_digest, plan.ramp_set_digest):
        return "its digests are not the plan's"
    strange = [t.title for t in certificate.tiers if t.name not in plan.menu]
    return f"{strange[0]} is none of the plan's" if strange else None


def _against_its_own_counts(certificate: Certificate) -> str | None:
    try:
        return _level_reason(certificate) or _p_value_reason(certificate)
    except InvalidArgumentError as error:
        return str(error)


def _level_reason(certificate: Certificate) -> str | None:
    allowed = allowance(certificate.delta, certificate.test_index)
    spent = certificate.level + sum(s.level for s in certificate.slices) + sum(t.level for t in certificate.tiers)
    if not 0 < spent <= allowed * (1 + 1e-9):
        return f"level {spent} exceeds the allowance {allowed} of test {certificate.test_index}"
    return None


def _p_value_reason(certificate: Certificate) -> str | None:
    if certificate.method not in (METHOD, METHOD_LOSSES):
        return f"method {certificate.method!r} is unknown; only {METHOD} and {METHOD_LOSSES} can be verified"
    graded = certificate.method == METHOD_LOSSES
    claims: list[tuple[str, Claim]] = [("", certificate)]
    claims += [(f"{s.title}: ", s) for s in certificate.slices]
    claims += [(f"{t.title}: ", t) for t in certificate.tiers]
    for of, claim in claims:
        if graded != (claim.lost is not None):
            return f"{of}lost belongs to {METHOD_LOSSES} and to it alone; the method is {certificate.method}"
        if reason := _graded_reason(claim) if graded else _counted_reason(claim):
            return of + reason
    return None


def _counted_reason(claim: Claim) -> str | None:
    """What is wrong with a claim about counts; the test is made again."""
    counted = p_value(claim.k, claim.n, budget=claim.budget, design_effect=claim.design_effect)
    if claim.certified and not counted <= claim.level:
        return f"k={claim.k} of n={claim.n} has p={counted:.3g}, above the level {claim.level:.3g}"
    if not math.isclose(counted, claim.p_value, rel_tol=1e-6, abs_tol=1e-300):
        return f"p_value {claim.p_value} is not that of its counts ({counted})"
    return None


def _graded_reason(claim: Claim) -> str | None:
    """What is wrong with a claim about losses as far as it can be told without them: their sum allows no smaller
    p-value than some."""
    assert claim.lost is not None
    if not claim.lost <= claim.k <= claim.n:
        return f"{claim.k} of n={claim.n} answers cannot have lost {claim.lost}"
    least = least_p_value(claim.lost, claim.n, budget=claim.budget, design_effect=claim.design_effect)
    if claim.certified and not claim.p_value <= claim.level:
        return f"p={claim.p_value:.3g} is above the level {claim.level:.3g}"
    if not least * (1 - 1e-6) <= claim.p_value <= 1:
        return (
            f"losses that sum to {claim.lost} of n={claim.n} have p={least:.3g} at least; it says {claim.p_value:.3g}"
        )
    return None


def _against_records(certificate: Certificate, plan: Plan, records: Records, ramp_ids: tuple[str, ...]) -> str | None:
    found = held_out_rows(certificate, records)
    if found is None:
        return "these are not the records it was made from"
    if len(ramp_ids) != records.n_ramps:
        return f"it names {len(ramp_ids)} ramps and the records have {records.n_ramps} columns"
    records = records.take(found)
    replayed = answers(records, plan, ramp_ids, labels=_has_classes(certificate.slices))
    reason = _recounted(replayed.losses, certificate)
    for s in () if reason else certificate.slices:
        if reason := _recounted(replayed.losses.take(in_slice(s, records, replayed.labels)), s):
            return f"{s.title}: {reason}"
    for t in () if reason else certificate.tiers:
        if reason := _recounted(answers(records, plan.menu[t.name], ramp_ids).losses, t):
            return f"{t.title}: {reason}"
    return reason


def _recounted(seen: Losses, claim: Claim) -> str | None:
    """What a claim says of losses that are not so; graded ones are tested again, as their sum alone does not tell the
    p-value."""
    if (len(seen), seen.count) != (claim.n, claim.k):
        return f"the records give k={seen.count} of n={len(seen)}; it says {claim.k} of {claim.n}"
    if claim.lost is None:
        return None
    if not math.isclose(seen.total, claim.lost, rel_tol=1e-9, abs_tol=1e-9):
        return f"the records give losses of {seen.total}; it says {claim.lost}"
    p = seen.p_value(budget=claim.budget, design_effect=claim.design_effect)
    if not math.isclose(p, claim.p_value, rel_tol=1e-6, abs_tol=1e-300):
        return f"p_value {claim.p_value} is not that of its losses ({p})"
    return None


def held_out_rows(certificate: Certificate, records: Records) -> IndexArray | None:
    """Rows, in the order of the test, of the records a certificate was made from; None when they are not all there.

    A file may hold more than the test had: a record pool goes on growing. The test had the ``n`` newest up to
    ``records_through``.
    """
    everything: IndexArray = np.arange(len(records))
    candidates = [everything] if len(records) == certificate.n else []
    if records.time is not None:
        order = np.argsort(records.time, kind="stable")
        through = np.inf if certificate.records_through is None else certificate.records_through
        upto = int(np.searchsorted(records.time[order], through, side="right"))
        candidates.append(order[max(0, upto - certificate.n) : upto])
    for rows in candidates:
        if records_digest(records.take(rows), slices=certificate.slices) == certificate.records_digest:
            return rows
    return None


def _has_classes(slices: Sequence[SliceBudget | SliceResult]) -> bool:
    return any(s.of == "Answer" for s in slices)


def records_digest(records: Records, *, slices: Sequence[SliceBudget | SliceResult] = ()) -> str:
    """SHA-256 (hex) over scores, agreements, times and slices, and for ``slices`` of answers what was answered;
    independent of the machine."""
    with_labels = _has_classes(slices)
    digest = hashlib.sha256(repr(records.uncertainty.shape).encode())
    digest.update(np.ascontiguousarray(records.uncertainty, dtype="<f4").tobytes())
    digest.update(np.packbits(records.agrees).tobytes())
    digest.update(np.packbits(records.final_agrees).tobytes())
    for name, values, kind in (
        ("time", records.time, "<f8"),
        ("slice", records.slice_id, "<i8"),
        ("prediction", records.prediction if with_labels else None, "<i8"),
        ("final", records.final if with_labels else None, "<i8"),
        ("loss", records.loss if records.graded else None, "<f4"),
        ("final_loss", records.final_loss if records.graded else None, "<f4"),
    ):
        if values is not None:
            digest.update(b"" if name == "time" else name.encode())  # times were there first and had no name
            digest.update(np.ascontiguousarray(values, dtype=kind).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Answers:
    """What a plan does to each record, (n,) each: what its answer loses (``losses``), the ``seconds`` it takes, and
    what it says (``labels``; -1 where nobody asked)."""

    losses: Losses
    seconds: SecondsArray
    labels: LabelArray


def answers(records: Records, plan: Plan, ramp_ids: Sequence[str], *, labels: bool = False) -> Answers:
    """Replay a plan on records of its own chain; ``labels`` asks for what it says, which records need not hold."""
    active, thresholds = plan_columns(plan, ramp_ids)
    left = leave_position(records, active, thresholds)
    predicted = answered_labels(records, active, left) if labels else np.full(len(records), -1, dtype=np.int64)
    losses = Losses(served_losses(records, active, left), records.graded)
    return Answers(losses, records.costs.leave_seconds(active)[left], predicted)
