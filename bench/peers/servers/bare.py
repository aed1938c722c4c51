"""A bare FastAPI handler: raw bytes in, the label out, ONNX Runtime called in the handler. ``python bare.py MODEL.onnx
PORT``."""

import sys

import numpy as np
import onnxruntime as ort
import uvicorn
from fastapi import FastAPI, Request

options = ort.SessionOptions()
options.intra_op_num_threads = 1
options.inter_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
name = session.get_inputs()[0].name
shape = [1, *session.get_inputs()[0].shape[1:]]
app = FastAPI()


@app.get("/health")
def health() -> dict[str, bool]:
    return {"ready": True}


@app.post("/infer")
async def infer(request: Request) -> dict[str, int]:
    x = np.frombuffer(await request.body(), dtype=np.float32).reshape(shape)
    return {"label": int(session.run(None, {name: x})[0].argmax())}


if __name__ == "__main__":
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=int(sys.argv[2]),
        log_level="warning",
        access_log=False,
        http="httptools",
        loop="uvloop",
    )
