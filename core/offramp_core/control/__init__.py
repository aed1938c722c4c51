"""Rollout control: from what was observed to what to do next, as pure functions.

spec.py       the user's intent (EarlyExitService.spec), parsed and checked
objects.py    the objects the control plane owns, and their statuses
codec.py      objects to and from the JSON of the Kubernetes API
ledger.py     counters of many workers folded into one tally per step, exact under restarts
gates.py      tests that look for harm
rollout.py    phases of a RampRollout, as a list of named rules
training.py   when to train ramps on live traffic, and what becomes of a new ramp set
tuner.py      when to tune, and how many labels to ask for
conditions.py what the user is told
served.py     what a fleet serves: ramps, and what they cost
outcome.py    the objects as a decision leaves them
decide.py     one pass: snapshot and time in, decision out
"""
