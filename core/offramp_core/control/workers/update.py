"""How workers come to another bundle or image: one ahead of those that serve, or in their place.

A platform's rolling update does the replacing; what is decided here is only whether it may start one worker more
than wanted (``Surge``) or must take an old one away first (``Replace``). Either way it goes on to the next worker when
the new one serves, so a bundle that never does costs nothing in the first case and one worker in the second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from offramp_core.control.objects import Service, UpdateStatus, UpdateStrategy
from offramp_core.control.snapshot import Worker, seconds_since
from offramp_core.control.spec import UpdatePolicy
from offramp_core.evidence.one_arm import log_e_value
from offramp_core.reasons import MaybeReason, Reason

ALPHA = 0.01  # chance of calling new workers worse that are like the old ones
FAILED_SHARE = 0.01  # of batches; more is broken
MOST_FAILED = 0.9  # above it there is nothing to compare
ENOUGH = 100  # batches, before what failed of them says anything
CIRCUMSTANCES = frozenset(
    {"Unschedulable", "SchedulingGated", "Evicted", "NodeLost"}
)  # nothing that other pods would not meet
MAX_BUSY = 0.9  # of the workers that stay; above it one fewer would make requests wait


@dataclass(frozen=True, slots=True)
class UpdateView:
    """What the decision may look at. ``desired`` workers are wanted; ``utilisation`` is their busy share in [0, 1].

    ``asked`` is the digest of the workers that the spec asks for, empty where there can be none.
    """

    before: UpdateStatus
    policy: UpdatePolicy
    workers: tuple[Worker, ...]
    desired: int
    utilisation: float
    now: float
    watched_since: float = 0.0
    asked: str = ""

    @property
    def old(self) -> tuple[Worker, ...]:
        """Workers that are still to be replaced."""
        return tuple(w for w in self.workers if not w.endpoint.current and not w.endpoint.ending)

    @property
    def ready(self) -> int:
        return sum(w.endpoint.ready for w in self.workers)

    @property
    def refused(self) -> Worker | None:
        """A new worker that the platform has no room for."""
        return next(
            (w for w in self.workers if w.endpoint.current and w.endpoint.no_room and not w.endpoint.ready), None
        )

    @property
    def spare(self) -> bool:
        """Whether the others can do the work of one that is taken away."""
        return self.desired >= 2 and self.utilisation * self.desired / (self.desired - 1) <= MAX_BUSY

    def waited_seconds(self, since: float) -> float:
        """Since a moment, which another operator's clock may have given."""
        return seconds_since(since, now=self.now, watched_since=self.watched_since)


@dataclass(frozen=True, slots=True)
class Update:
    """The next status, and what people are told: (reason, message) of the condition WorkersUpdating, empty where
    nothing is updated."""

    status: UpdateStatus = field(default_factory=UpdateStatus)
    reason: MaybeReason = ""
    message: str = ""

    @property
    def held(self) -> bool:
        return self.reason in (Reason.NO_ROOM_TO_SURGE, Reason.RECREATE_FAILED)


def resting_strategy(policy: UpdatePolicy, desired: int) -> UpdateStrategy:
    """How an update begins. The only worker is taken away for one that is not there yet where the user has said so, and
    nowhere else."""
    if policy.type == "Recreate":
        return "Replace"
    return "Replace" if policy.type == "ResourceAware" and desired >= 2 else "Surge"


def strategy_in_force(service: Service, desired: int) -> UpdateStrategy:
    """What the platform must apply. The status is one pass old, so what it says is checked against what is wanted
    now."""
    status, policy = service.status, service.spec.update_policy
    if policy.type == "Recreate":
        return "Replace"
    if status.update.strategy == "Replace" and (desired >= 2 or status.workers.ready == 0):
        return "Replace"
    return resting_strategy(policy, desired)


def brought_back(service: Service, asked: str) -> str:
    """Digest of the workers that serve instead of those ``asked`` for, which failed; empty where the latter are to be
    had."""
    update = service.status.update
    given_up = service.spec.update_policy.type == "Recreate" and update.strategy == "Return" and update.asked == asked
    return update.serving if given_up else ""


