"""ONNX Runtime sessions of one bundle: the exact model, the tapped models, models at the input, and stages per plan.

A *tapped* model is the backbone at one precision with all of its heads. Together with the models at the input they fill
all columns of a record.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from offramp_core.bundle import BACKBONE_FILE, PROFILE_FILE, RAMPS_FILE, side_model_file
from offramp_core.columns import FINAL_HEAD
from offramp_core.errors import InvalidBundleError, OfframpError, PlanRefusedError
from offramp_core.precision import EXACT, Precision
from offramp_core.reasons import Reason
from offramp_core.task import Answers, Task
from offramp_worker.bundle.graph import input_name, output_name, tapped_model
from offramp_worker.bundle.load import Bundle
from offramp_worker.bundle.stages import StageGraph, plan_stages
from offramp_worker.bundle.tensors import computes_in_halves
from offramp_worker.devices import missing, open_session
from offramp_worker.engine.execution.chains import chain_on
from offramp_worker.engine.execution.execute import Runnable
from offramp_worker.engine.execution.scores import ScoreTables
from offramp_worker.engine.execution.stages import StageSession
from offramp_worker.engine.execution.usual import UsualInputs
from offramp_worker.engine.execution.warming import warm_up

Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]

# Kernels of another processor sum in another order; a model that is the same differs by rounding, one that is not by
# far more.
RELATIVE_TOLERANCE = 1e-3
ABSOLUTE_TOLERANCE = 1e-3
HALF_TOLERANCE = 2e-2  # float16 has eleven bits, and a stage fuses other operators than the whole graph does
CACHED_STAGE_SETS = 2  # of a stable plan and a canary; each set has weights and threads of its own
_UNSUPPORTED = partial(PlanRefusedError, Reason.UNSUPPORTED)


@dataclass(frozen=True, slots=True)
class Scores:
    """What the model and every column of a record say: ``logits`` [n, C], ``uncertainty`` [n, R], ``prediction`` [n, R,
    ...].

    ``finals`` has the answer [n, ...] of the whole backbone at every precision. Answers are the task's: of a top label
    one number each.
    """

    logits: FloatArray
    uncertainty: FloatArray
    prediction: Answers
    finals: dict[Precision, Answers]


@dataclass(frozen=True, slots=True)
class _Tap:
    """A tapped model: its outputs are its logits, then those of the heads of columns ``ramps``. ``final`` is the column
    of its logits."""

    session: Any
    ramps: tuple[int, ...]
    final: int | None


class Sessions:
    """All executors of a bundle. ``exact``, the tapped models and those at the input are built at once, stages when a
    plan asks for them."""

    def __init__(self, bundle: Bundle, *, threads: int, like: Sessions | None = None) -> None:
        """Build and verify, on the device that the bundle was measured on. What no ramp set changes (the exact model
        and those at the input) is shared with ``like``, sessions of the same model with other heads.

        Raises
        ------
        InvalidBundleError
            That device is not here; or a graph does not load, or does not reproduce the bundle's probe on this machine.
        """
        self._bundle, self._device = bundle, bundle.device
        if reason := missing(self._device):
            message = f"{PROFILE_FILE}: measured with {self._device.executor}, but {reason}"
            raise InvalidBundleError.elsewhere(message, device=self._device.name)
        self.threads = threads
        self._lock = threading.Lock()
        self._stages: OrderedDict[tuple[Precision, tuple[int, ...]], tuple[StageSession, ...]] = OrderedDict()
        self._task = bundle.task
        self.tables = ScoreTables(bundle.quantiles, score=self._task.raw_score)
        self.usual = UsualInputs(bundle.manifest.inputs[0], bundle.probe_x)
        self._input = input_name(bundle.backbone)
        self._exact: Any = like._exact if like else self._session(bundle.backbone, BACKBONE_FILE)
        self._taps = {precision: self._tap(precision) for precision in bundle.backbones}
        self._sides: dict[int, Any] = (
            like._sides if like else {j: self._session(m, self._side_file(j)) for j, m in bundle.side_models.items()}
        )
        for file, session in self._approximations():
            self._check_answers(session, file)
        for file, logits in ((BACKBONE_FILE, self.exact), (RAMPS_FILE, lambda x: self.tapped(x).logits)):
            with _running(InvalidBundleError, f"{file}: does not run here"):
                self._check_probe(logits(bundle.probe_x), file)

    def exact(self, x: Array) -> FloatArray:
        """Logits (n, n_classes) of the model as the user gave it."""
        logits: FloatArray = self._run(self._exact, x)[0]
        return logits

    def tapped(self, x: Array) -> Scores:
        """What the model says, and what every column of a record does.

        A row that is not :class:`UsualInputs` leaves nowhere and is answered by the exact executor at every precision,
        and that is its message. So is one that overflows at a lower precision answered.
        """
        outputs: dict[int, FloatArray] = {j: self._run(session, x)[0] for j, session in self._sides.items()}
        whole: dict[Precision, FloatArray] = {}
        for precision, tap in self._taps.items():
            whole[precision], *heads = self._run(tap.session, x)
            outputs |= dict(zip(tap.ramps, heads, strict=True))
            if tap.final is not None:
                outputs[tap.final] = whole[precision]
        columns = [outputs[j] for j in range(len(outputs))]
        usual = self.usual.rows(x)
        odd = np.empty(0, np.intp) if usual is None else np.flatnonzero(~usual)
        finals = {precision: self._task.answers(logits) for precision, logits in whole.items()}
        for precision, answers in finals.items():
            answers[odd] = finals[EXACT][odd]
            lost = ~np.isfinite(whole[precision]).all(axis=1)
            answers[lost] = finals[EXACT][lost]
        if not columns:
            none = self._task.blank(len(x))[:, None][:, :0]
            return Scores(whole[EXACT], np.empty((len(x), 0), np.float32), none, finals)
        prediction = self._predictions(columns)
        uncertainty = self.tables.uncertainty(range(len(columns)), columns)
        uncertainty[odd] = 1.0
        for precision, tap in self._taps.items():
            if tap.final is not None:
                prediction[:, tap.final] = finals[precision]
        return Scores(whole[EXACT], uncertainty, prediction, finals)

    def _predictions(self, columns: Sequence[FloatArray]) -> Answers:
        """What every column answers, (n, R, ...), from what it says, (n, head_width) each."""
        answers = self._task.exit_answers(np.concatenate(columns))
        return answers.reshape(len(columns), -1, *answers.shape[1:]).swapaxes(0, 1).copy()

    def stages(self, active: Sequence[int], precision: Precision = EXACT) -> tuple[Runnable, ...]:
        """Stages of a plan's active columns, in network order; empty for none at fp32, where the exact executor serves.

        Their sessions are built once, then kept; their buffers belong to the caller.

        Raises
        ------
        PlanRefusedError
            The stages do not reproduce the bundle's probe, so the plan cannot be served here.
        """
        if not active and precision == EXACT:
            return ()
        key = (precision, tuple(active))
        with self._lock:
            if key not in self._stages:
                self._stages[key] = self._build_stages(*key)
            self._stages.move_to_end(key)
            while len(self._stages) > CACHED_STAGE_SETS:
                self._stages.popitem(last=False)
            return chain_on(self._device, self._stages[key])

    def cut_at(self, column: int) -> tuple[Runnable, ...]:
        """The exact model in stages that end at this column, which the caller keeps; raises as :meth:`stages` does."""
        return chain_on(self._device, self._build_stages(EXACT, (column,)))

    def exact_stage(self) -> Runnable:
        """The exact model as a stage with buffers of its own, for the one thread that serves."""
        whole = StageSession(self._exact, self._input, "", (output_name(self._bundle.backbone),), True, ())
        return chain_on(self._device, [whole])[0]

    def warm_up(self, most: int, stages: Sequence[Runnable]) -> None:
        """Run batches of up to ``most`` rows through the stages, so that few requests pay for a first allocation.

        Raises
        ------
        PlanRefusedError
            The stages do not run here: a GPU's memory may be too small for one more plan.
        """

        def run(x: Array) -> None:
            features, rows = x, None
            for stage in stages:
                features, _ = stage.run(features, x, rows)
                rows = None if self._device.is_cpu else np.arange(len(x))  # taking rows has a session of its own there

        with _running(_UNSUPPORTED, "the plan's stages do not run here"):
            warm_up(run, self._bundle.probe_x, self._bundle.manifest.inputs[0], most=most)

    def _build_stages(self, precision: Precision, active: tuple[int, ...]) -> tuple[StageSession, ...]:
        bundle = self._bundle
        file = bundle.manifest.file_of(precision)
        stages = tuple(
            self._stage(graph, group, self._side_file(group[0]) if group and group[0] in bundle.side_models else file)
            for group, graph in plan_stages(bundle, active, precision, optimise=self._device.is_cpu)
        )
        with _running(_UNSUPPORTED, "the plan's stages do not run here"):
            self._check_stages(precision, chain_on(self._device, stages))
        return stages

    def _stage(self, graph: StageGraph, ramps: tuple[int, ...], file: str) -> StageSession:
        session = self._session(graph.model, file, optimised=graph.optimised)
        return StageSession(session, graph.source, graph.entry, graph.outputs, bool(graph.target), ramps)

    def _tap(self, precision: Precision) -> _Tap:
        """The backbone at one precision with its heads; those that read the input go with the fp32 one."""
        bundle = self._bundle
        mine = [j for j, c in enumerate(bundle.columns) if (c.precision or EXACT) == precision]
        heads = {j: head for j in mine if (head := bundle.heads[j]) is not None}
        file = RAMPS_FILE if precision == EXACT else bundle.manifest.file_of(precision)
        session = self._session(tapped_model(bundle.backbones[precision], list(heads.values())), file)
        final = next((j for j in mine if bundle.columns[j].head == FINAL_HEAD), None)
        return _Tap(session, tuple(heads), final)

    def _side_file(self, column: int) -> str:
        return side_model_file(self._bundle.columns[column].id)

    def _check_stages(self, precision: Precision, stages: Sequence[Runnable]) -> None:
        bundle, tap = self._bundle, self._taps[precision]
        reference, *heads = self._run(tap.session, bundle.probe_x)
        expected = dict(zip(tap.ramps, heads, strict=True))
        tolerance = HALF_TOLERANCE if computes_in_halves(bundle.backbones[precision]) else ABSOLUTE_TOLERANCE
        features = x = bundle.probe_x
        for stage in stages:
            features, head_outputs = stage.run(features, x)
            for j, (logits, _) in zip(stage.ramps, head_outputs, strict=True):
                if j in expected and not _close(logits, expected[j], tolerance):
                    raise PlanRefusedError(
                        Reason.UNSUPPORTED, f"stages up to ramp {bundle.columns[j].id!r} do not reproduce the probe"
                    )
        if not _close(features, reference, tolerance):
            raise PlanRefusedError(Reason.UNSUPPORTED, "the plan's stages do not reproduce the probe at the output")

    def _session(self, model: onnx.ModelProto, file: str, *, optimised: bool = False) -> Any:
        try:
            return open_session(model, threads=self.threads, optimised=optimised, device=self._device)
        except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side
            raise InvalidBundleError(f"{file}: ONNX Runtime refuses it: {str(error).partition(chr(10))[0]}") from error

    def _run(self, session: Any, x: Array) -> Any:
        with self._device.turn:
            return session.run(None, {self._input: x})

    def _approximations(self) -> list[tuple[str, Any]]:
        """Whole models besides the reference: file and session."""
        others = [(self._bundle.manifest.file_of(p), tap.session) for p, tap in self._taps.items() if p != EXACT]
        return others + [(self._side_file(j), session) for j, session in self._sides.items()]

    def _check_answers(self, session: Any, file: str) -> None:
        """There is nothing to reproduce, but it must run here and answer for every class."""
        probe, wanted = self._bundle.probe_x, self._bundle.probe_logits.shape
        with _running(InvalidBundleError, f"{file}: does not run here"):
            logits = self._run(session, probe)[0]
        if logits.shape != wanted or logits.dtype != np.float32 or not np.isfinite(logits).all():
            raise InvalidBundleError(
                f"{file}: its output on probe.npz is {logits.dtype} {logits.shape}; it must be finite float32 {wanted}"
            )

    def _check_probe(self, logits: FloatArray, file: str) -> None:
        expected = self._bundle.probe_logits
        if not reproduces(logits, expected, self._task):
            raise InvalidBundleError(f"{file}: does not reproduce the logits of probe.npz on this machine")


@contextmanager
def _running(refused: Callable[[str], OfframpError], what: str) -> Iterator[None]:
    """What ONNX Runtime raises meanwhile, bare exceptions of its C++ side, as an error of ours."""
    try:
        yield
    except OfframpError:
        raise
    except Exception as error:
        raise refused(f"{what}: {str(error).partition(chr(10))[0]}") from error


def reproduces(logits: Array, expected: Array, task: Task) -> bool:
    """Whether an executor says of the probe's rows what the model says, as far as another machine can know."""
    same = logits.shape == expected.shape and _close(logits, expected)
    return same and (not task.names_classes or _same_answers(logits, expected, task))


def _close(value: Array, expected: Array, tolerance: float = ABSOLUTE_TOLERANCE) -> bool:
    return bool(np.allclose(value, expected, rtol=RELATIVE_TOLERANCE, atol=tolerance * _scale(expected)))


def _scale(expected: Array) -> float:
    return max(1.0, float(np.abs(expected).max()))


def _same_answers(logits: FloatArray, expected: Array, task: Task) -> bool:
    """Equal labels, except where the expected two best are closer than the tolerance: a tie as far as one can know."""
    top = np.sort(expected, axis=1)[:, -2:]
    tied = top[:, 1] - top[:, 0] <= 2 * ABSOLUTE_TOLERANCE * _scale(expected)
    return bool((tied | (task.answers(logits) == task.answers(expected))).all())
