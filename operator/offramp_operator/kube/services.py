"""Services as a managed kind: EarlyExitService, what belongs to one, and the reconciler that the machine's own shell
has as well."""

from __future__ import annotations

from collections.abc import Callable

from offramp_operator.kube.kinds import (
    AUTOSCALER,
    CHILDREN,
    CONFIG,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    EVENT,
    HTTP_ROUTE,
    JOB,
    NETWORK_POLICY,
    NETWORK_SERVICE,
    OWN,
    POD,
    REPLICA_SET,
    ROLLOUT,
    SERVICE,
    WORKER_CLASS,
    WORKER_POOL,
)
from offramp_operator.kube.managed import Managed, Reconcile, Right, Seat, forever
from offramp_operator.kube.manifests import WorkerSettings
from offramp_operator.kube.platform.service_platform import KubePlatform
from offramp_operator.kube.watch import class_users, service_key, service_matters
from offramp_operator.metrics import Metrics
from offramp_operator.shell.listeners import PassListener
from offramp_operator.shell.observe import Observer
from offramp_operator.shell.reconcile import Reconciler
from offramp_operator.shell.signing import SigningKey

TURN_SECONDS = 2.0  # between two questions whose turn it is
READ, CHANGE = "get list watch", "create delete get list patch watch"
RIGHTS = (
    Right(SERVICE, READ),
    Right(SERVICE, "get patch update", "status"),
    *(Right(kind, f"{CHANGE} update") for kind in (CONFIG, ROLLOUT)),
    *(Right(kind, "get patch update", "status") for kind in (CONFIG, ROLLOUT)),
    *(
        Right(kind, CHANGE)
        for kind in (DEPLOYMENT, NETWORK_SERVICE, CONFIG_MAP, DISRUPTION_BUDGET, NETWORK_POLICY, AUTOSCALER, HTTP_ROUTE)
    ),
    Right(JOB, "create delete get list watch"),
    *(Right(kind, READ) for kind in (REPLICA_SET, POD, WORKER_CLASS, WORKER_POOL)),
    Right(EVENT, "create"),
)


def services(
    workers: WorkerSettings,
    key: SigningKey,
    *,
    instance: str,
    metrics: Metrics,
    shards: Callable[[], tuple[frozenset[int], int]] = lambda: (frozenset({0}), 1),
    listeners: tuple[PassListener, ...] = (),
) -> Managed:
    """The entry of services.

    Parameters
    ----------
    workers, key
        What the administrator decided about workers; the key that signs plans.
    instance : str
        Name of this process in Events.
    shards : callable
        The shards that this process holds, and how many there are: their part of every limit on all services is its to
        give.
    listeners : tuple of PassListener
        Are shown every pass, besides ``metrics``.
    """

    def begin(seat: Seat) -> Reconcile:
        platform = KubePlatform(seat.client, seat.cache, workers=workers, instance=instance, shards=shards)
        observer = Observer()
        seat.closing.push_async_callback(observer.close)
        metrics.pace(platform.standing)
        metrics.records(observer.room_taken)

        def take_turns() -> None:
            for woken in platform.take_turns():
                seat.wake(woken)

        seat.beside(forever(TURN_SECONDS, take_turns))
        return Reconciler(platform, observer, key, listeners=(metrics, *listeners)).reconcile

    return Managed(
        SERVICE,
        begin,
        RIGHTS,
        own=OWN[1:],
        children=CHILDREN,
        belongs=service_key,
        matters=service_matters,
        users=class_users,
    )
