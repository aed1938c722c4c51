"""What is counted, and what is kept of requests.

accounts.py  everything that happens, counted once for the control plane and once for Prometheus
counters.py  counts per epoch and arm, and the ring of records
turns.py     whether sources take turns
scrape.py    the state, for Prometheus when it asks
audits.py    requests that are run to the reference later
captures.py  inputs kept for training
"""
