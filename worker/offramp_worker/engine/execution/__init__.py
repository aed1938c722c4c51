"""What runs: graphs, stages, and who leaves where.

executor.py       a batch run as its runtime says
execute.py        who leaves where, stage by stage
sessions.py       the model's graphs, loaded
stages.py         a plan's stages on the host
device_stages.py  the same on a GPU
kept_stages.py    the same on CUDA, with bindings and memory that are kept
chains.py         which of them runs on which device
ramp_sets.py      the heads that are held, each with its sessions and records
scores.py         uncertainty of many heads at once
usual.py          which inputs may be answered early
turns.py          one executor for several engines
warming.py        shapes that run once before requests come
pace.py           what batches take here, in times of the bundle's profile
"""
