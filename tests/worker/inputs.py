"""The tiny trained network behind other inputs than float32, for the tests that prepare and serve them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import prepared
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

TYPES = {"UINT8": np.uint8, "FP16": np.float16}


class Bytes(nn.Module):
    """Reads pixels of eight bits."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = prepared.trained_model()

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk((x.to(torch.float32) - 128) / 32)


class Halves(nn.Module):
    """Computes in half precision from the first layer to the last."""

    def __init__(self) -> None:
        super().__init__()
        state = {name: value.half() for name, value in prepared.trained_model().state_dict().items()}
        self.trunk = prepared.build_family("resnet", prepared.PARAMETERS).half().eval()
        self.trunk.load_state_dict(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.trunk(x)


def rows(datatype: str, n: int, *, seed: int) -> np.ndarray:
    """Images as a model of this input takes them."""
    x = prepared.images(n, seed=seed)[0]
    if datatype == "FP16":
        return x.astype(np.float16)
    return np.clip(np.rint(x * 32 + 128), 0, 255).astype(np.uint8)


def save_model(folder: Path, datatype: str, form: str) -> str:
    """Write the model as a program of torch.export or as ONNX; returns its path."""
    model = (Bytes() if datatype == "UINT8" else Halves()).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(model, (torch.from_numpy(rows(datatype, 2, seed=1)),), dynamic_shapes=shapes)
    path = folder / f"model.{form}"
    if form == "pt2":
        torch.export.save(program, path)
    else:
        torch.onnx.export(program, dynamo=True, input_names=["pixels"], output_names=["scores"]).save(str(path))
    return str(path)


def scores(kind: int) -> onnx.ModelProto:
    """A linear layer in half precision that a branch inside the graph goes through, over an input of some type."""
    half, weight = TensorProto.FLOAT16, np.linspace(-1, 1, 12, dtype=np.float16).reshape(4, 3)
    branch = [
        helper.make_graph(
            [helper.make_node("Add" if name == "then" else "Sub", ["h", "one"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, half, ["n", 4])],
            [numpy_helper.from_array(np.array(1, np.float16), "one")],
        )
        for name in ("then", "else")
    ]
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], to=half),
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["b"], then_branch=branch[0], else_branch=branch[1]),
        helper.make_node("MatMul", ["b", "w"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", kind, ["n", 4])],
        [helper.make_tensor_value_info("y", half, ["n", 3])],
        [numpy_helper.from_array(weight, "w")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
