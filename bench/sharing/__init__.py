"""24 small services in two shared workers against a worker for each: ``python -m bench.sharing``.

services.py  the services, their popularity, and the two arms' processes
load.py      throughput, and p95 of every service at 0.6 of it
floods.py    a flood of one of them, a command of its own: ``python -m bench.sharing.floods``
cold.py      a service that is not in memory: seconds by step, and whether ``Retry-After`` was kept
packed.py    packing against first fit, one worker for each, and the fewest possible
policies.py  turns against round robin and FIFO, simulated
"""
