"""WorkerPools: workers that several services share. A pool's pass makes the workers, says which holds what, and has
requests sent to those that serve; the passes of its services do everything else, as for workers of their own.

entry.py      the kind, as the operator's process manages it
pool.py       a pool as it was written, and as a service of the same workers would be
manifests.py  its Deployment and what stands beside it
members.py    its services: what workers are told of each
calls.py      its workers are asked and told
rates.py      how much time each service takes
plan.py       from what is known to what is to be: who holds what
reconcile.py  one pass
holders.py    the workers of a service, as its pool's status tells of them
"""
