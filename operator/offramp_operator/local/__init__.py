"""This machine as a platform: worker processes, a state folder and one loopback port.

state.py      the state folder: its lock, its paths, writing a file so that a crash leaves the old or the new one
store.py      objects as manifests that a person can read
template.py   what a worker process is started with
fleet.py      worker processes: started, probed, restarted, replaced one by one
roll.py       which worker to start or stop next (pure)
leash.py      ends a worker when its parent dies
front.py      one address for all workers
platform.py   the seam of the shell, on top of these
embedded.py   runs all of it until told to stop
"""
