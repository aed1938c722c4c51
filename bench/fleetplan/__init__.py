"""Which plans, which hardware and how many workers, over time: ``python -m bench.fleetplan``.

The planner of core in the loop of a simulator, on real traces, beside named policies.

scenes.py   menus, pools and traces
runs.py     all policies on a scene
narrow.py   the operator's own rule as a policy
replays.py  whether budgets are kept, in many replays with certificates of their own
forecasts.py  what it is worth to remember earlier days
planning.py  how long many services take, how near the bound, and what noise changes
judged.py   what was asked, and whether it was met
pictures.py cost, misses and disagreement over time
"""
