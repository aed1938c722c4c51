"""The imperative shell around `decide`, the same on Kubernetes and on one machine.

platform.py         what a platform must be able to do
manifests.py        objects of the control plane to and from the manifests people read
packing.py          counts of many worker processes in few bytes
signing.py          the operator's key: signed plans and the token of the admin ports
bounded.py          the HTTP client towards workers: no answer fills the memory
wire.py             documents, states and records to and from the bytes that travel
record_pool.py      the fleet's records of one ramp set, bounded
rolling_maximum.py  the highest of many readings of the last hour
variables.py        what a spec's options are called in a worker's environment
observe.py          pulls workers and pools what they saw
tunings.py          tunings beside the passes, and what they found
reconcile.py        one pass: gather, observe, decide, act
listeners.py        what a pass tells the web page and the metrics
log.py              one structured line per transition
"""
