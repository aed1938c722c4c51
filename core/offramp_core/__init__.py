"""Offramp's domain library: plans, records, search, certificates, evidence and rollout decisions.

Pure functions over frozen data. Nothing here reads a file, a clock, an environment variable or a random
seed of its own: time and randomness arrive as arguments, results leave as values.

admission.py    which requests can still be answered in time
audits.py       what audits cost: the engine's time beside the plan, after the replies
batching.py     how waiting requests become batches: one code for worker and simulator
binomial.py     binomial tails, without what SciPy takes to import
bundle.py       the exit bundle: what `offramp prepare` writes and a worker loads
columns.py      which columns of wide records belong to which precision of the backbone
costs.py        seconds of a batch of any size on its way through a plan's stages
edge.py         what an edge worker sends to its core, and whether it computes it itself
edge_relay.py   whether an edge or its core answers a request, by what both were measured to take
edge_settings.py  what users set of an edge, read and checked
errors.py       the error tree of every Offramp package
evaluate.py     what a threshold vector does on recorded traffic
execution.py    whether a plan carries every row to the output or drops those that left
npz.py          arrays of NumPy's formats from untrusted files
overload.py     when a worker answers by its thresholds for overload
plan.py         plans: which ramps are active and when an input may leave
precision.py    precisions of a backbone, by name
processors.py   how many processors a process may keep busy
protocol.py     the wire between control plane and worker
reasons.py      reasons, types of conditions and outcomes of requests: every word a machine may read why from
records.py      exit records: what every ramp would have said about each request
scale.py        what the numbers of an answer mean
sketch.py       a mergeable histogram of positive seconds with bounded relative error
task.py         what a model's outputs mean
tuning.py       one attempt to find and certify a better plan, from recorded traffic alone
uncertainty.py  from a head's logits to the uncertainty that a threshold is compared with
"""
