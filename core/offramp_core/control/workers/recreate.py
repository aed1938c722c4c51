"""How the only worker is replaced where there is room for one: it goes first, and comes back where its successor does
not serve.

``updatePolicy.type: Recreate`` is the user's word that an interruption is better than no update. While it lasts the
pods that served last are remembered by their digest (``UpdateStatus.serving``): where the new ones cannot serve, or are
not ready by the deadline, those are brought back by the same way and stay until the spec asks for other pods than the
ones that failed. Nothing is brought back that was never seen to serve.
"""

from __future__ import annotations

from dataclasses import replace

from offramp_core.control.codec import format_time
from offramp_core.control.objects import UpdateStatus
from offramp_core.control.snapshot import Worker
from offramp_core.control.workers.delivery import STALLING
from offramp_core.control.workers.update import Update, UpdateView
from offramp_core.reasons import Reason

UNDER_WAY = frozenset({"Recreate", "Return"})
CRASHES = frozenset({Reason.CRASH_LOOP_BACK_OFF, Reason.CRASHED, Reason.OOM_KILLED})
CRASHES_BORNE = 2  # a first one may be the machine's; every further one is time in which nobody answers
MOST_FAILURE_CHARACTERS = 500


def recreates(view: UpdateView) -> bool:
    """Whether workers are replaced this way: there is one to be replaced, or there was when this began."""
    return view.policy.type == "Recreate" and (view.desired == 1 or (view.desired > 0 and _under_way(view)))


def recreated(view: UpdateView) -> Update:
    """Whether to wait for the new worker, or to bring back what served before it.

    Deciding again on the same facts changes nothing.
    """
    before = view.before
    if not view.asked:  # nothing can be made of the spec, so what is there stays
        return Update(before)
    if any(w.endpoint.ready and w.endpoint.current for w in view.workers):
        return Update(UpdateStatus(serving=view.asked, silent_seconds=_silent(view).silent_seconds))
    if before.strategy == "Return" and before.asked == view.asked:
        return _returned(view)
    if not _begun(view):
        return Update(replace(before, strategy=""))
    status = _silent(replace(view, before=_tried(view)))
    if (failure := _failure(view, status)) and status.serving not in ("", view.asked):
        status = replace(status, strategy="Return", tried_at=None, failure=failure[:MOST_FAILURE_CHARACTERS])
        return _returned(replace(view, before=status))
    trouble = _trouble(view)
    return Update(
        status, Reason.RECREATING, f"the new worker takes the place of the only one; {_silence(status)}{trouble}"
    )


def interruption(status: UpdateStatus) -> str:
    """For how long nobody answered the last time, in a sentence."""
    return f"no request was answered for about {status.silent_seconds:g} s while the only worker was replaced"


def _under_way(view: UpdateView) -> bool:
    return view.before.strategy in UNDER_WAY


def _begun(view: UpdateView) -> bool:
    """Whether there is something to replace. A worker that has only gone for a while, as nodes do, comes back by
    itself."""
    served = view.before.serving
    return bool(view.old) or _under_way(view) or served not in ("", view.asked)


def _tried(view: UpdateView) -> UpdateStatus:
    """The status with what is tried, from now on where it is something else than before."""
    before = view.before
    if before.strategy == "Recreate" and before.asked == view.asked:
        return before
    serving = next((w.endpoint.template for w in view.old if w.endpoint.ready), before.serving)
    return UpdateStatus("Recreate", None, serving, view.asked, tried_at=view.now, silent_at=before.silent_at)


def _silent(view: UpdateView) -> UpdateStatus:
    """The status with the time in which nobody answers, from when that was seen until it was seen to end."""
    before = view.before
    if not view.ready:
        return replace(before, silent_at=view.now if before.silent_at is None else before.silent_at)
    if before.silent_at is None:
        return before
    return replace(before, silent_at=None, silent_seconds=float(max(1, round(view.waited_seconds(before.silent_at)))))


def _failure(view: UpdateView, status: UpdateStatus) -> str:
    """Why waiting on is of no use, or empty."""
    worker = _newcomer(view)
    reason, message = ("", "") if worker is None else worker.trouble
    if worker is not None and (reason in STALLING or (reason in CRASHES and worker.endpoint.restarts >= CRASHES_BORNE)):
        return f"{worker.endpoint.name}: {message}"
    late = status.tried_at is not None and view.waited_seconds(status.tried_at) >= view.policy.recreate_deadline_seconds
    if not late:
        return ""
    why = f": {worker.endpoint.name}: {message}" if worker is not None and message else ""
    return f"it was not ready within {view.policy.recreate_deadline_seconds:g} s{why}"


def _returned(view: UpdateView) -> Update:
    status = _silent(view)
    message = f"the new worker was given up: {status.failure}; what served before is brought back; {_silence(status)}"
    return Update(
        status,
        Reason.RECREATE_FAILED,
        f"{message}. Mend spec.model or spec.worker; any change of them is tried as the first was",
    )


def _newcomer(view: UpdateView) -> Worker | None:
    return next((w for w in view.workers if w.endpoint.current and not w.endpoint.ending), None)


def _trouble(view: UpdateView) -> str:
    worker = _newcomer(view)
    return f"; {worker.endpoint.name}: {worker.trouble[1]}" if worker is not None and worker.trouble[1] else ""


def _silence(status: UpdateStatus) -> str:
    if status.silent_at is not None:
        return f"no request is answered since {format_time(float(int(status.silent_at)))}"
    if status.silent_seconds:
        return f"no request was answered for about {status.silent_seconds:g} s"
    return "from then on until it is ready no request is answered"
