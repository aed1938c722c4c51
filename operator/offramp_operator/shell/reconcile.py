"""One pass over one service: gather, observe, decide once, act in the order that makes a crash harmless."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offramp_core.control.decide import decide
from offramp_core.control.document import only_takes_away
from offramp_core.control.objects import Service, ServiceStatus
from offramp_core.control.rollouts.rollout import earns_its_place
from offramp_core.control.snapshot import Decision, Gathered, Observed, RecordStore, Snapshot, WorkerEndpoint
from offramp_core.control.stable.watch import Watch
from offramp_core.protocol import PlanDocument
from offramp_core.reasons import ConditionType, Reason
from offramp_core.tuning import TuningRequest, tune
from offramp_operator.shell.listeners import CompletedPass, PassListener
from offramp_operator.shell.log import log_event
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.platform import ConflictError, Platform, ServiceKey
from offramp_operator.shell.signing import SigningKey
from offramp_operator.shell.tunings import Tune, Tuning, Tunings

ACTIVE_REQUEUE_SECONDS = 1.0
CONFLICT_RETRY_SECONDS = 0.2
# At most, between attempts to bring workers to the spec that fail for a reason of the platform's.
WORKERS_RETRY_SECONDS = 30.0
IDLE_GROWTH = 1.5  # of the wait, from one look at an idle service to the next
IDLE_REQUEUE_SECONDS = 30.0  # at most; a canary's lease is longer than that, and an idle service has none
DECIDE_SECONDS = 120.0  # a decision is made at least so often, for what time alone changes
DECISIONS_A_SECOND = 5.0  # of that sort, about 1 % of a core: they become rarer where there are more than 600 services
MOST_DECIDE_SECONDS = 600.0
REFUSED_POKE_SECONDS = 60.0  # between pokes with a plan that was refused for what may pass without another plan
MAY_PASS = (Reason.RAMP_SET_NOT_HELD,)  # the store is mended, or was only slow to show a set

Decide = Callable[[Snapshot, float], Decision]


@dataclass(frozen=True, slots=True)
class _Idle:
    """A pass that had nothing to do: until something changes, the next ones only look whether anything has.

    A decision is a pure function of what was gathered, observed and of the time, so with the first two unchanged it
    would decide the same; what only time changes (cool-downs, deadlines of minutes) can wait ``until``.
    """

    changes: int
    revision: int
    workers: tuple[WorkerEndpoint, ...]
    token: str
    wait: float
    until: float


class Reconciler:
    """Runs passes. One key must not be reconciled twice at the same time; different keys may be.

    Parameters
    ----------
    platform, observer, key
        Side effects, pulls, and the key that signs plans.
    clock : callable
        Seconds since the epoch.
    decide, tune : callable
        The core's; arguments so that a test can watch the order of what is done with a decision.
    listeners : sequence of PassListener
        Called with every pass; nothing they do comes back.
    """

    def __init__(
        self,
        platform: Platform,
        observer: Observer,
        key: SigningKey,
        clock: Callable[[], float] = time.time,
        *,
        decide: Decide = decide,
        tune: Tune = tune,
        listeners: Sequence[PassListener] = (),
    ) -> None:
        self._platform = platform
        self._observer = observer
        self._key = key
        self._clock = clock
        self._decide = decide
        self._listeners = tuple(listeners)
        self._tunings = Tunings(tune, clock)
        self._uids: dict[ServiceKey, str] = {}
        self._watched_since: dict[ServiceKey, float] = {}
        self._watches: dict[ServiceKey, Watch | None] = {}
        self._idle: dict[ServiceKey, _Idle] = {}
        self._refusals: dict[ServiceKey, int] = {}  # attempts in a row to change workers that failed
        self._asked_all: dict[ServiceKey, float] = {}  # when workers that refuse a plan were last poked with it as well
        self._able: set[ServiceKey] = set()  # services whose last pass could do all that it decided

    async def reconcile(self, key: ServiceKey) -> float | None:
        """One pass; seconds until the next one, or None when the service is gone.

        Raises whatever the platform raises, conflicts aside; the caller retries with backoff.
        """
        wait, rested = await self._poll(key)
        if wait is not None:
            return wait
        changes = self._platform.changes(key)
        try:
            gathered = await self._platform.gather(key)
            if gathered is None:
                self.forget(key)
                return None
            self._meet(key, gathered.service)
            return await self._pass(key, gathered, changes, rested)
        except ConflictError as conflict:
            self._able.discard(key)
            log_event("conflict", f"{key}: {conflict}; trying again", level=logging.DEBUG, service=str(key))
            return CONFLICT_RETRY_SECONDS
        except Exception as error:
            self._able.discard(key)
            for listener in self._listeners:
                listener.failed(key, error, self._clock())
            raise

    def forget(self, key: ServiceKey) -> None:
        """Drop what is remembered of a service that is gone (or is now another leader's)."""
        self._uids.pop(key, None)
        self._watched_since.pop(key, None)
        self._watches.pop(key, None)
        self._idle.pop(key, None)
        self._refusals.pop(key, None)
        self._asked_all.pop(key, None)
        self._able.discard(key)
        self._tunings.forget(key)
        self._observer.forget(key)
        for listener in self._listeners:
            listener.gone(key)

    # --- the pass ----------------------------------------------------------------------------------

    def _meet(self, key: ServiceKey, service: Service) -> None:
        """A service may be deleted and made again between two passes: the new one inherits neither labels nor a
        tuning."""
        if self._uids.get(key, service.uid) != service.uid:
            self.forget(key)
        self._uids[key] = service.uid

    async def _poll(self, key: ServiceKey) -> tuple[float | None, float]:
        """Pull the workers of an idle service.

        Returns
        -------
        tuple
            Seconds until the next look, ever more while nothing is new, or None when a pass is due; and the wait to go
            on with where the pass is due for the time alone, else 0.
        """
        idle = self._idle.pop(key, None)
        if idle is None or idle.changes != self._platform.changes(key):
            return None, 0.0
        revision = await self._observer.poll(key, idle.workers, token=idle.token)
        if (revision, self._platform.changes(key)) != (idle.revision, idle.changes):
            return None, 0.0
        if self._clock() >= idle.until:
            return None, idle.wait
        wait = min(IDLE_REQUEUE_SECONDS, IDLE_GROWTH * idle.wait)
        self._idle[key] = replace(idle, wait=wait)
        return wait, wait

    async def _pass(self, key: ServiceKey, gathered: Gathered, changes: int, rested: float) -> float:
        service = gathered.service
        try:
            observed, revision, decision = await self._judge(key, gathered)
            # Whatever gives nobody more than is published waits for nothing: not for workers, and not for what is to be
            # stored.
            gives = decision.publish is not None and not only_takes_away(decision.publish, gathered.published)
            poked = not gives and await self._publish(key, gathered, observed, decision.publish)
        except Exception:
            await self._ensure_workers(gathered)  # which is no worse a spec for what went wrong with plans
            raise
        workers_error = await self._ensure_workers(gathered)
        await self._store(key, gathered, decision)
        if gives:
            poked = await self._publish(key, gathered, observed, decision.publish)
        await self._set_going(key, gathered, observed, decision)
        self._able.add(key)
        tuning, now = self._tunings.of(key), self._clock()
        for listener in self._listeners:
            listener.passed(key, CompletedPass(gathered, observed.workers, decision, now))
        wait = decision.requeue_after_seconds
        if tuning.running is not None or _lives(gathered):
            return min(wait, ACTIVE_REQUEUE_SECONDS)
        if workers_error:
            self._refusals[key] = self._refusals.get(key, 0) + 1
            return min(WORKERS_RETRY_SECONDS, ACTIVE_REQUEUE_SECONDS * 2.0 ** min(self._refusals[key] - 1, 10))
        self._refusals.pop(key, None)
        nothing_to_do = tuning.outcome is None and not poked and not _acts(decision, gathered)
        at_rest = nothing_to_do and not _in_motion(decision) and self._observer.at_rest(key)
        if at_rest and changes == self._platform.changes(key):
            wait = max(wait, rested)
            token = self._key.admin_token(service.uid)
            self._idle[key] = _Idle(changes, revision, gathered.workers, token, wait, now + self._decide_seconds())
        return wait

    async def _judge(self, key: ServiceKey, gathered: Gathered) -> tuple[Observed, int, Decision]:
        """What the workers say, the revision of that, and what follows.

        The pull renews the workers' leases only after a pass that could do what it decided: a canary whose end nobody
        can write must end by itself.
        """
        token = self._key.admin_token(gathered.service.uid)
        observed = await _observed(self._observer, key, gathered, token=token, renew=key in self._able)
        revision = self._observer.revision(key)
        tuning = self._tunings.collect(key)
        now = self._clock()
        since = self._watched_since.setdefault(key, now)
        snapshot = _snapshot(gathered, observed, tuning, watched_since=since, watch=self._watches.get(key))
        decision = self._decide(snapshot, now)
        self._watches[key] = decision.watch
        return observed, revision, decision

    def _decide_seconds(self) -> float:
        return min(MOST_DECIDE_SECONDS, max(DECIDE_SECONDS, len(self._watched_since) / DECISIONS_A_SECOND))

    async def _ensure_workers(self, gathered: Gathered) -> bool:
        """Whether it failed. The pass goes on all the same: what serves must stay watched while workers cannot be
        changed."""
        service = gathered.service
        try:
            await self._platform.ensure_workers(service, self._key.identity(service.uid))
        except ConflictError:
            raise
        except Exception as error:
            message = f"{service.namespace}/{service.name}: the workers could not be brought to the spec"
            log_event("workers-error", message, level=logging.ERROR, error=error)
            return True
        return False

    async def _store(self, key: ServiceKey, gathered: Gathered, decision: Decision) -> None:
        """Write what was decided in the order its docstring asks for; each write only where something differs."""
        await self._write_configs(gathered, decision)
        await self._write_rollouts(gathered, decision)
        await self._write_status(gathered, decision.status)
        if decision.status.tuning != gathered.service.status.tuning:
            self._tunings.digested(key)
        for name in decision.delete_rollouts:
            await self._platform.delete_rollout(gathered.service, name)
        for name in decision.delete_configs:
            await self._platform.delete_config(gathered.service, name)

    async def _set_going(self, key: ServiceKey, gathered: Gathered, observed: Observed, decision: Decision) -> None:
        """Begin what takes its time, and tell people."""
        if decision.tune is not None:
            store = _store_for(observed, decision.tune)
            if store is not None:
                self._tunings.start(key, store.records, decision.tune)
        if decision.train is not None:
            await self._platform.train(gathered.service, decision.train)
        for event in decision.events:
            level = logging.WARNING if event.warning else logging.INFO
            log_event(event.reason, event.message, level=level, service=str(key))
            await self._platform.emit(gathered.service, event)

    async def _write_configs(self, gathered: Gathered, decision: Decision) -> None:
        known = {name: config.status for name, config in gathered.configs.items()}
        for config in decision.new_configs:
            if config.name not in known:
                await self._platform.create_config(gathered.service, config)
                known[config.name] = config.status
        for name, status in decision.config_statuses.items():
            if known.get(name) != status:
                await self._platform.write_config_status(gathered.service, name, status)

    async def _write_rollouts(self, gathered: Gathered, decision: Decision) -> None:
        known = {rollout.name: rollout.status for rollout in gathered.rollouts}
        new = decision.new_rollout
        if new is not None and new.name not in known:
            await self._platform.create_rollout(gathered.service, new)
            message = f"{new.name}: {new.from_config} → {new.to_config} ({new.cause})"
            log_event("rollout-created", message, rollout=new.name)
        for name, status in decision.rollout_statuses.items():
            before = known.get(name)
            if before == status:
                continue
            await self._platform.write_rollout_status(gathered.service, name, status)
            if before is None or (before.phase, before.step) != (status.phase, status.step):
                log_event(
                    "rollout-phase",
                    f"{name}: {status.phase} {status.reason}".rstrip(),
                    rollout=name,
                    phase=status.phase,
                    step=status.step,
                    weight=status.weight,
                    verdict=status.verdict,
                )

    async def _write_status(self, gathered: Gathered, status: ServiceStatus) -> None:
        before, key = gathered.service.status, f"{gathered.service.namespace}/{gathered.service.name}"
        if status == before:
            return
        await self._platform.write_service_status(gathered.service, status)
        if status.phase != before.phase:
            log_event("phase", f"{status.phase}: {status.message}", service=key, phase=status.phase)
        if (status.tuning.state, status.tuning.message) != (before.tuning.state, before.tuning.message):
            log_event(
                "tuning",
                f"{status.tuning.state}: {status.tuning.message}".rstrip(": "),
                service=key,
                state=status.tuning.state,
                labels=status.tuning.labels,
                needed=status.tuning.labels_needed,
            )

    async def _publish(
        self, key: ServiceKey, gathered: Gathered, observed: Observed, document: PlanDocument | None
    ) -> bool:
        """Publish what is new, then poke; whether anybody was poked.

        Workers that missed an earlier poke are poked again, as kubelet's copy is slow; those that refused it too, now
        and then, where their reason may have passed.
        """
        published = gathered.published
        new = document is not None and document != published
        current = document if new else published
        if current is None:
            return False
        # A version on trial has another model: it would refuse every plan.
        workers = tuple(w for w in gathered.workers if not w.trial)
        now = self._clock()
        refused_too = now >= self._asked_all.get(key, -math.inf) + REFUSED_POKE_SECONDS
        behind = workers if new else _behind(workers, observed, current.epoch, refused_too=refused_too)
        if not new and not behind:
            return False
        if new or refused_too:
            self._asked_all[key] = now
        signed = self._key.sign(current)
        if new:
            previous = published.epoch if published is not None else 0
            await self._platform.publish(gathered.service, current, signed, previous_epoch=previous)
            share = f", canary on {current.weight_percent} % of batches" if current.canary is not None else ""
            log_event(
                "published",
                f"epoch {current.epoch}{share}",
                service=str(key),
                epoch=current.epoch,
                weight=current.weight_percent,
                canary=current.canary is not None,
            )
        await self._observer.poke(key, behind, token=self._key.admin_token(gathered.service.uid), signed=signed)
        return True


async def _observed(observer: Observer, key: ServiceKey, gathered: Gathered, *, token: str, renew: bool) -> Observed:
    service = gathered.service
    return await observer.observe(
        key,
        gathered.workers,
        token=token,
        tuning=service.status.tuning,
        renew=renew,
        windows=any(pool.max_workers is not None for pool in service.spec.pools),
        earning=any(earns_its_place(r, gathered.configs, service) for r in gathered.rollouts),
        published=gathered.published,
        bundle=service.status.ramp_sets.bundle,
    )


def _snapshot(
    gathered: Gathered, observed: Observed, tuning: Tuning, *, watched_since: float, watch: Watch | None
) -> Snapshot:
    return Snapshot(
        gathered,
        observed,
        tuning_outcome=tuning.outcome,
        tuning_running=tuning.running is not None,
        watched_since=watched_since,
        watch=watch,
    )


def _store_for(observed: Observed, request: TuningRequest) -> RecordStore | None:
    """The records of the ramp set that a tuning was decided for."""
    stores = (observed.records, *observed.more_records.values())
    return next((s for s in stores if s is not None and s.ramp_set_digest == request.ramp_set_digest), None)


def _acts(decision: Decision, gathered: Gathered) -> bool:
    """Whether a decision asks for anything at all beyond another look."""
    return (
        decision.status != gathered.service.status
        or bool(decision.config_statuses or decision.rollout_statuses or decision.new_configs or decision.events)
        or bool(decision.delete_configs or decision.delete_rollouts)
        or decision.new_rollout is not None
        or decision.publish is not None
        or decision.tune is not None
        or decision.train is not None
    )


def _in_motion(decision: Decision) -> bool:
    """Whether workers are being replaced or a new spec is on its way: what is decided then hangs on the time that has
    passed.

    A service that waits for its turn is told when it comes.
    """
    moving = (ConditionType.RECONCILING, ConditionType.WORKERS_UPDATING)
    waits = (Reason.WAITING_FOR_TURN, Reason.FLEET_UPDATE_STOPPED)
    return any(c.type in moving and c.status == "True" and c.reason not in waits for c in decision.status.conditions)


def _lives(gathered: Gathered) -> bool:
    """Whether a rollout is under way: its canary lease and its gates need a pull about every second. One that has not
    begun needs neither."""
    return any(not r.status.finished and r.status.phase != "Pending" for r in gathered.rollouts)


def _behind(
    workers: tuple[WorkerEndpoint, ...], observed: Observed, epoch: int, *, refused_too: bool
) -> tuple[WorkerEndpoint, ...]:
    """Workers that answer, have not taken ``epoch`` and have not refused it, or with ``refused_too`` only for what may
    pass."""
    states = {worker.endpoint.uid: worker.state for worker in observed.workers}
    return tuple(
        endpoint
        for endpoint in workers
        if (state := states.get(endpoint.uid)) is not None
        and state.ready
        and state.epoch < epoch
        and (
            state.refused is None or state.refused.epoch != epoch or (refused_too and state.refused.reason in MAY_PASS)
        )
    )
