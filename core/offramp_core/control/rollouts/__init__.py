"""What a rollout is judged by, and how it goes on.

gates.py     tests that look for harm
slowness.py  the limits that a step's slowness gate is judged by
ledger.py    counters of many workers folded into one tally per step, exact under restarts
rollout.py   phases of a RampRollout, as a list of named rules
attempts.py  the rollout under way: what its rules see, what its verdict changes
"""
