"""This machine as a platform: worker processes, a state folder and one loopback port.

state.py             the state folder: its lock, its paths, writing a file so that a crash leaves the old or the new one
store.py             objects as manifests that a person can read
template.py          what a worker process is started with
process.py           one worker process: started, probed, restarted, ended
fleet.py             all of a service, replaced one by one
roll.py              which worker to start or stop next (pure)
parent_death.py      ends a worker when its parent dies
front.py             one address for all workers
proxy.py             the process that listens there
records.py           recorded scores, kept over a restart
training_process.py  training of ramps: one process at a time
platform.py          the seam of the shell, on top of these
embedded.py          runs all of it until asked to stop
"""
