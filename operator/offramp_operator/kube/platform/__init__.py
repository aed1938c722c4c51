"""A cluster as a platform: reads from the cache, writes by server-side apply, and only where something differs.

:mod:`service_platform` puts the rooms together. :mod:`fleet`, :mod:`classes`, :mod:`shares`, :mod:`templates`,
:mod:`plan_store` and :mod:`trainings` read; :mod:`workers`, :mod:`pools`, :mod:`gateway`, :mod:`trainings`,
:mod:`statuses`, :mod:`plan_store` and :mod:`events` write, through :mod:`children` where an object may be somebody
else's or may have changed. :mod:`memory` is what lies between two passes.

children.py          writes to the objects of a service
classes.py           the WorkerClass that a service asks for
events.py            events about a service, and about the rollout that something happened to
fleet.py             the workers of a service as the cluster has them
gateway.py           the HTTPRoute that shares a service's requests between two versions, or its pools
handover.py          Deployments that nobody asks for any more, and when they may go
holds.py             no further pods are asked for while nodes reject them
memory.py            what is remembered of a service between passes
plan_store.py        the signed plan of a service, in a ConfigMap that its workers mount
pools.py             one Deployment for each pool of a service
service_platform.py  a cluster as the platform of services
shares.py            what each service may have of a WorkerClass that others use too
statuses.py          objects of our own kinds
templates.py         which pods a service should have now
trainings.py         trainings of ramps as Jobs
workers.py           workers are brought to what the spec asks for
"""
