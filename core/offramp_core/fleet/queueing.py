"""How much faster than its requests come a group of workers must be to answer them in time.

The workers of one column are one queue. Its length moves like a Brownian motion reflected at 0 whose drift is demand
minus capacity [1]_, [2]_, so that a wait exceeds t with a probability of at most

    exp(-2 t (capacity - demand) / (arrival variation + batch size * batch variation)).

Setting that to the share of requests that may be late gives a head-room in requests per second that does not depend on
the demand. What an integer program needs is linear for that reason.

Assumptions: arrivals keep their measured variation over windows as long as the objective; workers start a batch as soon
as they are free, with whatever waits; a request goes to a worker of its column that is free, or will be first. The
formula is one of heavy traffic: below it, it errs on the safe side, as it takes every request for one that waits.
Batches are whole, which a diffusion does not know: one may just have begun, so that of the objective only what two
batches leave counts as time to wait.

References
----------
.. [1] J. F. C. Kingman, "On queues in heavy traffic", J. Royal Statistical Society B 24 (1962).
.. [2] W. Whitt, "Approximations for the GI/G/m queue", Production and Operations Management 2 (1993); the factor of
   both variations is that of Allen and Cunneen.
"""

from __future__ import annotations

import math

from offramp_core.fleet.parts import Column, Service

BATCHES = 2.0  # of the objective: the one that has just begun, and the request's own


def headroom_rate(service: Service, column: Column) -> float:
    """Requests per second that the workers of a column must be able to answer beyond what comes; infinite where its
    batches leave no time to wait."""
    wait = service.latency_seconds - BATCHES * column.batch_seconds
    if wait <= 0:
        return math.inf
    variation = service.arrival_variation + column.key.batch_size * column.batch_variation
    return variation / 2 * math.log(1 / service.late_share) / wait
