"""LitServe, batching on: base64 of the raw tensor in JSON (it takes no raw bodies). ``python lit.py MODEL.onnx
PORT``."""

import base64
import sys

import litserve as ls
import numpy as np
import onnxruntime as ort


class Api(ls.LitAPI):
    def setup(self, _device):
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0]

    def decode_request(self, request):
        return np.frombuffer(base64.b64decode(request["x"]), np.float32).reshape(self.input.shape[1:])

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, x):
        return self.session.run(None, {self.input.name: x})[0].argmax(axis=1)

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"label": int(output)}


if __name__ == "__main__":
    api = Api(max_batch_size=32, batch_timeout=0.0, api_path="/infer")
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False, access_log=False
    )
