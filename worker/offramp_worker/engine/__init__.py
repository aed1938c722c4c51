"""The engine: sessions, batches, arms, exits, audits and what is counted. Knows no HTTP.

engine.py         takes turns: one batch, audit or probe at a time
options.py        its settings, in one object

Queue and answers

tickets.py        a request on its way through, and how one is refused
batcher.py        the queue, and the batches that are cut from it
executor.py       a batch run as its runtime says
replies.py        rows answered as they leave

Arms and leases, without threads

arms.py           what an arm runs, and the draws
leases.py         which arm a batch gets: the document in force, its leases, the breaker
breaker.py        the detector over the stable arm's audits
marker.py         which canary an earlier process died in

Accounts

accounts.py       everything that happens, counted once for the control plane and once for Prometheus
counters.py       counts per epoch and arm, and the ring of records
scrape.py         the state, for Prometheus when it asks
audits.py         requests that are run to the reference later
captures.py       inputs kept for training

Followers and deadlines

followers.py      requests that wait for another one's answer
cache.py          answers kept, and who waits with whom
deadlines.py      which rows cannot wait any longer

What runs

ramp_sets.py      the heads that are held, each with its sessions and records
sessions.py       the model's graphs, loaded
stages.py         a plan's stages on the host
device_stages.py  the same on a GPU
execute.py        who leaves where, stage by stage
scores.py         uncertainty of many heads at once
usual.py          which inputs may be answered early
warming.py        shapes that run once before requests come
vitals.py         whether the executor still works
"""
