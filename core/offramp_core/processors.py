"""How many processors a process may keep busy."""

from __future__ import annotations


def within_quota(processors: int, cpu_max: str) -> int:
    """Of the ``processors`` that a process may run on, as many as its cgroup's quota pays for: rounded down, at
    least 1.

    Parameters
    ----------
    cpu_max : str
        What cgroup v2 has in ``cpu.max``: the quota, or ``max`` for none, and the period.

    Raises
    ------
    ValueError
        It says something else.

    Examples
    --------
    >>> within_quota(32, "250000 100000"), within_quota(32, "max 100000"), within_quota(32, "50000 100000")
    (2, 32, 1)
    """
    quota, period = cpu_max.split()
    return processors if quota == "max" else min(processors, max(1, int(quota) // int(period)))
