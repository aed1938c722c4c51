"""A simulator of fleets: the workers of several services over time, second by second, with a policy in the loop.

parts.py     tasks, their measured plans and arrivals, and what a policy sees
compiled.py  the queue of a column's workers
world.py     workers that start, switch, stop, answer and cost
policies.py  the product's planner, and rivals by their published rules
"""

from offramp_lab.fleet.parts import Counts, Decision, Measured, Policy, Seen, Task
from offramp_lab.fleet.policies import (
    HorizontalPodAutoscaler,
    Infaas,
    LikeTheOperator,
    Planned,
    Proteus,
    cpu,
    in_flight,
)
from offramp_lab.fleet.world import LEAD_SECONDS, WINDOW_SECONDS, Outcome, TaskOutcome, simulate

__all__ = [
    "LEAD_SECONDS",
    "WINDOW_SECONDS",
    "Counts",
    "Decision",
    "HorizontalPodAutoscaler",
    "Infaas",
    "LikeTheOperator",
    "Measured",
    "Outcome",
    "Planned",
    "Policy",
    "Proteus",
    "Seen",
    "Task",
    "TaskOutcome",
    "cpu",
    "in_flight",
    "simulate",
]
