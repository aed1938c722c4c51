"""Rollout control: from what was observed to what to do next, as pure functions.

spec.py        the user's intent (EarlyExitService.spec), parsed and checked
objects.py     the objects the control plane owns, and their statuses
codec.py       objects to and from the JSON of the Kubernetes API
snapshot.py    what was gathered for one pass, and what it decides
seen.py        what a pass sees of it, sorted by whom it concerns
draft.py       what a pass has decided so far; each step passes the next one on
served.py      what a fleet serves: ramps, and what they cost
trust.py       whose word counts, and the newest epoch that anybody knows
document.py    what workers should run, as one document
routes.py      tokens per second of generated answers, by how they were computed
shared_pool.py what a service in a pool of shared workers waits for
conditions.py  what the user is told
status.py      the status of a service after a pass
outcome.py     the objects as a decision leaves them
decide.py      one pass: snapshot and time in, decision out

rollouts/   what a rollout is judged by, and how it goes on
stable/     what is known of the plan that serves: its audits, what it saves, and why it falls
tuning/     when plans are looked for and ramps are trained, and what is proposed
workers/    how workers come to another bundle or image, and how many there are
"""
