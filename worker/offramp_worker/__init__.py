"""The data plane: serves exit bundles, and prepares them."""

import os

# ONNX Runtime's Linux wheels report usage unless told not to; a model server must not talk to strangers.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
