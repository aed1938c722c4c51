"""``offramp verify``: is what a certificate says true? Needs no cluster and no model, only the file, and the records to
count again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import typer
import yaml

from offramp_cli.documents import documents
from offramp_cli.npz import read_npz
from offramp_core.certify import Certificate, verify_certificate
from offramp_core.certify.certificate import held_out_rows
from offramp_core.columns import chain, other_precisions
from offramp_core.errors import InvalidArgumentError, InvalidRecordsError, InvalidSpecError, OfframpError
from offramp_core.plan import Plan
from offramp_core.precision import EXACT
from offramp_core.records import Records, records_from_arrays

ACCEPTANCE = "canary-acceptance"  # what a canary earned, beside the certificates of tests on records
NOT_VERIFIED = 1
INVALID_INPUT = 2
_ARRAYS = frozenset({"uncertainty", "prediction", "final", "reference", "slice", "time", "ramp_id", "ramp_precision"})

Counted = Literal["Recounted", "NotGiven", "OtherRecords"]


@dataclass(frozen=True, slots=True)
class CertificateVerdict:
    """One certificate: ``reason`` why it does not hold, or None; ``counted`` tells whether the records were
    replayed."""

    certificate: Certificate
    reason: str | None
    counted: Counted


def verify(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A RampConfig (YAML or JSON), or a certificate with --plan.")
    ],
    *,
    plan: Annotated[Path | None, typer.Option(metavar="PLAN", help="The plan, if FILE is a certificate alone.")] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="FILE.npz", help="The held-out records, to count again.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")] = False,
) -> None:
    """Check the certificates of a plan again, offline.

    Exit code 0: all of them hold. 1: one does not, there is none, or none was made from the records given. 2: a file is
    unreadable.

    Without --records it checks the arithmetic and the digests: that the certificate belongs to this plan, that its test
    stayed within the error allowance, and that its counts pass. With --records it also replays the plan and counts
    again.

    Examples:

      kubectl get rampconfig NAME -o yaml > plan.yaml && offramp verify plan.yaml

      offramp verify plan.yaml --records heldout.npz

      offramp verify certificate.json --plan plan.json --json
    """
    try:
        subject, certificates = load_certificates(file, plan)
        held_out = None if records is None else load_held_out(records)
        verdicts = [judge(certificate, subject, held_out) for certificate in certificates]
    except OfframpError as error:
        _fail(error)
    held = succeeded(subject, verdicts, with_records=records is not None)
    if json_output:
        print(json.dumps(to_mapping(file, subject, verdicts, verified=held), indent=2, allow_nan=False))
    else:
        print("\n".join(sentences(subject, verdicts, records)))
    raise typer.Exit(0 if held else NOT_VERIFIED)


# --- judging ---------------------------------------------------------------------------------------


def judge(certificate: Certificate, plan: Plan, held_out: Records | None) -> CertificateVerdict:
    """Check one certificate, against the records where it was made from them.

    A plan may have several certificates, each from records of its own: that a file is of one is no flaw of the others.
    """
    if held_out is None:
        return CertificateVerdict(certificate, verify_certificate(certificate, plan), "NotGiven")
    records = held_out.at(plan.precision) if plan.precision in held_out.others else held_out
    if held_out_rows(certificate, records) is None:
        return CertificateVerdict(certificate, verify_certificate(certificate, plan), "OtherRecords")
    reason = verify_certificate(certificate, plan, records=records)
    return CertificateVerdict(certificate, reason, "Recounted")


def succeeded(plan: Plan, verdicts: list[CertificateVerdict], *, with_records: bool) -> bool:
    """Exits off needs no certificate; any other plan at least one, and none of them may fail."""
    if any(v.reason is not None for v in verdicts):
        return False
    if with_records and not any(v.counted == "Recounted" for v in verdicts):
        return False
    return plan.exits_off or bool(verdicts)


# --- files -----------------------------------------------------------------------------------------


def load_certificates(file: Path, plan_file: Path | None) -> tuple[Plan, list[Certificate]]:
    """The plan and its certificates: from a ``RampConfig``, or from a certificate and a plan of its own.

    Raises
    ------
    InvalidSpecError, InvalidArgumentError
        A file cannot be read or is neither; the message names the file or the field.
    """
    value = _document(file)
    if "method" in value:  # a certificate alone
        if plan_file is None:
            raise InvalidSpecError(str(file), "is a certificate alone; give its plan with --plan")
        return load_plan(plan_file), [Certificate.from_mapping(value)]
    if value.get("kind") != "RampConfig":
        raise InvalidSpecError(
            str(file), f"kind is {value.get('kind')!r}; give a RampConfig, or a certificate with --plan"
        )
    status = value.get("status") or {}
    listed = status.get("certificates") or [] if isinstance(status, Mapping) else None
    if not isinstance(listed, list):
        raise InvalidSpecError("status.certificates", f"must be a list; got {listed!r}")
    plan = Plan.from_mapping(_mapping(value.get("spec"), "spec")) if plan_file is None else load_plan(plan_file)
    proofs = [_mapping(c, f"status.certificates[{i}]") for i, c in enumerate(listed)]
    counted = [proof for proof in proofs if proof.get("method") != ACCEPTANCE]
    if proofs and not counted:
        raise InvalidSpecError(
            "status.certificates",
            "the plan has earned its place in a canary, whose audits nobody can count again offline",
        )
    return plan, [Certificate.from_mapping(proof) for proof in counted]


def load_held_out(path: Path) -> Records:
    """Read held-out records. Costs are not needed, because counts do not depend on them; nothing in the file is
    unpickled.

    Raises
    ------
    InvalidRecordsError
        The file breaks the contract of records; the message names the array and the row.
    """
    arrays = read_npz(path, only=_ARRAYS)
    return records_from_arrays({**arrays, **_free(arrays)})


def _free(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[np.float64]]:
    """Costs that are none, for every chain of the columns."""
    n_columns = arrays["uncertainty"].shape[-1] if "uncertainty" in arrays and arrays["uncertainty"].ndim else 0
    of_columns = [str(p) for p in arrays.get("ramp_precision", np.full(n_columns, EXACT)).ravel()]
    free = {}
    for precision in (EXACT, *other_precisions(of_columns)):
        prefix, n_ramps = "" if precision == EXACT else f"{precision}_", len(chain(of_columns, precision))
        free[f"{prefix}segment_seconds"], free[f"{prefix}ramp_seconds"] = np.ones(n_ramps + 1), np.zeros(n_ramps)
    return free


def load_plan(path: Path) -> Plan:
    """A plan from a file: a ``RampConfig``, or the plan alone.

    Raises
    ------
    InvalidSpecError, InvalidArgumentError
        The file cannot be read or is neither; the message names the file or the field.
    """
    value = _document(path)
    return Plan.from_mapping(_mapping(value.get("spec"), "spec") if value.get("kind") == "RampConfig" else dict(value))


def _document(path: Path) -> Mapping[str, Any]:
    """The one object of a YAML or JSON file; of a list that ``kubectl get`` printed, the only item."""
    try:
        found = [one.value for one in documents(path.read_text(encoding="utf-8"))]
    except OSError as error:
        raise InvalidSpecError(str(path), f"cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidSpecError(
            str(path), f"is neither YAML nor JSON: {getattr(error, 'problem', None) or error}"
        ) from error
    if len(found) == 1 and isinstance(found[0], Mapping) and found[0].get("kind") in ("List", "RampConfigList"):
        found = list(found[0].get("items") or [])
    if len(found) != 1 or not isinstance(found[0], Mapping):
        raise InvalidSpecError(str(path), f"must hold one object; found {len(found)} documents")
    return found[0]


def _mapping(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(f"{field} must be an object; got {value!r}")
    return dict(value)


# --- output ----------------------------------------------------------------------------------------


def to_mapping(file: Path, plan: Plan, verdicts: list[CertificateVerdict], *, verified: bool) -> dict[str, Any]:
    """The JSON of ``--json``."""
    return {
        "file": str(file),
        "planHash": plan.content_hash,
        "exitsOff": plan.exits_off,
        "verified": verified,
        "certificates": [
            {
                "holds": v.reason is None,
                "reason": v.reason,
                "records": v.counted,
                "certificate": v.certificate.to_mapping(),
            }
            for v in verdicts
        ],
    }


def sentences(plan: Plan, verdicts: list[CertificateVerdict], records: Path | None) -> list[str]:
    """What was found, one line per certificate and one about the records."""
    lines = [f"plan {plan.content_hash[:12]}: {_ramps(plan)}"]
    if not verdicts:
        lines.append(
            "needs no certificate: its exits are off" if plan.exits_off else "NOT VERIFIED: it has no certificate"
        )
    lines += [_sentence(v) for v in verdicts]
    if records is not None and verdicts and not any(v.counted == "Recounted" for v in verdicts):
        lines.append(
            f"NOT VERIFIED: no certificate was made from the records in {records}, or they are no longer all there"
        )
    if records is None and verdicts:
        lines.append("Counts were taken from the certificate; give --records FILE.npz to make them again.")
    return lines


def _sentence(verdict: CertificateVerdict) -> str:
    c = verdict.certificate
    if verdict.reason is not None:
        return f"DOES NOT HOLD (test {c.test_index}): {verdict.reason}"
    again = ", counted again from the records" if verdict.counted == "Recounted" else ""
    graded = c.lost is not None
    promise = f"answers lose at most {c.budget:.2%}" if graded else f"at most {c.budget:.2%} of answers differ"
    text = (
        f"holds (test {c.test_index}): {promise}, with {1 - c.delta:.0%} confidence; {c.seen}"
        f"{again}, p = {c.p_value:.2g} <= {c.level:.2g}"
    )
    text += "".join(f"; {t.title}: {t.k} of {t.n:,} for {t.budget:.2%}, p = {t.p_value:.2g}" for t in c.tiers)
    stopped = [s.title for s in c.slices if not s.certified]
    return text + (f"; not for {', '.join(stopped)}, which must not leave early" if stopped else "")


def _ramps(plan: Plan) -> str:
    if plan.exits_off:
        return "exits off"
    ramps = ", ".join(f"{r.id} < {r.threshold}" for r in plan.ramps) or "no exits"
    return ramps if plan.precision == EXACT else f"at {plan.precision}, {ramps}"


def _fail(error: OfframpError) -> NoReturn:
    text = " ".join(str(error).split())
    hint = (
        "a records file holds uncertainty [N,R], prediction [N,R], final [N]"
        if isinstance(error, InvalidRecordsError)
        else "kubectl get rampconfig NAME -o yaml prints what is needed"
    )
    print(f"error: {text}\nhint: {hint}", file=sys.stderr)
    raise typer.Exit(INVALID_INPUT) from error
