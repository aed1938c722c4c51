"""The path of a plan: a signed document is verified, its sessions are built, and it takes over between two batches.

apply.py         takes a plan document: verify, prepare in the background, switch between two batches
classifier.py    plans of the engine that classifies
fixed.py         a plan without a control plane, from a file
memory.py        what a worker remembers of its plans over a restart, in its state folder
poll.py          watches the plan file
preparation.py   from a plan document to what an engine runs
verification.py  whether a plan document is from the control plane and makes sense
"""
