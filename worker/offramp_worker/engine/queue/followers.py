"""Followers: requests for an input that another one already asks about, or that was answered before; they are not run.

The cache is :mod:`offramp_worker.engine.queue.cache`; here is when it may answer, and what a copied answer counts as.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

from offramp_core.reasons import RequestOutcome
from offramp_worker.engine.accounts.accounts import Accounts
from offramp_worker.engine.accounts.audits import Audit, audit_of
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.engine.queue.cache import PredictionCache
from offramp_worker.engine.queue.relief import may_have
from offramp_worker.engine.queue.tickets import Deliver, Ticket
from offramp_worker.metrics import Metrics


class Followers:
    """Every request that follows another has its answer, or goes into the queue itself; an answer that is copied counts
    and is drawn for audit like any other."""

    def __init__(
        self,
        cache: PredictionCache,
        *,
        arms: Arms,
        accounts: Accounts,
        metrics: Metrics,
        audit: Callable[[Audit], None],
        put_back: Callable[[Ticket], bool],
        deliver: Deliver,
        clock: Callable[[], float],
        room: Callable[[], int] = lambda: sys.maxsize,
    ) -> None:
        """``put_back`` queues a request that will not be answered by another one; False when nothing is run any
        more. ``room``: how many more may be drawn for audit; with none left nothing counts for a plan."""
        self._cache, self._arms, self._accounts, self._asked = cache, arms, accounts, metrics.cache
        self._audit, self._put_back, self._deliver, self._clock = audit, put_back, deliver, clock
        self._room = room
        metrics.cache_bytes.set_function(lambda: cache.size_bytes)

    def answers(self, ticket: Ticket) -> bool:
        """Whether a request is answered from the cache, or waits with another for the same input.

        Only where one runtime answers all: a canary must get its share of the requests. A request drawn for audit
        always runs, so that what is compared is drawn from all requests; results-only plans, where every row is
        compared, have no use for the cache, nor have requests with a deadline, which take what there is.
        """
        active = self._arms.active
        if ticket.deadline < math.inf or self._arms.canary(active) is not None:
            return False
        runtime = active.off if ticket.never_exit else self._arms.without_canary(active)
        if runtime.carry_on or not ticket.may_leave_under(runtime):
            return False
        config = f"{runtime.config}/{ticket.tier}"  # no tier is answered with what another one was told
        key = self._cache.key(ticket.x, never_exit=ticket.never_exit, epoch=active.epoch, config=config)
        drawn = not ticket.never_exit and any(u < runtime.audit_rate for u in ticket.draws)
        answer = None if drawn else self._cache.get(key)
        if answer is not None:
            self._asked("hit").inc()
            ticket.give(answer)
            ticket.cached = True
            self._count(ticket, runtime, counts=self._room() > 0)
            return True
        loose = may_have(ticket, runtime, active)
        joined = self._cache.join(key, ticket, config=runtime.config, loose=loose)
        self._asked("shared" if joined else "miss").inc()
        return joined

    def share(self, done: Sequence[Ticket], runtime: Runtime, *, counts: bool) -> None:
        """Give answers to the requests that wait with those that are done; what two plans answered is of no use to
        others. Where what is done does not count for the plan, neither do copies of it; copies of an answer under
        overload are such answers."""
        room = self._room() if counts else 0
        for ticket in done:
            followers = self._cache.finish(ticket, runtime)
            if runtime.carry_on or not ticket.ran_under(runtime) or not ticket.takes(runtime):
                self._queue(followers)
                continue
            self._queue([f for f in followers if not f.takes(runtime)])
            followers = [f for f in followers if f.takes(runtime)]
            if ticket.eased:
                active = self._arms.active
                strict = [f for f in followers if not may_have(f, runtime, active)]  # since a new document came
                self._queue(strict)
                followers = [f for f in followers if f not in strict]
            counted = set()
            for follower in followers:
                follower.give(ticket.answer)
                follower.tier = ticket.tier
                if room <= 0:
                    continue
                counted.add(follower)
                follower.audited = [not follower.never_exit and u < runtime.audit_rate for u in follower.draws]
                room -= sum(follower.audited)
            if followers:
                self._deliver(followers)
            for follower in followers:
                self._count(follower, runtime, counts=follower in counted)

    def abandon(self, ticket: Ticket) -> None:
        """A request will not be answered; those that wait with it go into the queue."""
        self._queue(self._cache.finish(ticket, None))

    def leave(self, ticket: Ticket) -> bool:
        """A request that waits with another goes away; False if it did not wait so."""
        return self._cache.leave(ticket)

    def forget(self) -> None:
        """Another document is in force: what was answered before is of no use any more."""
        self._cache.clear()

    def _count(self, ticket: Ticket, runtime: Runtime, *, counts: bool) -> None:
        latency = [self._clock() - ticket.admitted]
        for row, (exit_name, drawn) in enumerate(zip(ticket.exits, ticket.audited, strict=True)):
            if counts and not ticket.never_exit:
                self._accounts.count_replies(
                    runtime, exit_name, latency, drawn=int(drawn and not ticket.tier), eased=int(ticket.eased)
                )
            if drawn:
                self._audit(audit_of(ticket, row, ticket.x[row].copy(), runtime, compare=True, record=True))
            self._accounts.measure_replies(runtime, exit_name, latency, due=False)

    def _queue(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            if not self._put_back(ticket):
                ticket.error, ticket.pending = "the worker has shut down", 0
                self._accounts.unanswered(len(ticket.x), RequestOutcome.FAILED)
                self._deliver([ticket])
