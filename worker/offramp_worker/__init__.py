"""Offramp's data plane: serves an exit bundle over the Open Inference Protocol, and prepares one.

cuda_driver.py  why NVIDIA's driver runs nothing here
devices.py    where sessions run: on the CPU or on a GPU
padded.py     sessions for batches of one size each, where another size costs new plans
documents.py  JSON documents from elsewhere as values of our own types
feedback.py   true labels from clients
front.py      the event loop's side of the engine
logs.py       one JSON line per notable event on stderr
main.py       entry point of the worker process
memory.py     memory that this process holds: given back, and in large pages
metrics.py    Prometheus metrics, for people and dashboards
page_locked.py  memory of the host that a GPU reads directly, for batches
private.py    opening files of this worker alone
process.py    one worker process, whatever it serves
reporting.py  what a worker reports of an engine to its control plane, also while the bundle is out of memory
settings.py   a worker's settings, parsed once from the environment
tracing.py    OpenTelemetry traces of inference requests
weights.py    weights that are in memory once, however many sessions read them
worker.py     a worker that classifies, as both ports see it
"""

import os

__version__ = "0.2.0"

# ONNX Runtime's Linux wheels report usage unless switched off; a model server must not talk to strangers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
