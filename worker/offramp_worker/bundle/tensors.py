"""Tensors of an ONNX model, wherever they stand, and the files that they would be read from.

A tensor may name a file, or even an address in memory, in place of its values, and ONNX Runtime follows it while it
opens the model. So may every tensor: an initializer, dense or sparse, an attribute of any operator, in a branch, in a
local function, in training information. They are found by the types of the format's own fields, so that none can be
forgotten.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import onnx
import onnxruntime as ort

EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"


def external_tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor whose values are not in the model itself, with its place, such as
    ``graph.node[3].attribute[0].t``."""
    for place, tensor in _tensors(model, ""):
        if tensor.data_location == onnx.TensorProto.EXTERNAL or tensor.external_data:
            yield place, tensor


def computes_in_halves(model: onnx.ModelProto) -> bool:
    """Whether a graph has weights of float16, or turns anything into it."""
    half = onnx.TensorProto.FLOAT16
    casts = (node for node in model.graph.node if node.op_type == "Cast")
    return any(tensor.data_type == half for tensor in model.graph.initializer) or any(
        attribute.name == "to" and attribute.i == half for node in casts for attribute in node.attribute
    )


def closed_options() -> ort.SessionOptions:
    """Options of a session that reads no file: where a model names one all the same, it is looked for where nothing can
    be."""
    options = ort.SessionOptions()
    options.add_session_config_entry(EXTERNAL_FOLDER, os.devnull)
    return options


def _tensors(message: Any, place: str) -> Iterator[tuple[str, onnx.TensorProto]]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        single = hasattr(value, "ListFields")
        for index, part in enumerate([value] if single else value):
            inner = f"{place}.{field.name}" if single else f"{place}.{field.name}[{index}]"
            if isinstance(part, onnx.TensorProto):
                yield inner.removeprefix("."), part
            else:
                yield from _tensors(part, inner)
