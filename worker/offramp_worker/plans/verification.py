"""Is a plan document from the control plane, and does it make sense? Nothing of one that fails is looked at again."""

from __future__ import annotations

import base64
import binascii
import math

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from offramp_core.errors import PlanRefusedError
from offramp_core.evidence.slow import shape_of
from offramp_core.plan import MAX_TIERS
from offramp_core.protocol import OVERLOAD, PlanDocument, SignedDocument
from offramp_core.reasons import Reason
from offramp_worker.documents import parse_document

MAX_SLICES = 64  # a document may name; memory must stay bounded


def verify(document: SignedDocument, key: Ed25519PublicKey) -> None:
    """Check the Ed25519 signature over the payload's bytes.

    Raises
    ------
    PlanRefusedError
        ``BadSignature``.
    """
    try:
        key.verify(base64.b64decode(document.signature, validate=True), document.payload.encode())
    except (InvalidSignature, binascii.Error, ValueError) as error:
        raise PlanRefusedError(
            Reason.BAD_SIGNATURE, "the document is not signed with the key this worker trusts"
        ) from error


def parse(payload: str) -> PlanDocument:
    """Decode and check the ranges of a document.

    Raises
    ------
    PlanRefusedError
        ``Malformed``; the message names the field.
    """
    try:
        document = parse_document(payload, PlanDocument)
    except ValueError as error:
        raise PlanRefusedError(Reason.MALFORMED, f"the document does not parse: {error}") from error
    arms = [document.stable] + ([document.canary] if document.canary else [])
    checks = {
        "epoch": document.epoch >= 1,
        "weight_percent": 0 <= document.weight_percent <= 100,
        "weight_percent (without a canary)": document.canary is not None or document.weight_percent == 0,
        "audit_rate": all(0 <= arm.audit_rate <= 1 for arm in arms),
        "accuracy_budget": 0 < document.accuracy_budget < 1,
        "canary_lease_seconds": _positive(document.canary_lease_seconds),
        "stable_lease_seconds": _positive(document.stable_lease_seconds),
        "breaker_run_length": 1 < document.breaker_run_length < math.inf,
        "design_effect": all(1 <= arm.design_effect < math.inf for arm in (document.stable, document.canary) if arm),
        "max_overhead": 0 <= document.max_overhead < math.inf,
        "holdback_share": 0 <= document.holdback_share <= 0.5,
        "slices": len(document.slices) <= MAX_SLICES and set(document.stopped_slices) <= set(document.slices),
        "tiers": _tiers_make_sense(document),
        "capture_since": document.capture_since is None or math.isfinite(document.capture_since),
        "slow_seconds": all(size.isdecimal() and _positive(s) for size, s in document.slow_seconds.items()),
        "slow_seconds_by_length": all(shape_of(t) and _positive(s) for t, s in document.slow_seconds_by_length.items()),
    }
    wrong = [name for name, is_right in checks.items() if not is_right]
    if wrong:
        raise PlanRefusedError(Reason.MALFORMED, f"{wrong[0]} of the document is out of range")
    return document


def _tiers_make_sense(document: PlanDocument) -> bool:
    budgets = document.tiers
    named = {name for arm in (document.stable, document.canary) if arm for name in arm.tiers}
    tighter = all(0 < budget <= document.accuracy_budget for name, budget in budgets.items() if name != OVERLOAD)
    looser = document.accuracy_budget < budgets.get(OVERLOAD, 1.0) <= 1
    return tighter and looser and len(budgets) <= MAX_TIERS and named <= set(document.tiers)


def _positive(value: float) -> bool:
    return 0 < value < math.inf
