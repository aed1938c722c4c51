"""What a person may decide, and when. Pure: a family in, the change or the reason against it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from offramp_cli.source.source import RefusedError
from offramp_core.control.codec import format_time
from offramp_core.control.objects import Rollout
from offramp_core.control.rollouts.gates import proves
from offramp_core.control.rollouts.rollout import awaits_approval
from offramp_core.control.tuning.tuner import TUNE
from offramp_core.control.workers.versions import ABORT, PROMOTE
from offramp_core.reasons import Reason
from offramp_operator.explain.family import Family


@dataclass(frozen=True, slots=True)
class Change:
    """What to set in ``RampRollout.spec`` (empty: it is so already), and what to tell."""

    message: str
    spec: Mapping[str, Any] = field(default_factory=dict)


Decide = Callable[[Family, Rollout], Change]


def promote(family: Family, rollout: Rollout) -> Change:
    """Only a rollout that passed every step can be promoted here; earlier the decision would wait unseen.

    Raises
    ------
    RefusedError
        It has not passed, or is finished; the message says what is missing.
    """
    if rollout.decision == "Promote" and not rollout.status.finished:
        return Change(f"{rollout.name} is set to promote already")
    _check_open(rollout, "promote")
    missing = [g for g in rollout.status.gates if proves(g.name) and g.state not in ("Clear", "NotApplicable")]
    if missing and rollout.status.phase != "AwaitingPromotion":
        raise RefusedError(
            f"{rollout.to_config} is not certified and has not earned acceptance yet ({missing[0].k} of "
            f"{missing[0].n} audits disagreed); "
            f"`offramp why {family.name}` says how long it will take"
        )
    if rollout.status.phase != "AwaitingPromotion":
        raise RefusedError(
            f"{rollout.name} has not passed every step ({_where(family, rollout)}); a decision never overrules a gate. "
            + _then(family, rollout)
        )
    return Change(f"{rollout.name}: {rollout.to_config} is promoted to all traffic", {"decision": "Promote"})


def abort(_: Family, rollout: Rollout) -> Change:
    """Raises :class:`RefusedError` when it is too late."""
    if rollout.decision == "Abort" and not rollout.status.finished:
        return Change(f"{rollout.name} is set to abort already")
    if rollout.status.phase != "Promoting":  # which can be taken back
        _check_open(rollout, "abort")
    return Change(f"{rollout.name} is aborted; {rollout.from_config} goes on serving", {"decision": "Abort"})


def pause(_: Family, rollout: Rollout) -> Change:
    """Raises :class:`RefusedError` when the rollout is finished or ending."""
    _check_open(rollout, "pause")
    if rollout.paused:
        return Change(f"{rollout.name} is paused already")
    return Change(
        f"{rollout.name} rests at {rollout.status.weight}% of batches; its gates stay armed", {"paused": True}
    )


def resume(family: Family, rollout: Rollout) -> Change:
    """Raises :class:`RefusedError` when the rollout is finished or ending, or held by the service's own spec."""
    _check_open(rollout, "resume")
    if family.service.spec.suspend:
        raise RefusedError(f"{rollout.name} is held by spec.suspend of {family.name}; set it to false in its manifest")
    if not rollout.paused:
        return Change(f"{rollout.name} is not paused")
    return Change(f"{rollout.name} goes on", {"paused": False})


def approve(family: Family, rollout: Rollout) -> Change:
    """Approving starts the canary of a recommendation, and spares the question at its end.

    Raises
    ------
    RefusedError
        Nothing waits for approval.
    """
    spec = family.service.spec
    if spec.mode != "Recommend":
        raise RefusedError(f"spec.ramps.mode is {spec.mode}; only Recommend waits for approval")
    if rollout.decision == "Promote" and not rollout.status.finished:
        return Change(f"{rollout.name} is approved already")
    if rollout.status.finished:
        raise RefusedError(f"{family.name} has no recommendation yet: {_tuner(family)}")
    if not awaits_approval(rollout, family.service):
        raise RefusedError(f"{rollout.name} does not wait for approval ({_where(family, rollout)})")
    if spec.suspend:
        raise RefusedError(f"spec.suspend of {family.name} stops rollouts; set it to false in its manifest")
    return Change(f"{rollout.to_config} is approved; {rollout.name} rolls it out in steps", {"decision": "Promote"})


