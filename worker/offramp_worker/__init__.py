"""Offramp's data plane: serves an exit bundle over the Open Inference Protocol, and prepares one."""

import os

__version__ = "0.2.0"

# ONNX Runtime's Linux wheels report usage unless told not to; a model server must not talk to strangers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
