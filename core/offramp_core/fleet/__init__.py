"""Which certified plan serves where, and on how many workers: a pure planner for many services that share pools.

parts.py     what is planned from: pools, services, columns (certified plan x pool x batch size)
queueing.py  head-room: how much workers must be able to do beyond the demand, so that the objective holds
bursts.py    how much demand varies, and how much of that a plan is for
forecast.py  the demand by the time a new worker would answer
days.py      what came at each time of the last seven days, in a text that outlasts the process
exact.py     one service at given pool prices, exactly
shared.py    many services that share pools: prices, a bound, and a plan that fits
division.py  who gets how many workers of one kind that there are too few of
planner.py   when workers stay, and the table of what was considered
transition.py  what may be started, switched and stopped now on the way there
document.py  pools and services as people write them down

``offramp plan`` shows what it says of many services; the operator plans the pools of each service with it
(:mod:`offramp_core.control.workers.pool_plan`). Decision 99 says what was tried.
"""

from offramp_core.fleet.bursts import burst_variation, variation_to_plan_for
from offramp_core.fleet.days import EarlierDays, Usual, expected_rate, next_days, usual_rate
from offramp_core.fleet.division import Claim, divide
from offramp_core.fleet.document import LARGEST_BATCH, FleetDocument, parse_fleet
from offramp_core.fleet.forecast import (
    DAY_SECONDS,
    DAYS,
    HOUR_SECONDS,
    HOURS,
    OFTEN,
    RECENT,
    Window,
    predicted_rate,
)
from offramp_core.fleet.parts import Caution, Column, Key, Pool, Service, Workers
from offramp_core.fleet.planner import Considered, FleetPlan, ServicePlan, plan_fleet, saved_by_one_more
from offramp_core.fleet.queueing import headroom_rate
from offramp_core.fleet.transition import Present, Step, Switch, next_steps

__all__ = [
    "DAYS",
    "DAY_SECONDS",
    "HOURS",
    "HOUR_SECONDS",
    "LARGEST_BATCH",
    "OFTEN",
    "RECENT",
    "Caution",
    "Claim",
    "Column",
    "Considered",
    "EarlierDays",
    "FleetDocument",
    "FleetPlan",
    "Key",
    "Pool",
    "Present",
    "Service",
    "ServicePlan",
    "Step",
    "Switch",
    "Usual",
    "Window",
    "Workers",
    "burst_variation",
    "divide",
    "expected_rate",
    "headroom_rate",
    "next_days",
    "next_steps",
    "parse_fleet",
    "plan_fleet",
    "predicted_rate",
    "saved_by_one_more",
    "usual_rate",
    "variation_to_plan_for",
]
