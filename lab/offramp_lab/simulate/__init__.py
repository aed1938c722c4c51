"""The serving simulator: what a worker would have made of recorded decisions under real arrival times.

arrivals.py   when requests come: generators, and scaling a trace to a load
stages.py     seconds of segments, ramps and regrouping at every batch size, by stage
serving.py    the discrete-event loop
outcome.py    what came of each request
draws.py      what a policy chooses on a sample, judged on everything that was recorded
"""

from offramp_core.batching import BATCHING, MAX_BATCH, Batching, OfframpBatching, batching
from offramp_lab.simulate.arrivals import ARRIVALS, capacity, scaled, spread
from offramp_lab.simulate.outcome import ANSWERED, DROPPED, REJECTED, SimulatedRun
from offramp_lab.simulate.serving import serve_stream

__all__ = [
    "ANSWERED",
    "ARRIVALS",
    "BATCHING",
    "DROPPED",
    "MAX_BATCH",
    "REJECTED",
    "Batching",
    "OfframpBatching",
    "SimulatedRun",
    "batching",
    "capacity",
    "scaled",
    "serve_stream",
    "spread",
]
