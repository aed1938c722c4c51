"""Events about a service, and about the rollout that something happened to."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from offramp_core.control.objects import Service
from offramp_core.control.snapshot import Event
from offramp_core.errors import OfframpError
from offramp_operator.kube.cache import ObjectCache
from offramp_operator.kube.client import KubeClient, Lane
from offramp_operator.kube.kinds import EVENT, ROLLOUT, SERVICE, Object, made, uid_of
from offramp_operator.shell.log import log_event
from offramp_operator.shell.platform import ConflictError

EVENT_MESSAGE_LIMIT = 1024
SAME_EVENT_SECONDS = 60.0
REPORTER = "earlyexit.dev/offramp"


class EventPoster:
    """Posts Events in the name of this process, ``instance``."""

    def __init__(self, client: KubeClient, cache: ObjectCache, *, instance: str, clock: Callable[[], float]) -> None:
        self._client = client
        self._cache = cache
        self._instance = instance
        self._clock = clock

    async def emit(self, service: Service, event: Event) -> None:
        """Post an Event about the service, and one about the rollout. One that is lost is logged and changes
        nothing."""
        about = [made(SERVICE, name=service.name, namespace=service.namespace, uid=service.uid)]
        rollout = self._cache.get(ROLLOUT, service.namespace, event.rollout) if event.rollout else None
        if rollout is not None:
            of_rollout = made(ROLLOUT, name=event.rollout, namespace=service.namespace, uid=uid_of(rollout))
            about.insert(0, of_rollout)
        for regarding in about:
            related = next((other for other in about if other is not regarding), None)
            await self._post(self._event(event, regarding, related))

    def _event(self, event: Event, regarding: Object, related: Object | None) -> Object:
        now = self._clock()
        # The same transition reported by two processes, or again after a restart, has the same name and is there
        # already.
        same = f"{regarding['uid']}/{event.reason}/{event.message}/{int(now // SAME_EVENT_SECONDS)}"
        return made(
            EVENT,
            metadata={
                "name": f"{regarding['name']}.{hashlib.sha256(same.encode()).hexdigest()[:16]}",
                "namespace": regarding["namespace"],
            },
            eventTime=datetime.fromtimestamp(now, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            reportingController=REPORTER,
            reportingInstance=self._instance[:128],
            action=event.reason,
            reason=event.reason,
            note=event.message[:EVENT_MESSAGE_LIMIT],
            type="Warning" if event.warning else "Normal",
            regarding=regarding,
            **({"related": related} if related is not None else {}),
        )

    async def _post(self, body: Object) -> None:
        try:
            await self._client.create(EVENT, body, lane=Lane.STATUSES)
        except ConflictError:
            return  # it is there
        except OfframpError as error:
            about = f"{body['regarding']['namespace']}/{body['regarding']['name']}"
            message = f"{about}: Event {body['reason']} was not posted: {error}"
            log_event("event-lost", message, level=logging.WARNING, service=about)