def tune(family: Family, now: float) -> tuple[str, str]:
    """The request that asks for a tuning, and what to tell.

    Raises
    ------
    RefusedError
        Nothing is tuned in this mode.
    """
    spec, status = family.service.spec, family.service.status.tuning
    if spec.mode not in ("Auto", "Recommend"):
        raise RefusedError(f"spec.ramps.mode of {family.name} is {spec.mode}; only Auto and Recommend tune")
    if spec.suspend:
        raise RefusedError(f"spec.suspend of {family.name} stops tuning; set it to false in its manifest")
    if status.state == Reason.TUNING:
        raise RefusedError(
            f"{family.name} is being tuned right now; `offramp why {family.name}` shows what comes of it"
        )
    message = f"{family.name} looks for a better plan now"
    if family.active is not None:
        message = f"{family.name} looks for a better plan as soon as {family.active.name} is over"
    elif status.state == Reason.COLLECTING_LABELS:
        message = f"{family.name} looks for a plan as soon as there are labels enough: {status.message}"
    return f"{TUNE}/{format_time(now)}", message


def promote_version(family: Family, now: float) -> tuple[str, str]:
    """The request that promotes the version on trial, and what to tell.

    Raises
    ------
    RefusedError
        It has not passed, or is being promoted already.
    """
    status = family.service.status.version
    if status.phase == "Promoting":
        raise RefusedError(f"{status.candidate.uri} is being promoted already")
    if status.phase != "AwaitingPromotion":
        open = "; ".join(gate.message for gate in status.gates if gate.state != "Clear")
        raise RefusedError(
            f"{status.candidate.uri} has not passed its trial ({status.phase}{': ' if open else ''}{open}); a "
            "decision never overrules a gate. "
            f"`offramp why {family.name}` says what it waits for"
        )
    return f"{PROMOTE}/{format_time(now)}", f"{status.candidate.uri} is promoted: the other workers follow one by one"


def abort_version(family: Family, now: float) -> tuple[str, str]:
    """The request that rejects the version on trial, and what to tell."""
    status = family.service.status.version
    return f"{ABORT}/{format_time(now)}", f"{status.candidate.uri} is rejected; {status.serving.uri} goes on serving"


def _check_open(rollout: Rollout, verb: str) -> None:
    status = rollout.status
    if status.finished:
        because = f", {status.reason}" if status.reason else ""
        raise RefusedError(f"{rollout.name} is finished ({status.phase}{because}); there is nothing left to {verb}")
    if status.phase in ("Promoting", "RollingBack"):
        raise RefusedError(f"{rollout.name} is {status.phase} already ({status.message}); too late to {verb}")
    if rollout.decision == "Abort":
        raise RefusedError(f"{rollout.name} is set to abort, and that is final")


def _where(family: Family, rollout: Rollout) -> str:
    status, steps = rollout.status, family.service.spec.rollout.steps
    if status.phase == "Pending":
        return f"Pending: {status.message}"
    return f"{status.phase}, step {status.step + 1} of {len(steps)} at {status.weight}%"


def _then(family: Family, rollout: Rollout) -> str:
    if rollout.status.phase == "Paused" and rollout.paused:
        return f"It is paused: `offramp resume {family.name}` first"
    if family.service.spec.rollout.promotion == "Automatic":
        return "spec.rollout.promotion is Automatic: it is promoted by itself when it has passed"
    return "Promote it when it is AwaitingPromotion"


def _tuner(family: Family) -> str:
    status = family.service.status.tuning
    return f"{status.state}: {status.message}".rstrip(": ") or "the tuner has not begun"
