"""A small attention network over token ids, made with onnx.helper, and texts for it. No torch, no training.

A word's embedding says its topic (its id modulo 3) and a little noise; two layers of attention mix the words of a text,
and the classifier names the topic that most words have.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

WORDS, WIDTH, TOPICS, POSITIONS = 120, 24, 3, 48
PAD, SEP = 0, 5
Ids = npt.NDArray[np.int64]


def texts(n: int, *, seed: int, longest: int = 20) -> Ids:
    """(n, longest) ids of texts of different length, filled up with 0; each has a topic that most of its words
    share."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((n, longest), dtype=np.int64)
    for row in rows:
        length, topic = rng.integers(3, longest + 1), rng.integers(TOPICS)
        strays = rng.random(length) < rng.uniform(0.0, 0.6)
        words = rng.integers(1, WORDS // TOPICS, length) * TOPICS + topic
        row[:length] = np.where(strays, rng.integers(1, WORDS, length), words)
    return rows


def text_model(path: Path, *, inputs: tuple[str, ...] = ("input_ids", "attention_mask"), masked: bool = True) -> Path:
    """Write the network. Without ``attention_mask`` among the inputs it makes the mask itself; not ``masked``: it has
    none."""
    rng = np.random.default_rng(0)
    table = rng.normal(0, 0.3, (WORDS, WIDTH))
    table[np.arange(WORDS), np.arange(WORDS) % TOPICS] += 1.0
    weights = {
        "table": table,
        "places": rng.normal(0, 0.05, (POSITIONS, WIDTH)),
        "kinds": np.random.default_rng(1).normal(0, 0.5, (2, WIDTH)),
        "w0": rng.normal(0, 0.2, (WIDTH, WIDTH)),
        "w1": rng.normal(0, 0.2, (WIDTH, WIDTH)),
        "wc": np.eye(WIDTH, TOPICS) * 4,
        "none": np.array(0.0),
        "never": np.array(-1e9),
    }
    whole = {
        "pad": np.array(PAD),
        "one": np.array(1),
        "zero": np.array(0),
        "axis": np.array([1]),
        "last": np.array([2]),
    }
    nodes = [*_mask(inputs, masked=masked), *_embedding(typed="token_type_ids" in inputs)]
    for i in range(2):
        nodes += _layer(i)
    nodes += [
        helper.make_node("Cast", ["seen"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["float", "last"], ["column"]),
        helper.make_node("Mul", ["h2", "column"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axis"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["column", "axis"], ["count"], keepdims=0),
        helper.make_node("Div", ["sum", "count"], ["mean"]),
        helper.make_node("MatMul", ["mean", "wc"], ["scores"]),
    ]
    graph = helper.make_graph(
        nodes,
        "text",
        [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"]) for name in inputs],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["batch", TOPICS])],
        [numpy_helper.from_array(v.astype(np.float32), k) for k, v in weights.items()]
        + [numpy_helper.from_array(v.astype(np.int64), k) for k, v in whole.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def own_answers(path: Path, ids: Ids) -> npt.NDArray[np.float32]:
    """What the file itself says of each text alone, told which of its ids are words: (n, 3)."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    rows = []
    for row in ids:
        words = row[None, : max(1, int((row != PAD).sum()))]
        types = np.zeros_like(words)
        for place in np.flatnonzero(words[0] == SEP)[:1]:
            types[0, place + 1 :] = 1
        known = {"input_ids": words, "attention_mask": np.ones_like(words), "token_type_ids": types}
        rows.append(session.run(None, {value.name: known[value.name] for value in session.get_inputs()})[0])
    return np.concatenate(rows)


def _mask(inputs: tuple[str, ...], *, masked: bool) -> list[onnx.NodeProto]:
    if not masked:
        return [helper.make_node("GreaterOrEqual", ["input_ids", "zero"], ["seen"])]
    if "attention_mask" in inputs:
        return [helper.make_node("Equal", ["attention_mask", "one"], ["seen"])]
    return [helper.make_node("Equal", ["input_ids", "pad"], ["unseen"]), helper.make_node("Not", ["unseen"], ["seen"])]


def _embedding(*, typed: bool) -> list[onnx.NodeProto]:
    kinds = [
        helper.make_node("Gather", ["kinds", "token_type_ids"], ["kind"]),
        helper.make_node("Add", ["single", "kind"], ["h0"]),
    ]
    return [
        helper.make_node("Unsqueeze", ["seen", "axis"], ["row"]),
        helper.make_node("Where", ["row", "none", "never"], ["bias"]),
        helper.make_node("Shape", ["input_ids"], ["length"], start=1, end=2),
        helper.make_node("Squeeze", ["length"], ["end"]),
        helper.make_node("Range", ["zero", "end", "one"], ["order"]),
        helper.make_node("Gather", ["places", "order"], ["where"]),
        helper.make_node("Gather", ["table", "input_ids"], ["words"]),
        helper.make_node("Add", ["words", "where"], ["single" if typed else "h0"]),
        *(kinds if typed else ()),
    ]


def _layer(i: int) -> list[onnx.NodeProto]:
    return [
        helper.make_node("Transpose", [f"h{i}"], [f"keys{i}"], perm=[0, 2, 1]),
        helper.make_node("MatMul", [f"h{i}", f"keys{i}"], [f"match{i}"]),
        helper.make_node("Add", [f"match{i}", "bias"], [f"allowed{i}"]),
        helper.make_node("Softmax", [f"allowed{i}"], [f"share{i}"], axis=-1),
        helper.make_node("MatMul", [f"share{i}", f"h{i}"], [f"mixed{i}"]),
        helper.make_node("MatMul", [f"mixed{i}", f"w{i}"], [f"new{i}"]),
        helper.make_node("Add", [f"h{i}", f"new{i}"], [f"h{i + 1}"]),
    ]
