"""Sessions for models with convolutions on CUDA: cuDNN plans a convolution for one shape.

ONNX Runtime keeps the plan of the shape that ran last. On an H200 a ResNet-50 whose batches change their size takes
91 ms for each instead of 8, at fp16 250 instead of 3. So each size has a session of its own, batches are filled up to
the next power of two, and what is not served, such as an audit, runs in pieces of one size. All these sessions read the
same weights (:mod:`offramp_worker.weights`).

A convolution that cuts an image into patches, a transformer's first step, is no reason: its plan takes 1 or 2 ms, and
filling batches up takes a third of the whole (ViT-B, sizes of 1 to 32: 25 ms on average instead of 15).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

Array = npt.NDArray[Any]
CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})
WHOLE_ROWS = 8  # of a piece of what is not served


def plans_for_sizes(model: onnx.ModelProto) -> bool:
    """Whether a new size of batch would cost new plans that take longer than to fill the batch up."""
    return any(node.op_type in CONVOLUTIONS and not _cuts_patches(node) for node in model.graph.node)


def _cuts_patches(node: onnx.NodeProto) -> bool:
    """Whether a convolution reads every value once."""
    of = {attribute.name: list(attribute.ints) for attribute in node.attribute}
    kernel = of.get("kernel_shape", [])
    return max(kernel, default=1) > 1 and of.get("strides") == kernel and not any(of.get("pads", []))


def padded_rows(rows: int) -> int:
    """The rows that run where a batch has ``rows`` >= 1: the next power of two.

    >>> padded_rows(1), padded_rows(5), padded_rows(32)
    (1, 8, 32)
    """
    return 1 << (rows - 1).bit_length()


def filled(x: Array, rows: int) -> Array:
    """``x`` (n, ...) with its last row repeated until there are ``rows``."""
    return x if len(x) == rows else np.concatenate([x, np.repeat(x[-1:], rows - len(x), axis=0)])


class Padded:
    """One graph, in a session for every size of batch; a session is opened when its size comes for the first time."""

    def __init__(self, open_one: Callable[[], Any]) -> None:
        """The first session is opened at once, so that a graph that cannot run is refused here."""
        self._open = open_one
        self._lock = threading.Lock()
        self._sessions = {WHOLE_ROWS: open_one()}

    def at(self, rows: int) -> Any:
        """The session for batches of ``rows``, a result of :func:`padded_rows`."""
        with self._lock:
            if rows not in self._sessions:
                self._sessions[rows] = self._open()
            return self._sessions[rows]

    def run(self, outputs: Sequence[str] | None, feed: Mapping[str, Array]) -> list[Array]:
        """As a session's: inputs (n, ...) of any n >= 1, in pieces of one size."""
        n = len(next(iter(feed.values())))
        session, parts = self.at(WHOLE_ROWS), []
        for begin in range(0, n, WHOLE_ROWS):
            piece = {name: value[begin : begin + WHOLE_ROWS] for name, value in feed.items()}
            rows = min(WHOLE_ROWS, n - begin)
            found = session.run(outputs, {name: filled(value, WHOLE_ROWS) for name, value in piece.items()})
            parts.append([value[:rows] for value in found])
        return [np.concatenate(values) for values in zip(*parts, strict=True)]

    def run_at_once(self, feed: Mapping[str, Array]) -> list[Array]:
        """Inputs (n, ...) filled up to one batch, as they are served."""
        n = len(next(iter(feed.values())))
        size = padded_rows(n)
        return [value[:n] for value in self.at(size).run(None, {name: filled(x, size) for name, x in feed.items()})]


def run_at_once(session: Any, feed: Mapping[str, Array]) -> list[Array]:
    """A batch through a whole model, whichever kind of session it has, as it is served: to be timed."""
    found: list[Array] = session.run_at_once(feed) if isinstance(session, Padded) else session.run(None, feed)
    return found
