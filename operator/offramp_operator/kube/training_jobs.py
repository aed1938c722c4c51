"""What a Job reports of the training it runs, as pure functions. Its pod's last words are the result: no other way
leads out of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from offramp_core.control.snapshot import TrainingReport
from offramp_core.reasons import Reason
from offramp_operator.kube.failures import condition, failure, shortened
from offramp_operator.kube.kinds import Object, name_of
from offramp_operator.kube.manifests import TRAIN_CONTAINER

WORDLESS_SECONDS = 60.0  # how much later than a Job's end its pod's last words may be seen
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def report(job: Object, pods: Iterable[Object], *, attempt: int, since: float, now: float) -> TrainingReport:
    """What became of a training, or what keeps it from running.

    Parameters
    ----------
    pods : iterable of objects
        Those that the Job controls. The pod of a drained node may have been followed by another one.
    now : float
        Seconds since the epoch.
    """
    pods = list(pods)
    results = [result for pod in pods if (result := _result(pod)) is not None]
    if results:
        return _report(results[-1], attempt=attempt, since=since)
    failed, complete = condition(job, "Failed"), condition(job, "Complete")
    if failed.get("status") == "True":
        return TrainingReport(attempt, "Failed", message=_why(job, failed, pods), since=since)
    if complete.get("status") == "True" and _age(complete, now) > WORDLESS_SECONDS:
        message = f"Job {name_of(job)} ended without a result; see kubectl logs job/{name_of(job)}"
        return TrainingReport(attempt, "Failed", message=message, since=since)
    waiting = next((message for pod in pods if (message := _waits(pod))), "")
    return TrainingReport(attempt, "Running", message=waiting, since=since)


def runs(job: Object, pods: Iterable[Object]) -> bool:
    """Whether a training is not over; one that has reported its result is, also before the Job says so."""
    over = any(condition(job, kind).get("status") == "True" for kind in ("Failed", "Complete"))
    return not over and all(_result(pod) is None for pod in pods)


def _report(result: dict[str, Any], *, attempt: int, since: float) -> TrainingReport:
    if "error" in result:
        return TrainingReport(attempt, "Failed", message=shortened(str(result["error"])), since=since)
    digest = str(result.get("ramp_set_digest"))
    if not DIGEST.fullmatch(digest):
        message = f"the training reported no result: ramp_set_digest is {digest[:80]!r}"
        return TrainingReport(attempt, "Failed", message=message, since=since)
    try:
        return TrainingReport(
            attempt,
            "Succeeded",
            digest,
            int(result["rows"]),
            float(result["saving_before"]),
            float(result["saving_after"]),
            since=since,
        )
    except (KeyError, TypeError, ValueError) as error:
        return TrainingReport(attempt, "Failed", message=f"the training reported no result: {error}", since=since)


def _result(pod: Object) -> dict[str, Any] | None:
    """The JSON that the trainer left as its last words."""
    try:
        parsed = json.loads(str(_last(pod).get("message") or ""))
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _last(pod: Object) -> Object:
    """How the container ended that trains."""
    statuses = (pod.get("status") or {}).get("containerStatuses") or ()
    state = next((s.get("state") or {} for s in statuses if s.get("name") == TRAIN_CONTAINER), {})
    return dict(state.get("terminated") or {})


def _why(job: Object, failed: Object, pods: list[Object]) -> str:
    last = next((words for pod in reversed(pods) if (words := _last(pod)).get("exitCode")), {})
    if last.get("reason") == Reason.OOM_KILLED:
        return "it used more memory than its pod may; raise spec.worker.resources.limits.memory"
    if failed.get("reason") == "DeadlineExceeded":
        waited = next((message for pod in pods if (message := _waits(pod))), "")
        return (
            f"it took too long and was ended{f': {waited}' if waited else ''}; see kubectl describe job {name_of(job)}"
        )
    lines = str(last.get("message") or failed.get("message") or "no reason given").strip().splitlines()
    code = f"with exit code {last['exitCode']}" if last else f"as {failed.get('reason')}"
    return f"Job {name_of(job)} ended {code}: {shortened(lines[-1])}; see kubectl logs job/{name_of(job)}"


def _waits(pod: Object) -> str:
    """Why a pod does not run, which is a worker's pod in everything that can keep it from it."""
    return "" if (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed") else failure(pod)[1]


def _age(condition: Object, now: float) -> float:
    since = condition.get("lastTransitionTime")
    return now - datetime.fromisoformat(str(since)).timestamp() if since else 0.0
