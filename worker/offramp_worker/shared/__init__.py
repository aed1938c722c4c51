"""One worker process that holds several bundles: each with plans, audits, counters and doors of its own, all on one
executor.

settings.py    what its environment asks for
serve.py       the process: ports, one event loop, one executor
repository.py  which models are in memory
pooled.py      the same in a pool, where models come and go
delivered.py   which those are, as the operator says
looped.py      with one processor the event loop takes turns itself
model.py       one of the models: loaded or not, who waits for it, its own doors
room.py        what models take in memory, and which leave for others
expected.py    how long a request would wait for its model
idle.py        models that nobody asks for leave memory
loading.py     loads have a time, and threads that do not keep the process
http.py        both ports: what belongs to a model goes to its own door
inference.py   inference over REST for one of the models
grpc.py        the gRPC port
metrics.py     what Prometheus reads
"""
