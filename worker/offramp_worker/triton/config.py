"""What Triton reads beside the graph: ``config.pbtxt``, its ModelConfig in the text format of protocol buffers."""

from __future__ import annotations

from collections.abc import Iterable

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
) -> str:
    """The configuration of a model whose every tensor begins with the batch. All versions of a model share it, so
    nothing of one plan is in it.

    Parameters
    ----------
    inputs, outputs : TensorSpec
        With their shapes behind the batch; -1 is an axis that varies.
    max_batch : int
        How many rows Triton puts together, >= 1.
    """
    lines = [f"name: {quoted(name)}", f"backend: {quoted(BACKEND)}", f"default_model_filename: {quoted(MODEL_FILE)}"]
    lines.append(f"max_batch_size: {max_batch}")
    lines += _tensor_lines(inputs, outputs)
    lines.append(f"instance_group {{ count: 1 kind: KIND_{'GPU' if on_gpu else 'CPU'} }}")
    lines.append("dynamic_batching { }")
    return "\n".join(lines) + "\n"


def has_tensors(config: str, *, inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> bool:
    """Whether a configuration has these inputs and outputs as :func:`config_text` writes them; what is beside them may
    have been edited."""
    return _stripped(_tensor_lines(inputs, outputs)) in _stripped(config.splitlines())


def _stripped(lines: Iterable[str]) -> str:
    return "".join(f"{line.strip()}\n" for line in lines if line.strip())


def _tensor_lines(inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> list[str]:
    lines = []
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
    return lines


def quoted(text: str) -> str:
    r"""A string of the text format, in plain ASCII.

    >>> print(quoted('a "b" ü'))
    "a \"b\" \303\274"
    """
    plain = {ord('"'): '\\"', ord("\\"): "\\\\"}
    return '"' + "".join(plain.get(b, chr(b) if 32 <= b < 127 else f"\\{b:03o}") for b in text.encode()) + '"'
