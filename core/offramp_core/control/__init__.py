"""Rollout control: from what was observed to what to do next, as pure functions.

spec.py        the user's intent (EarlyExitService.spec), parsed and checked
objects.py     the objects the control plane owns, and their statuses
codec.py       objects to and from the JSON of the Kubernetes API
snapshot.py    what was gathered for one pass, and what it decides
seen.py        what a pass sees of it, sorted by whom it concerns
draft.py       what a pass has decided so far; each step passes the next one on
served.py      what a fleet serves: ramps, and what they cost
ledger.py      counters of many workers folded into one tally per step, exact under restarts
trust.py       whose word counts, and the newest epoch that anybody knows
audit.py       how many requests to audit
tuner.py       when to tune, and how many labels to ask for
training.py    when to train ramps on live traffic, and what becomes of a new ramp set
slowness.py    the limits that a step's slowness gate is judged by
gates.py       tests that look for harm
rollout.py     phases of a RampRollout, as a list of named rules
falling.py     why exits go off under a stable plan, as a list of named rules
attempts.py    the rollout under way: what its rules see, what its verdict changes
proposals.py   what tuner and pin propose, and the audits they need
history.py     plans that may come back, and what is forgotten
watch.py       the detector over the stable plan's audits of all workers
holdback.py    what the stable plan saves, measured against batches held back
capacity.py    what workers answer with exits off, and how many it takes
delivery.py    the bundle on its way to the workers
update.py      how workers come to another bundle or image
recreate.py    how the only worker is replaced where there is room for one
versions.py    two versions of a model side by side
pace.py        whose workers may be replaced now when all are to be
rest.py        a service that nobody wants workers of
absent.py      a pass without workers that have reported their model
document.py    what workers should run, as one document
routes.py      tokens per second of generated answers, by how they were computed
conditions.py  what the user is told
status.py      the status of a service after a pass
outcome.py     the objects as a decision leaves them
decide.py      one pass: snapshot and time in, decision out
"""
