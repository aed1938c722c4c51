"""The imperative shell around `decide`, the same on Kubernetes and on one machine.

platform.py   what a platform must be able to do
manifests.py  objects of the control plane to and from the manifests people read
signing.py    the operator's key: signed plans and the token of the admin ports
wire.py       documents, states and records to and from the bytes that travel
observe.py    pulls workers and pools what they saw
reconcile.py  one pass: gather, observe, decide, act
onlook.py     what a pass tells the web page
log.py        one structured line per transition
"""
