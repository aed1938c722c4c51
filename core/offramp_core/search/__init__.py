"""Exact search: thresholds for given ramps, and which ramps to use at all.

boxes.py       bounds on many ranges of cuts at once
branch.py      branch and bound over sets of ramps and over boxes of cuts, best bound first
compiled.py    the search's inner loops, compiled by numba; loaded where that pays (`pace`)
grid.py        the grid of thresholds a plan can store
limits.py      what a plan may get wrong
objective.py   what a plan is worth
pace.py        when a process goes over to compiled loops
placement.py   which ramps to use, and their thresholds, decided together
space.py       records arranged for search
sweep.py       a first bound on every set of ramps
thresholds.py  the exact optimum over the thresholds of given ramps, within error limits
"""
