"""The graph of a decoder, built from its sizes: a bundle holds numbers alone, and no graph that anybody wrote.

One forward pass of one or more sequences: ``tokens`` (B, n) behind ``lengths`` (B) tokens that the caches hold already.
Keys and values are written into the caches in place (the same buffer is bound as past and as present), so that a pass
costs no copy of them and several variants can share one cache. The head is computed for ``rows`` alone, places in the B
x n tokens.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from offramp_worker.generate.llama.architecture import BLOCK, Architecture, common_shapes, variant_shapes

OPSET, IR_VERSION = 21, 10
MICROSOFT = "com.microsoft"
# MatMulNBits' accuracy_level: activations are rounded to int8 by block, which CPUs multiply fastest.
INT8_ACTIVATIONS = 4


class _Builder:
    """Nodes of one graph, and which weights they read."""

    def __init__(self, a: Architecture, bits: int, head_bits: int) -> None:
        self.a, self.bits, self.head_bits = a, bits, head_bits
        self.nodes: list[onnx.NodeProto] = []

    def add(
        self,
        op: str,
        inputs: list[str],
        output: str,
        *,
        outputs: list[str] | None = None,
        domain: str = "",
        **attributes: object,
    ) -> str:
        names = outputs or [output]
        self.nodes.append(helper.make_node(op, inputs, names, name=output, domain=domain, **attributes))
        return output

    def product(self, x: str, name: str, n: int, k: int) -> str:
        """x times a matrix of the layers."""
        if self.bits == 32:
            return self.add("MatMul", [x, name], f"{name}/y")
        return self._few_bits(x, name, (n, k), bits=self.bits)

    def head(self, x: str, output: str) -> str:
        a = self.a
        if self.head_bits == 32:
            return self.add("Gemm", [x, "embedding" if a.tied else "head"], output, transB=1)
        return self._few_bits(x, "head", (a.vocabulary, a.hidden), bits=self.head_bits, output=output)

    def _few_bits(self, x: str, name: str, shape: tuple[int, int], *, bits: int, output: str = "") -> str:
        n, k = shape
        parts = [x, f"{name}.values", f"{name}.scales", f"{name}.zeros"]
        return self.add(
            "MatMulNBits",
            parts,
            output or f"{name}/y",
            domain=MICROSOFT,
            K=k,
            N=n,
            bits=bits,
            block_size=BLOCK,
            accuracy_level=INT8_ACTIVATIONS,
        )

    def norm(self, x: str, skip: str, weight: str) -> tuple[str, str]:
        """RMS norm of x + skip; that and the sum."""
        epsilon = self.a.norm_epsilon
        if not skip:
            return self.add("SimplifiedLayerNormalization", [x, weight], f"{weight}/y", axis=-1, epsilon=epsilon), x
        outputs = [f"{weight}/y", "", "", f"{weight}/sum"]
        self.add(
            "SkipSimplifiedLayerNormalization",
            [x, skip, weight],
            f"{weight}/y",
            outputs=outputs,
            domain=MICROSOFT,
            epsilon=epsilon,
        )
        return outputs[0], outputs[3]

    def layer(self, i: int, x: str, skip: str) -> tuple[str, str]:
        """Layer i on x + skip; again as two terms."""
        a, at = self.a, f"layers.{i}"
        normed, x = self.norm(x, skip, f"{at}.norm1")
        qkv = self.product(normed, f"{at}.qkv", a.qkv, a.hidden)
        inputs = [qkv, "", "", f"{at}.past_keys", f"{at}.past_values", "last", "longest", "cosines", "sines"]
        self.add(
            "GroupQueryAttention",
            inputs,
            f"{at}.attention",
            domain=MICROSOFT,
            num_heads=a.heads,
            kv_num_heads=a.kv_heads,
            outputs=[f"{at}.attention", f"{at}.keys", f"{at}.values"],
            do_rotary=1,
            rotary_interleaved=0,
            scale=a.head_size**-0.5,
        )
        attended = self.product(f"{at}.attention", f"{at}.out", a.hidden, a.attended)
        normed, x = self.norm(attended, x, f"{at}.norm2")
        both = self.product(normed, f"{at}.gate_up", 2 * a.intermediate, a.hidden)
        self.add("Split", [both], f"{at}.split", outputs=[f"{at}.gate", f"{at}.up"], axis=-1, num_outputs=2)
        gated = self.add("QuickGelu", [f"{at}.gate"], f"{at}.gated", domain=MICROSOFT, alpha=1.0)  # x * sigmoid(x)
        product = self.add("Mul", [gated, f"{at}.up"], f"{at}.product")
        return self.product(product, f"{at}.down", a.hidden, a.intermediate), x


def build(a: Architecture, *, bits: int, head_bits: int, taps: bool = False) -> onnx.ModelProto:
    """The model of one variant. Its weights are named and left out: whoever opens a session hands them over.

    ``taps``: what each matrix reads is an output too, for whoever rounds them.
    """
    b = _Builder(a, bits, head_bits)
    b.add("Gather", ["embedding", "tokens"], "embedded")
    x, skip = "embedded", ""
    for i in range(a.layers):
        x, skip = b.layer(i, x, skip)
    normed, _ = b.norm(x, skip, "norm")
    flat = b.add("Reshape", [normed, "flat_shape"], "flat")
    b.head(b.add("Gather", [flat, "rows"], "last_hidden"), "logits")
    read = [n.input[0] for n in b.nodes if n.op_type in ("MatMul", "MatMulNBits", "Gemm")] if taps else []
    graph = helper.make_graph(b.nodes, "decoder", _inputs(a), _outputs(a, read), _weights(a, bits, head_bits))
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def cache_names(a: Architecture) -> list[tuple[str, str]]:
    """Input and output of every cache: keys and values of layer after layer."""
    return [(f"layers.{i}.past_{kind}", f"layers.{i}.{kind}") for i in range(a.layers) for kind in ("keys", "values")]


def matrix_inputs(a: Architecture) -> dict[str, str]:
    """Which tensor each matrix reads, of a graph with taps."""
    read = {"head": "last_hidden"}
    for i in range(a.layers):
        at = f"layers.{i}"
        read |= {
            f"{at}.qkv": f"{at}.norm1/y",
            f"{at}.out": f"{at}.attention",
            f"{at}.gate_up": f"{at}.norm2/y",
            f"{at}.down": f"{at}.product",
        }
    return read


def _inputs(a: Architecture) -> list[onnx.ValueInfoProto]:
    cache = ["batch", a.kv_heads, "capacity", a.head_width]
    return [
        helper.make_tensor_value_info("tokens", TensorProto.INT64, ["batch", "new"]),
        helper.make_tensor_value_info("rows", TensorProto.INT64, ["rows"]),
        helper.make_tensor_value_info("last", TensorProto.INT32, ["batch"]),
        helper.make_tensor_value_info("longest", TensorProto.INT32, []),
        *(helper.make_tensor_value_info(past, TensorProto.FLOAT, cache) for past, _ in cache_names(a)),
    ]


def _outputs(a: Architecture, taps: list[str]) -> list[onnx.ValueInfoProto]:
    cache = ["batch", a.kv_heads, "capacity", a.head_width]
    return [
        helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", a.vocabulary]),
        *(helper.make_tensor_value_info(present, TensorProto.FLOAT, cache) for _, present in cache_names(a)),
        *(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in dict.fromkeys(taps)),
    ]


def _weights(a: Architecture, bits: int, head_bits: int) -> list[onnx.TensorProto]:
    tables = {name: (a.context_length, a.head_width // 2) for name in ("cosines", "sines")}
    stubs = [_stub(name, TensorProto.FLOAT, shape) for name, shape in (common_shapes(a) | tables).items()]
    for name, (kind, shape) in variant_shapes(a, bits, head_bits).items():
        stubs.append(_stub(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), shape))
    return [*stubs, helper.make_tensor("flat_shape", TensorProto.INT64, [2], [-1, a.hidden])]


def _stub(name: str, kind: int, shape: tuple[int, ...]) -> onnx.TensorProto:
    """A weight whose values are handed to the session in memory. The file that it names does not exist."""
    stub = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
    stub.external_data.add(key="location", value="handed-over")
    return stub
