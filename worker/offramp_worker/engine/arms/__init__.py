"""Which plan a batch runs under, without threads.

arms.py     what an arm runs, and the draws
leases.py   which arm a batch gets: the document in force, its leases, the breaker
breaker.py  the detector over the stable arm's audits
tiers.py    which budget a request has, and who leaves in a batch that mixes them
marker.py   which canary an earlier process died in
"""
