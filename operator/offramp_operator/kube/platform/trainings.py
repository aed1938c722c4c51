"""Trainings of ramps as Jobs: begun, reported, and ended where nobody waits for them any more."""

from __future__ import annotations

from collections.abc import Callable

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import TrainingOrder, TrainingReport
from offramp_core.control.workers.versions import split_in_force
from offramp_core.errors import InvalidSpecError
from offramp_operator.kube import manifests, pods, training_jobs
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import ApiError, KubeClient
from offramp_operator.kube.kinds import JOB, POD, Object, name_of, uid_of
from offramp_operator.kube.platform.children import Children, NameTakenError, check_owner
from offramp_operator.kube.platform.memory import Memory
from offramp_operator.shell.platform import ConflictError


class Trainings:
    """The Jobs that train ramps."""

    def __init__(
        self, client: KubeClient, cache: ObjectCache, children: Children, *, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._cache = cache
        self._children = children
        self._clock = clock

    def report(self, service: Service, memory: Memory) -> TrainingReport | None:
        """What became of the training that the status speaks of."""
        sets, refused = service.status.ramp_sets, memory.refused
        if sets.state != "Training" or sets.capture_since_at is None:
            return None
        if refused is not None and (refused.attempt, refused.since) == (sets.attempt, sets.capture_since_at):
            return refused
        job = self._cache.get(JOB, service.namespace, manifests.training_name(service.name, sets.capture_since_at))
        if job is None or not pods.controls(service.uid, job):
            return None
        own = self._cache.owned(POD, uid_of(job))
        return training_jobs.report(job, own, attempt=sets.attempt, since=sets.capture_since_at, now=self._clock())

    async def begin(
        self, service: Service, memory: Memory, order: TrainingOrder, settings: manifests.WorkerSettings
    ) -> None:
        """Make the Job. What the API server refuses for good (a quota, an admission rule) is a training that failed."""
        if memory.class_trouble is not None:
            why = f"no Job could be made: {memory.class_trouble.message}"
            memory.refused = TrainingReport(order.attempt, "Failed", message=why, since=order.since)
            return
        try:
            main = split_in_force(service, 0, scaled=False).main  # ramps are trained for the model that serves
            await self._make_job(service, manifests.training_job(main, order, settings))
        except (InvalidSpecError, NameTakenError, ApiError) as error:
            why = error.message if isinstance(error, ApiError) else str(error)
            message = f"no Job could be made: {why}"
            memory.refused = TrainingReport(order.attempt, "Failed", message=message, since=order.since)

    async def end_unwanted(self, service: Service) -> None:
        """A training that nobody waits for any more is ended; one that is over stays for people to read."""
        sets = service.status.ramp_sets
        wanted = service.spec.training == "LiveTraffic" and sets.state == "Training"
        name = manifests.training_name(service.name, sets.capture_since_at or 0.0) if wanted else ""
        for job in self._cache.owned(JOB, service.uid):
            if name_of(job) != name and training_jobs.runs(job, self._cache.owned(POD, uid_of(job))):
                await self._children.remove(JOB, job)

    async def _make_job(self, service: Service, job: Object) -> None:
        """Create it, or find the one that an earlier pass has made."""
        try:
            live: Object | None = await self._client.create(JOB, job)
        except ConflictError:
            live = await self._client.get(JOB, service.namespace, name_of(job))
        if live is not None:
            check_owner(live, service.uid, JOB)
            self._cache.put(JOB, live)
