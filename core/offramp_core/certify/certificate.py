"""What is written down of a passed test, and how anybody checks it again.

A certificate names the plan as it is served, the budget and confidence it was tested for, what the test was allowed and what it saw,
the model and ramps it is about, and the records (by digest) that gave the counts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from offramp_core import binomial
from offramp_core.certify.slices import SliceBudget, SliceResult, in_slice
from offramp_core.errors import InvalidArgumentError
from offramp_core.evaluate import answered_labels, answers_agree, evaluate_plan, leave_position, plan_columns
from offramp_core.evidence.one_arm import check_counts, check_design_effect, check_rate
from offramp_core.plan import Plan
from offramp_core.records import BoolArray, IndexArray, LabelArray, Records, SecondsArray

METHOD = "rank-path"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A plan passed a held-out test.

    Attributes
    ----------
    method : str
        ``rank-path``: exact binomial tests on an equal-weight sample.
    plan_hash : str
        Content hash of the plan, thresholds as served.
    budget, delta : float
        P(disagreement > budget) <= delta over all tests ever run for the service.
    test_index : int
        Which test this was, from 1; failed ones count.
    level : float
        What this test was allowed of ``delta``, see :func:`allowance`; shared evenly with the slices.
    n, k : int
        Held-out requests, and disagreements among them, non-exits included.
    p_value : float
        P(Bin(n, budget) <= k), of n and k divided by the design effect.
    records_digest : str
        SHA-256 over the held-out records.
    ramp_ids : tuple of str
        Names of the records' columns, so that the records can be replayed without the bundle.
    records_through : float, optional
        Time of the newest held-out record: the test had the ``n`` newest up to then.
    slices : tuple of SliceResult
        Groups with a promise of their own, some perhaps of answers; those not certified must be stopped.
    design_effect : float
        So many of the ``n`` labels are worth one (:mod:`offramp_core.certify.dependence`); 1 where they are independent.
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
    ramp_ids: tuple[str, ...] = ()
    records_through: float | None = None
    slices: tuple[SliceResult, ...] = ()
    design_effect: float = 1.0

    def to_mapping(self) -> dict[str, Any]:
        """JSON form; rates are decimal strings that read back to the same number, and what does not apply is left out."""
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
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidArgumentError(f"not a certificate ({error}): {value!r}") from error


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


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


def p_value(k: int, n: int, *, budget: float, design_effect: float = 1.0) -> float:
    """P(Bin(n, budget) <= k): how often a plan exactly at its budget would look this good.

    Where ``design_effect`` labels are worth one, both counts are divided by it and the binomial is continued between whole numbers
    (Korn and Graubard, 1998).
    """
    check_counts(k, n)
    check_rate("budget", budget)
    check_design_effect(design_effect)
    if design_effect == 1:
        return float(binomial.cdf(k, n, budget))
    return binomial.continued_cdf(k / design_effect, n / design_effect, budget)


def verify_certificate(
    certificate: Certificate,
    plan: Plan,
    *,
    records: Records | None = None,
    ramp_ids: Sequence[str] = (),
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
    return None


def _against_its_own_counts(certificate: Certificate) -> str | None:
    try:
        return _level_reason(certificate) or _p_value_reason(certificate)
    except InvalidArgumentError as error:
        return str(error)


def _level_reason(certificate: Certificate) -> str | None:
    allowed = allowance(certificate.delta, certificate.test_index)
    spent = certificate.level + sum(s.level for s in certificate.slices)
    if not 0 < spent <= allowed * (1 + 1e-9):
        return f"level {spent} exceeds the allowance {allowed} of test {certificate.test_index}"
    return None


def _p_value_reason(certificate: Certificate) -> str | None:
    if certificate.method != METHOD:
        return f"method {certificate.method!r} is unknown; only {METHOD} can be verified"
    everybody = ("", certificate.k, certificate.n, certificate.budget, certificate.level, certificate.p_value, True)
    claims = [(*everybody, certificate.design_effect)]
    claims += [
        (f"{s.title}: ", s.k, s.n, s.budget, s.level, s.p_value, s.certified, s.design_effect)
        for s in certificate.slices
    ]
    for of, k, n, budget, level, claimed, certified, design_effect in claims:
        counted = p_value(k, n, budget=budget, design_effect=design_effect)
        if certified and not counted <= level:
            return f"{of}k={k} of n={n} has p={counted:.3g}, above the level {level:.3g}"
        if not math.isclose(counted, claimed, rel_tol=1e-6, abs_tol=1e-300):
            return f"{of}p_value {claimed} is not that of its counts ({counted})"
    return None


def _against_records(certificate: Certificate, plan: Plan, records: Records, ramp_ids: tuple[str, ...]) -> str | None:
    found = held_out_rows(certificate, records)
    if found is None:
        return "these are not the records it was made from"
    if len(ramp_ids) != records.n_ramps:
        return f"it names {len(ramp_ids)} ramps and the records have {records.n_ramps} columns"
    records = records.take(found)
    seen = evaluate_plan(records, plan, ramp_ids)
    if (seen.n, seen.disagreements) != (certificate.n, certificate.k):
        return f"the records give k={seen.disagreements} of n={seen.n}; it says {certificate.k} of {certificate.n}"
    replayed = answers(records, plan, ramp_ids, labels=_has_classes(certificate.slices))
    for s in certificate.slices:
        rows = in_slice(s, records, replayed.labels)
        n, k = int(rows.sum()), int(replayed.wrong[rows].sum())
        if (n, k) != (s.n, s.k):
            return f"{s.title}: the records give k={k} of n={n}; it says {s.k} of {s.n}"
    return None


def held_out_rows(certificate: Certificate, records: Records) -> IndexArray | None:
    """Rows, in the order of the test, of the records a certificate was made from; None when they are not all there.

    A file may hold more than the test had: a record pool goes on growing. The test had the ``n`` newest up to ``records_through``.
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
    """SHA-256 (hex) over scores, agreements, times and slices, and for ``slices`` of answers what was answered; independent of the machine."""
    said = _has_classes(slices)
    digest = hashlib.sha256(repr(records.uncertainty.shape).encode())
    digest.update(np.ascontiguousarray(records.uncertainty, dtype="<f4").tobytes())
    digest.update(np.packbits(records.agrees).tobytes())
    digest.update(np.packbits(records.final_agrees).tobytes())
    for name, values, kind in (
        ("time", records.time, "<f8"),
        ("slice", records.slice_id, "<i8"),
        ("prediction", records.prediction if said else None, "<i8"),
        ("final", records.final if said else None, "<i8"),
    ):
        if values is not None:
            digest.update(b"" if name == "time" else name.encode())  # times were there first and had no name
            digest.update(np.ascontiguousarray(values, dtype=kind).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Answers:
    """What a plan does to each record, (n,) each: is its answer ``wrong``, the ``seconds`` it takes, and what it says (``labels``; -1 where
    nobody asked)."""

    wrong: BoolArray
    seconds: SecondsArray
    labels: LabelArray


def answers(records: Records, plan: Plan, ramp_ids: Sequence[str], *, labels: bool = False) -> Answers:
    """Replay a plan on records of its own chain; ``labels`` asks for what it says, which records need not hold."""
    active, thresholds = plan_columns(plan, ramp_ids)
    left = leave_position(records, active, thresholds)
    said = answered_labels(records, active, left) if labels else np.full(len(records), -1, dtype=np.int64)
    return Answers(~answers_agree(records, active, left), records.costs.leave_seconds(active)[left], said)