def next_update(view: UpdateView) -> Update:
    """Whether to go on one ahead, to replace in place, or to hold.

    Never takes a serving worker away for a new one unless ``desired`` is at least 2 and the policy allows it. A hold
    ends by itself when there is room.
    """
    if not view.old:
        return Update()
    status = replace(view.before, no_room_at=_no_room_since(view))
    strategy = _strategy(view, status)
    status = replace(status, strategy=strategy)
    n_new = sum(w.endpoint.ready and w.endpoint.current for w in view.workers)
    progress = f"{n_new} of {view.desired} workers run what the spec asks for"
    waits_for_room = strategy == "Surge" and view.refused is not None and status.no_room_at is not None
    if not waits_for_room and (failing := _failing(view)):
        return Update(
            status, Reason.NEW_WORKERS_FAIL, f"{progress}; {failing}; no further one is replaced before it serves"
        )
    if strategy == "Replace":
        return Update(status, Reason.REPLACING, f"{progress}; the next takes the place of an old one")
    if view.refused is None or status.no_room_at is None:
        return Update(status, Reason.SURGING, f"{progress}; the next starts before an old one goes")
    refused = f"no room for one worker more: {view.refused.endpoint.name}: {view.refused.endpoint.failure}"
    if view.waited_seconds(status.no_room_at) < view.policy.surge_deadline_seconds:
        return Update(status, Reason.WAITING_FOR_ROOM, f"{progress}; {refused}; waiting {_minutes(view.policy)} for it")
    return Update(status, Reason.NO_ROOM_TO_SURGE, f"{progress}; {refused}{_next_step(view)}")


def _failing(view: UpdateView) -> str:
    """What is wrong with the first new worker that cannot serve, or with what those that serve do; a lack of room is no
    fault of theirs."""
    for worker in view.workers:
        message = worker.trouble[1]
        if (
            worker.endpoint.current
            and message
            and not worker.endpoint.no_room
            and worker.trouble[0] not in CIRCUMSTANCES
        ):
            return f"{worker.endpoint.name}: {message}"
    return _fail_more(view)


def _fail_more(view: UpdateView) -> str:
    """Where the new workers fail more batches than the old ones beyond doubt: the sentence that says so."""
    new, old = (
        _batches(w for w in view.workers if w.endpoint.ready and w.endpoint.current is now) for now in (True, False)
    )
    bound = failures_allowed(*old)
    if new[0] == 0 or log_e_value(new[1], new[0], p0=bound) < math.log(1 / ALPHA):
        return ""
    return f"{new[1]} of {new[0]} batches of the new workers failed, {old[1]} of {old[0]} of the old ones"


def _batches(workers: Iterable[Worker]) -> tuple[int, int]:
    """Batches that workers ran, and how many of them failed."""
    seen = [w.observations for w in workers if w.observations is not None and not w.distrusted]
    counts = [count for observations in seen for count in (*observations.counts, *observations.held_back)]
    return sum(c.batches for c in counts), sum(c.failed_batches for c in counts)


def failures_allowed(batches: int, failed: int) -> float:
    """The share of batches that new workers may fail, where others failed so many: more is a broken one."""
    return min(MOST_FAILED, max(FAILED_SHARE, 2 * failed / batches if batches >= ENOUGH else 0.0))


def _no_room_since(view: UpdateView) -> float | None:
    if view.refused is None:
        return None
    return view.now if view.before.no_room_at is None else view.before.no_room_at


def _strategy(view: UpdateView, status: UpdateStatus) -> UpdateStrategy:
    if view.refused is not None and _broken_one_is_in_the_way(view):
        return "Replace"
    if view.desired < 2 or view.policy.type == "Availability":
        return "Surge"
    # Back to one ahead in mid-update would ask for room once more with every worker.
    if view.before.strategy == "Replace" or resting_strategy(view.policy, view.desired) == "Replace":
        return "Replace"
    since = status.no_room_at
    late = since is not None and view.waited_seconds(since) >= view.policy.surge_deadline_seconds
    in_vain = view.refused is not None and view.refused.endpoint.offered_nowhere
    return "Replace" if late and view.spare and not in_vain else "Surge"


def _broken_one_is_in_the_way(view: UpdateView) -> bool:
    """An old worker that cannot serve holds the room that its successor needs, and one ahead would wait for it for
    ever.

    With fewer ready than wanted, a rolling update in place takes away what does not serve and nothing else.
    """
    return view.ready < view.desired and any(not w.endpoint.ready and _failed(w) for w in view.old)


def _failed(worker: Worker) -> bool:
    return bool(worker.endpoint.failure) or (
        worker.state is not None and not worker.state.ready and bool(worker.state.message)
    )


def _next_step(view: UpdateView) -> str:
    """What would let the update go on, after what is wrong; empty where no old worker's leaving would, and the failure
    itself says what does."""
    if view.refused is not None and view.refused.endpoint.offered_nowhere:
        return ""
    room = "; free room (or raise the quota) for one worker more"
    if view.desired < 2:
        return f"{room}, or set updatePolicy.type to Recreate, which interrupts the service"
    if view.policy.type == "Availability":
        return f"{room}, or set updatePolicy.type to Auto, which then replaces workers in place"
    return f"{room}, or set updatePolicy.type to ResourceAware: the other workers are too busy to do without one"


def _minutes(policy: UpdatePolicy) -> str:
    seconds = policy.surge_deadline_seconds
    return f"{seconds:g} s" if seconds < 120 else f"{seconds / 60:g} min"
