"""The operator as it is, with its longest waits cut, so that an outage longer than every one of them fits into a test.

OFFRAMP_TEST_SLOWNESS (default 1) stretches them again, and production's Lease with them, for a machine that does much
else.
"""

from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace

import aiohttp

from offramp_core.control import decide
from offramp_operator import main
from offramp_operator.kube import client, leader, queue, watch
from offramp_operator.shell import observe

SLOWNESS = float(os.environ.get("OFFRAMP_TEST_SLOWNESS", "1"))

# Batches of the tiny model take times that scatter widely: a step below weight 100 would need 2,000 of them.
try:
    from offramp_core.control.rollouts import rollout, slowness
except ImportError:  # the release before this one, which an upgrade begins with
    from offramp_core.control import rollout  # type: ignore[attr-defined,no-redef]
    from offramp_core.evidence import exposure

    exposure.judged_batches_needed.__kwdefaults__["limit"] = 150
else:
    from offramp_core.control.workers import pool_plan

    pool_plan.WATCHED_SECONDS = 15.0
    slowness.LARGEST_BATCH_EXPOSURE = slowness.LARGEST_CHEAP_EXPOSURE = 150  # type: ignore[attr-defined]
rollout.ACK_TIMEOUT_SECONDS = 15.0 * SLOWNESS
decide.CANARY_LEASE_SECONDS = 10.0 * SLOWNESS
client.CONNECT_SECONDS, client.READ_SECONDS = 2.0 * SLOWNESS, 4.0 * SLOWNESS
queue.LAST_BACKOFF_SECONDS = 4.0
watch.RELIST_RETRY_SECONDS, watch.RELIST_SHARE = 2.0, 1.0
watch.Feed.relist_forever.__kwdefaults__["every"] = 5.0
main.LATE_SECONDS = 8.0 * SLOWNESS  # type: ignore[attr-defined]
main.LeaseSettings = functools.partial(  # type: ignore[misc,assignment]
    leader.LeaseSettings, duration_seconds=int(15 * SLOWNESS), renew_deadline_seconds=10.0 * SLOWNESS
)

# The operator asks workers by their own addresses, whatever proxy its environment names; here a proxy stands in between
# all the same.
proxied = functools.partial(aiohttp.ClientSession, proxy=os.environ["OFFRAMP_TEST_WORKERS_PROXY"])
observe.aiohttp = SimpleNamespace(**{**vars(aiohttp), "ClientSession": proxied})  # type: ignore[attr-defined]

sys.exit(main.main())
