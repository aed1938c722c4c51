"""BentoML: base64 of the raw tensor in JSON (a root input of bytes would be parsed as JSON too). ``python bento.py
MODEL.onnx PORT``."""

import base64
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    environment = {**os.environ, "MODEL": sys.argv[1], "BENTOML_DO_NOT_TRACK": "true"}
    here = str(Path(__file__).resolve().parent)
    command = [
        sys.executable,
        "-m",
        "bentoml",
        "serve",
        "bento:Classifier",
        "--working-dir",
        here,
        "--host",
        "127.0.0.1",
        "--port",
        sys.argv[2],
        "--quiet",
    ]
    os.execve(sys.executable, command, environment)

import bentoml
import numpy as np
import onnxruntime as ort


@bentoml.service(workers=1, traffic={"timeout": 60}, logging={"access": {"enabled": False}}, metrics={"enabled": False})
class Classifier:
    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(os.environ["MODEL"], options, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0]

    @bentoml.api
    def infer(self, x: str) -> dict[str, int]:
        values = np.frombuffer(base64.b64decode(x), np.float32).reshape([1, *self.input.shape[1:]])
        return {"label": int(self.session.run(None, {self.input.name: values})[0].argmax())}
