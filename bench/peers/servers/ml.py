"""MLServer, Open Inference Protocol over REST: the raw tensor as base64 in JSON, adaptive batching on. ``python ml.py
MODEL.onnx PORT``."""

import asyncio
import base64
import sys

import numpy as np
import onnxruntime as ort
from mlserver import MLModel, MLServer
from mlserver.settings import ModelParameters, ModelSettings, Settings
from mlserver.types import InferenceRequest, InferenceResponse, ResponseOutput


class Onnx(MLModel):
    async def load(self) -> bool:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
        self.input = self.session.get_inputs()[0]
        return True

    async def predict(self, request: InferenceRequest) -> InferenceResponse:
        raw = base64.b64decode(request.inputs[0].data.root[0])
        x = np.frombuffer(raw, np.float32).reshape([1, *self.input.shape[1:]])
        label = int(self.session.run(None, {self.input.name: x})[0].argmax())
        output = ResponseOutput(name="label", shape=[1], datatype="INT64", data=[label])
        return InferenceResponse(model_name=self.name, outputs=[output])


async def main() -> None:
    port = int(sys.argv[2])
    settings = Settings(
        debug=False,
        host="127.0.0.1",
        http_port=port,
        grpc_port=port + 1,
        metrics_port=port + 2,
        parallel_workers=0,
        logging_settings={"version": 1, "root": {"level": "ERROR"}},
        metrics_endpoint=None,
    )
    server = MLServer(settings)
    await server.start([ModelSettings(name="resnet", implementation=Onnx, parameters=ModelParameters(version="1"))])


if __name__ == "__main__":
    asyncio.run(main())
