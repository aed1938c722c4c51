"""What is known of the plan that serves: its audits, what it saves, and why it falls.

audit.py     how many requests to audit
watch.py     the detector over the stable plan's audits of all workers
holdback.py  what the stable plan saves, measured against batches held back
falling.py   why exits go off under a stable plan, as a list of named rules
history.py   plans that may come back, and what is forgotten
"""
