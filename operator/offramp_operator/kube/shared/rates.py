"""How much of an executor's time each service of a pool takes, from what its workers have counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offramp_core.control.shared_pool import SharedPoolStatus
from offramp_operator.kube.shared.plan import PodOfPool

HALF_LIFE_SECONDS = 60.0


@dataclass(slots=True)
class Rates:
    """Seconds of an executor a second by service, over a minute or so; a new operator goes on with those in the
    pool's status."""

    busy: dict[str, float] = field(default_factory=dict)
    #: Time, by each worker's clock, and busy seconds at the last answer, by worker and service.
    _last: dict[tuple[str, str], tuple[str, float, float]] = field(default_factory=dict)

    def measure(self, status: SharedPoolStatus, pods: Sequence[PodOfPool]) -> None:
        """Take what workers say. Where one that holds a service is silent, that service's rate stays as it is."""
        names = {service.uid: service.name for service in status.services}
        stored = {service.name: service.busy_millis / 1000 for service in status.services}
        silent = {pod.uid for pod in pods if pod.held is None}
        seen = {place: last for place, last in self._last.items() if place[0] in silent}
        unsure = {names.get(service_uid) for _, service_uid in seen}
        sums, seconds = dict[str, float](), 0.0
        for pod in pods:
            for model in pod.held.models if pod.held is not None else ():
                assert pod.held is not None
                place, now = (pod.uid, model.service_uid), (pod.held.boot_id, pod.held.now, model.busy_seconds)
                last = self._last.get(place, now)
                if last[0] == now[0] and now[1] > last[1] and (name := names.get(model.service_uid)):
                    seconds = now[1] - last[1]
                    sums[name] = sums.get(name, 0.0) + max(0.0, now[2] - last[2]) / seconds
                seen[place] = now
        self._last = seen
        weight = 1 - 0.5 ** (seconds / HALF_LIFE_SECONDS)
        for name, busy in sums.items():
            if name not in unsure:
                before = self.busy.get(name, stored.get(name, 0.0))
                self.busy[name] = before + weight * (busy - before)
