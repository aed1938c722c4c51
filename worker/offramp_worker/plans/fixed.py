"""A plan without a control plane: a RampConfig in a file, taken when the worker starts and kept until it ends.

Nobody delivers another one, judges a canary or tunes. The worker's own detector watches the plan's audits against the
budget that it was certified for, and switches its exits off for good.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from offramp_core.certify import Certificate, verify_certificate
from offramp_core.errors import InvalidBundleError, PlanRefusedError
from offramp_core.plan import Plan
from offramp_core.protocol import ArmPlan, PlanDocument
from offramp_worker.documents import parse_document
from offramp_worker.logs import log_event
from offramp_worker.plans.memory import PlanMemory
from offramp_worker.plans.preparation import PlanTarget

SETTING = "OFFRAMP_FIXED_PLAN"
AUDIT_RATE = 0.02  # of requests, for the detector; audits wait for idle time
MAX_BYTES = 2 * 2**20
ACCEPTANCE = "canary-acceptance"  # what a canary earned, which is no certificate that can be checked again
PRINTS = "`kubectl get rampconfig NAME -o json` prints one"


@dataclass(frozen=True, slots=True)
class _Status:
    certificates: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class _RampConfig:
    """What is read of one."""

    kind: Literal["RampConfig"]
    spec: dict[str, Any]
    status: _Status = field(default_factory=_Status)


def take_fixed_plan(file: Path, target: PlanTarget, memory: PlanMemory) -> None:
    """Put the plan in force.

    Raises
    ------
    InvalidBundleError
        The file is no RampConfig with a certificate, or its plan none of the loaded bundle; the message says what to
        do.
    """
    plan, budget = read_fixed_plan(file)
    document = PlanDocument(
        service="",
        service_uid="",
        epoch=1,
        stable=ArmPlan(plan.to_mapping(), AUDIT_RATE),
        canary=None,
        weight_percent=0,
        salt="",
        accuracy_budget=budget,
        stable_lease_seconds=math.inf,
    )
    try:
        active = target.prepare(document)
    except PlanRefusedError as error:
        raise _refused(file, str(error), "give a plan of this bundle") from error
    breaker = active.stable.breaker if active.stable is not None else None
    if breaker is not None:
        breaker.go_on(memory.breaker(), memory.keep_breaker)
        if breaker.is_open:
            log_event("breaker-stays-open", level="warning", epoch=document.epoch)
    target.activate(active)
    log_event("plan-in-force", epoch=document.epoch, weight_percent=0)


def read_fixed_plan(file: Path) -> tuple[Plan, float]:
    """The plan, and the smallest budget that a certificate of it promises.

    Raises
    ------
    InvalidBundleError
        The message names the file and what is wrong.
    """
    try:
        with file.open("rb") as opened:
            config = parse_document(opened.read(MAX_BYTES), _RampConfig)
        plan = Plan.from_mapping(config.spec)
        proofs = [each for each in config.status.certificates if each.get("method") != ACCEPTANCE]
        found = [Certificate.from_mapping(each) for each in proofs]
    except OSError as error:
        raise _refused(file, f"it cannot be read ({error.strerror})", PRINTS) from error
    except ValueError as error:
        raise _refused(file, f"it is no RampConfig in JSON ({error})", PRINTS) from error
    budgets = [each.budget for each in found if verify_certificate(each, plan) is None]
    if not budgets:
        message = "status.certificates has none that holds for this plan, so nobody knows its budget"
        raise _refused(file, message, "give a plan that was tuned and certified")
    return plan, min(budgets)


def _refused(file: Path, message: str, remedy: str) -> InvalidBundleError:
    error = InvalidBundleError(f"{SETTING} is {file}: {message}")
    error.remedy = remedy
    return error
