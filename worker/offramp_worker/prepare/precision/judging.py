"""Forms of a model that are cheaper than fp32: what each is worth beside it on the device, and which may stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort

from offramp_core.bundle import TensorSpec
from offramp_worker.bundle.lengths import typical_batch
from offramp_worker.devices import CPU, Device, open_session
from offramp_worker.padded import run_at_once
from offramp_worker.prepare.heads.features import model_logits
from offramp_worker.prepare.measuring.profiling import Job, time_jobs
from offramp_worker.prepare.precision.mixing import Measure, error_variance, expected_disagreement, margin_errors
from offramp_worker.prepare.source.data import FloatArray
from offramp_worker.prepare.source.sources import Backbone

JUDGED_ROWS = 1_000
MAX_DISAGREEMENT = 0.05
WORTHWHILE = 0.9  # of the fp32 time, at some batch size
COMPARED_SIZES = (1, 4, 16, 32)
QUICK_SIZES = (1, 16)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One form of a model and what it is worth.

    ``disagreement`` is the share of judged rows it answers differently from fp32, ``expected`` the same by its errors
    on all of them, ``ratio`` its time over fp32's by batch size. ``refused`` says why it does not stay; empty for the
    one that does.
    """

    method: str
    disagreement: float
    expected: float
    ratio: Mapping[int, float]
    refused: str = ""

    @property
    def time(self) -> float:
        """Mean ratio."""
        return float(np.mean(list(self.ratio.values())))


@dataclass(frozen=True, slots=True)
class Lowered:
    """The graph that stays, or None, and everything that was tried; ``untried`` says why, where that is nothing."""

    model: onnx.ModelProto | None
    method: str
    tried: tuple[Candidate, ...]
    untried: str = ""

    @property
    def refused(self) -> str:
        """Why there is none; empty where there is one."""
        if self.model is not None:
            return ""
        return "; ".join(f"{c.method}: {c.refused}" for c in self.tried) or self.untried


@dataclass(frozen=True, slots=True)
class Judge:
    """Rows with what fp32 says of them on a device, and what to compare with it there."""

    fp32: ort.InferenceSession
    rows: Array
    spec: TensorSpec
    logits: FloatArray
    threads: int
    device: Device = CPU

    @classmethod
    def of(cls, backbone: Backbone, rows: Array, *, threads: int, device: Device = CPU) -> Judge:
        session = open_session(backbone.model, threads=threads, device=device)
        logits = model_logits(session, rows, backbone.input, device=device)
        return cls(session, rows, backbone.input, logits, threads, device)

    @property
    def margins(self) -> npt.NDArray[np.float64]:
        return margin_errors(self.logits, self.logits)[0]

    def candidates(
        self,
        models: Mapping[str, onnx.ModelProto],
        *,
        seconds: float,
        kind: Callable[[str], str] = lambda method: method,
    ) -> tuple[Candidate, ...]:
        """What each is worth, by its method's name; of a ``kind`` of methods the last one is timed for all."""
        sessions = self._open(models)
        ratios = self._ratios({kind(method): session for method, session in sessions.items()}, COMPARED_SIZES, seconds)
        return tuple(
            self._candidate(method, self._outputs(session, self.rows), ratios[kind(method)])
            for method, session in sessions.items()
        )

    def measures(self, models: Mapping[str, onnx.ModelProto], *, seconds: float) -> dict[str, Measure]:
        """Quick ones, on the rows that matter: those with the least margins."""
        near = np.argsort(self.margins, kind="stable")[: max(1, len(self.rows) // 4)]
        sessions = self._open(models)
        ratios = self._ratios(sessions, QUICK_SIZES, seconds)
        return {
            name: Measure(
                float(np.mean(list(ratios[name].values()))),
                float((margin_errors(self._outputs(session, self.rows[near]), self.logits[near])[1] ** 2).mean()),
            )
            for name, session in sessions.items()
        }

    def errors(self, models: Mapping[str, onnx.ModelProto]) -> dict[str, float]:
        """The expected disagreement of each, on all rows and without its time."""
        sessions = self._open(models)
        outputs = {name: self._outputs(session, self.rows) for name, session in sessions.items()}
        return {
            name: expected_disagreement(error_variance(logits, self.logits), self.margins)
            if np.isfinite(logits).all()
            else 1.0
            for name, logits in outputs.items()
        }

    def _candidate(self, method: str, logits: FloatArray, ratio: Mapping[int, float]) -> Candidate:
        odd = ~np.isfinite(logits).all(axis=1)
        differs = float(((logits.argmax(axis=1) != self.logits.argmax(axis=1)) | odd).mean())
        if odd.any():
            reason = f"what it says of {odd.mean():.1%} of the rows is no finite number"
            return Candidate(method, differs, 1.0, ratio, reason)
        expected = expected_disagreement(error_variance(logits, self.logits), self.margins)
        candidate = Candidate(method, differs, expected, ratio)
        return replace(candidate, refused=_cannot_pay(candidate))

    def _open(self, models: Mapping[str, onnx.ModelProto]) -> dict[str, ort.InferenceSession]:
        return {name: open_session(model, threads=self.threads, device=self.device) for name, model in models.items()}

    def _outputs(self, session: ort.InferenceSession, rows: Array) -> FloatArray:
        return model_logits(session, rows, self.spec, device=self.device)

    def _ratios(
        self, sessions: Mapping[str, ort.InferenceSession], sizes: Sequence[int], seconds: float
    ) -> dict[str, dict[int, float]]:
        timed = {"fp32": self.fp32, **sessions}
        ratios: dict[str, dict[int, float]] = {name: {} for name in timed}
        for size in sizes:
            batch = typical_batch(self.rows, self.spec, size=size)
            jobs = {name: Job(self._call(session, batch)) for name, session in timed.items()}
            medians = time_jobs(jobs, threads=self.threads, seconds=seconds / len(sizes), device=self.device)
            for name in timed:
                ratios[name][size] = medians[name] / medians["fp32"]
        return ratios

    def _call(self, session: ort.InferenceSession, rows: Array) -> Callable[[], object]:
        feed = {self.spec.name: rows}

        def run() -> object:
            with self.device.turn:
                return run_at_once(session, feed)

        return run


def _cannot_pay(candidate: Candidate) -> str:
    if candidate.disagreement > MAX_DISAGREEMENT:
        return f"it answers {candidate.disagreement:.1%} of the rows differently; at most {MAX_DISAGREEMENT:.0%} may be"
    if (best := min(candidate.ratio.values())) > WORTHWHILE:
        return f"it takes {best:.2f} of the fp32 time at best; {WORTHWHILE} or less would pay"
    return ""
