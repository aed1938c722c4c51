"""What Triton reads beside the graph: ``config.pbtxt``, its ModelConfig in the text format of protocol buffers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from offramp_core.bundle import TensorSpec

BACKEND = "onnxruntime"
MODEL_FILE = "model.onnx"


def config_text(
    *,
    name: str,
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec],
    max_batch: int,
    on_gpu: bool,
    parameters: Mapping[str, str],
) -> str:
    """The configuration of a model whose every tensor begins with the batch.

    Parameters
    ----------
    inputs, outputs : TensorSpec
        With their shapes behind the batch; -1 is an axis that varies.
    max_batch : int
        How many rows Triton puts together, >= 1.
    parameters : mapping
        For people and tools; the backend ignores those that it does not know.
    """
    lines = [f"name: {quoted(name)}", f"backend: {quoted(BACKEND)}", f"default_model_filename: {quoted(MODEL_FILE)}"]
    lines.append(f"max_batch_size: {max_batch}")
    for kind, specs in (("input", inputs), ("output", outputs)):
        for spec in specs:
            # A row without an axis does not exist there: it is one of a single number, which is taken off again.
            shape = spec.shape or (1,)
            reshape = [] if spec.shape else ["  reshape { shape: [ ] }"]
            lines += [
                f"{kind} {{",
                f"  name: {quoted(spec.name)}",
                f"  data_type: TYPE_{spec.datatype}",
                f"  dims: [ {', '.join(map(str, shape))} ]",
                *reshape,
                "}",
            ]
    lines.append(f"instance_group {{ count: 1 kind: KIND_{'GPU' if on_gpu else 'CPU'} }}")
    lines.append("dynamic_batching { }")
    for key, value in parameters.items():
        lines.append(f"parameters {{ key: {quoted(key)} value {{ string_value: {quoted(value)} }} }}")
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    r"""A string of the text format, in plain ASCII.

    >>> print(quoted('a "b" ü'))
    "a \"b\" \303\274"
    """
    plain = {ord('"'): '\\"', ord("\\"): "\\\\"}
    return '"' + "".join(plain.get(b, chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in text.encode()) + '"'
