"""ONNX Runtime sessions of one bundle: the exact model, the tapped model, and stages per set of active ramps."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from offramp_core.errors import InvalidBundleError, PlanRefusedError
from offramp_worker.bundle.graph import input_name, stage_model, tapped_model
from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.answers import labels
from offramp_worker.engine.scores import ScoreTables

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]

# Kernels of another processor sum in another order; a model that is the same differs by rounding, one that is not by far more.
RELATIVE_TOLERANCE = 1e-3
ABSOLUTE_TOLERANCE = 1e-3
CACHED_STAGE_SETS = 4


@dataclass(frozen=True, slots=True)
class Stage:
    """A piece of backbone up to ``target`` and the heads there, in one session. ``ramps`` are indices into the bundle's."""

    session: Any
    source: str
    outputs: tuple[str, ...]
    ramps: tuple[int, ...]

    def run(self, features: Array) -> tuple[Array, list[FloatArray]]:
        """(n, ...) features at the source → features at the target, and the logits (n, n_classes) of each head."""
        target, *logits = self.session.run(self.outputs, {self.source: features})
        return target, logits


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model and every ramp say: ``logits`` [n, C], ``uncertainty`` [n, R], ``prediction`` [n, R]."""

    logits: FloatArray
    uncertainty: FloatArray
    prediction: npt.NDArray[np.int32]


class Sessions:
    """All executors of a bundle. ``exact`` and ``tapped`` are built at once, stages when a plan asks for them."""

    def __init__(self, bundle: Bundle, *, threads: int) -> None:
        """Build and verify.

        Raises
        ------
        InvalidBundleError
            A graph does not load, or does not reproduce the bundle's probe on this machine.
        """
        self._bundle = bundle
        self._threads = threads
        self._lock = threading.Lock()
        self._stages: OrderedDict[tuple[int, ...], tuple[Stage, ...]] = OrderedDict()
        self.tables = ScoreTables(bundle.quantiles)
        self._input = input_name(bundle.backbone)
        self._exact = self._session(bundle.backbone, "backbone.onnx")
        self._tapped = self._session(tapped_model(bundle.backbone, bundle.heads), "ramps.safetensors")
        self._check_probe(self.exact(bundle.probe_x), "backbone.onnx")
        self._check_probe(self.tapped(bundle.probe_x).logits, "ramps.safetensors")

    def exact(self, x: Array) -> FloatArray:
        """Logits (n, n_classes) of the model as the user gave it."""
        logits: FloatArray = self._exact.run(None, {self._input: x})[0]
        return logits

    def tapped(self, x: Array) -> Scores:
        """Logits of the model and the scores of every ramp."""
        logits, *heads = self._tapped.run(None, {self._input: x})
        if not heads:
            return Scores(logits, np.empty((len(x), 0), np.float32), np.empty((len(x), 0), np.int32))
        said = labels(np.concatenate(heads)).reshape(len(heads), -1).T
        return Scores(logits, self.tables.uncertainty(range(len(heads)), heads), said.astype(np.int32))

    def stages(self, active: Sequence[int]) -> tuple[Stage, ...]:
        """Stages for the active ramps (indices, in network order); empty without any. Built once, then kept.

        Raises
        ------
        PlanRefusedError
            The stages do not reproduce the bundle's probe, so the plan cannot be served here.
        """
        key = tuple(active)
        if not key:
            return ()
        with self._lock:
            if key not in self._stages:
                self._stages[key] = self._build_stages(key)
            self._stages.move_to_end(key)
            while len(self._stages) > CACHED_STAGE_SETS:
                self._stages.popitem(last=False)
            return self._stages[key]

    def warm_up(self, sizes: Iterable[int], stages: Sequence[Stage] = ()) -> None:
        """Run every batch size once, so that no request pays for a first allocation."""
        for size in sizes:
            x = np.resize(self._bundle.probe_x, (size, *self._bundle.input_shape))
            if not stages:
                self.exact(x)
            for stage in stages:
                x = stage.run(x)[0]

    def _build_stages(self, active: tuple[int, ...]) -> tuple[Stage, ...]:
        bundle, source, stages = self._bundle, None, []
        for tensor, group in groupby(active, key=lambda j: bundle.ramps[j].tensor):
            stages.append(self._stage(source, tensor, tuple(group)))
            source = tensor
        stages.append(self._stage(source, None, ()))
        self._check_stages(stages)
        return tuple(stages)

    def _stage(self, source: str | None, target: str | None, ramps: tuple[int, ...]) -> Stage:
        heads = [self._bundle.heads[j] for j in ramps]
        model = stage_model(
            self._bundle.backbone, source=source, target=target, heads=heads, shapes=self._bundle.shapes
        )
        outputs = tuple(value.name for value in model.graph.output)
        return Stage(self._session(model, "backbone.onnx"), source or self._input, outputs, ramps)

    def _check_stages(self, stages: Sequence[Stage]) -> None:
        reference = self._tapped.run(None, {self._input: self._bundle.probe_x})
        value: Array = self._bundle.probe_x
        for stage in stages:
            value, heads = stage.run(value)
            for j, logits in zip(stage.ramps, heads, strict=True):
                if not _close(logits, reference[1 + j]):
                    raise PlanRefusedError(
                        "Unsupported", f"stages up to ramp {self._bundle.ramps[j].id!r} do not reproduce the probe"
                    )
        if not _close(value, reference[0]):
            raise PlanRefusedError("Unsupported", "the plan's stages do not reproduce the probe at the output")

    def _session(self, model: onnx.ModelProto, file: str) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        # Spinning pools of several sessions would fight for the cores that HTTP needs.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side
            raise InvalidBundleError(f"{file}: ONNX Runtime refuses it: {str(error).partition(chr(10))[0]}") from error

    def _check_probe(self, logits: FloatArray, file: str) -> None:
        expected = self._bundle.probe_logits
        if logits.shape != expected.shape or not _close(logits, expected) or not _same_answers(logits, expected):
            raise InvalidBundleError(f"{file}: does not reproduce the logits of probe.npz on this machine")


def _close(value: Array, expected: Array) -> bool:
    return bool(np.allclose(value, expected, rtol=RELATIVE_TOLERANCE, atol=ABSOLUTE_TOLERANCE * _scale(expected)))


def _scale(expected: Array) -> float:
    return max(1.0, float(np.abs(expected).max()))


def _same_answers(logits: FloatArray, expected: Array) -> bool:
    """Equal labels, except where the expected two best are closer than the tolerance: a tie by all that can be told."""
    top = np.sort(expected, axis=1)[:, -2:]
    tied = top[:, 1] - top[:, 0] <= 2 * ABSOLUTE_TOLERANCE * _scale(expected)
    return bool((tied | (labels(logits) == labels(expected))).all())
