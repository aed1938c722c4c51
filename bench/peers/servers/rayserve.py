"""Ray Serve: one replica, the raw tensor as a body of bytes. ``python rayserve.py MODEL.onnx PORT``."""

import os
import signal
import sys

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import onnxruntime as ort
import ray
from ray import serve
from starlette.requests import Request

MODEL = sys.argv[1] if len(sys.argv) > 2 else ""


@serve.deployment(num_replicas=1, max_ongoing_requests=1000)
class Classifier:
    def __init__(self, model: str) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0]

    async def __call__(self, request: Request) -> dict[str, int]:
        x = np.frombuffer(await request.body(), np.float32).reshape([1, *self.input.shape[1:]])
        return {"label": int(self.session.run(None, {self.input.name: x})[0].argmax())}


if __name__ == "__main__":
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=100 * 1024 * 1024,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2]), "access_log": False})
    serve.run(Classifier.bind(MODEL), route_prefix="/infer")
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    serve.shutdown()
    ray.shutdown()
