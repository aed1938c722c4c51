"""Commands that tell the operator what a person has decided: promote, abort, pause, resume, approve, tune."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.text import Text

from offramp_cli.daytwo import decisions
from offramp_cli.daytwo.read import find_rollout
from offramp_cli.daytwo.session import OneService, Session, day_two
from offramp_cli.source.source import RefusedError
from offramp_core.control.workers.versions import on_trial
from offramp_operator.explain.family import Family

RolloutOption = Annotated[
    str | None, typer.Option("--rollout", metavar="NAME", help="A RampRollout; by default the one under way.")
]


@day_two
def promote(session: Session, name: OneService, *, rollout: RolloutOption = None) -> None:
    """Promote what has passed and waits for approval: the version on trial (spec.updatePolicy.sideBySide), else the
    canary (spec.rollout.promotion: Manual).

    Example:

      kubectl offramp promote digits
    """
    if not _decided_on_version(session, name, rollout, decisions.promote_version):
        _decide(session, name, rollout, decisions.promote)


@day_two
def abort(session: Session, name: OneService, *, rollout: RolloutOption = None) -> None:
    """Reject the version on trial, if there is one, and remove its workers. Otherwise roll the canary back: its weight
    becomes 0, and the stable plan serves everything. This is final.

    Example:

      offramp abort digits
    """
    if not _decided_on_version(session, name, rollout, decisions.abort_version):
        _decide(session, name, rollout, decisions.abort)


@day_two
def pause(session: Session, name: OneService, *, rollout: RolloutOption = None) -> None:
    """Hold the rollout at its current weight. The gates stay armed.

    Example:

      kubectl offramp pause digits -n vision
    """
    _decide(session, name, rollout, decisions.pause)


@day_two
def resume(session: Session, name: OneService, *, rollout: RolloutOption = None) -> None:
    """Continue a paused rollout.

    Example:

      kubectl offramp resume digits -n vision
    """
    _decide(session, name, rollout, decisions.resume)


@day_two
def approve(session: Session, name: OneService, *, rollout: RolloutOption = None) -> None:
    """Approve a recommendation (spec.ramps.mode: Recommend): it rolls out through the canary like any plan.

    Example:

      kubectl offramp approve digits
    """
    _decide(session, name, rollout, decisions.approve)


@day_two
def tune(
    session: Session,
    name: OneService,
    *,
    now: Annotated[bool, typer.Option("--now", help="Do not wait for the next attempt that is due.")] = False,
) -> None:
    """Search for a better plan now instead of at the next attempt that is due. With too few labels no test is run.

    It sets the annotation earlyexit.dev/request on your service; the operator answers it once.

    Example:

      kubectl offramp tune digits --now
    """
    if not now:
        raise RefusedError(f"add --now to ask for a tuning; `offramp why {name}` says when the next one is due")
    family = session.family(name)
    _request(session, family, *decisions.tune(family, session.now))


def _decided_on_version(
    session: Session, name: str, rollout: str | None, decide: Callable[[Family, float], tuple[str, str]]
) -> bool:
    """Whether there was a version on trial to decide on. Who names a rollout means that."""
    family = session.family(name)
    if rollout is not None or not on_trial(family.service):
        return False
    _request(session, family, *decide(family, session.now))
    return True


def _decide(session: Session, name: str, rollout_name: str | None, decide: decisions.Decide) -> None:
    family = session.family(name)
    rollout = find_rollout(family, rollout_name) if rollout_name is not None else family.active or family.newest
    if rollout is None:
        raise RefusedError(f"{name} has had no rollout yet; `offramp why {name}` says what it waits for")
    change = decide(family, rollout)
    if change.spec:
        session.source.change_rollout(family, rollout, change.spec)
    _show(session, family, change.message, {"rollout": rollout.name, "changed": dict(change.spec)})


def _request(session: Session, family: Family, text: str, message: str) -> None:
    session.source.request(family, text)
    _show(session, family, message, {"request": text})


def _show(session: Session, family: Family, message: str, facts: dict[str, Any]) -> None:
    note = f" ({family.note})" if family.note else ""
    session.show(lambda: [Text(message + note)], lambda: {"service": family.name, "message": message + note, **facts})
