"""Where sessions run: on the CPU or, through one of ONNX Runtime's providers, on a GPU.

A bundle's profile names the executor that it was measured with, and a worker runs the bundle there and nowhere else:
what a ramp saves on one device says nothing of another.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from weakref import WeakValueDictionary

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

from offramp_worker.bundle.tensors import closed_options, computes_in_halves
from offramp_worker.cuda_driver import driverless
from offramp_worker.padded import Padded, plans_for_sizes
from offramp_worker.weights import Shared, share

EXECUTOR = "onnxruntime-"
NOTHING = Shared(())
ARENA = "session.use_env_allocators"
# Spinning pools of several sessions would fight for the cores that HTTP needs.
_ENTRIES = {"session.intra_op.allow_spinning": "0"}


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device: its ``name`` for people and for ONNX Runtime's memory, and its ``provider``, which ``package``
    brings.

    Whatever opens or runs a session there does so in its ``turn``. ``memory`` is what ONNX Runtime calls its memory;
    empty: as the device. ``rounds`` says that its fp32 is another one than a CPU's, so that only the device itself
    knows what the reference says.
    """

    name: str
    provider: str
    package: str
    options: tuple[tuple[str, str], ...] = ()
    turn: AbstractContextManager[object] = field(default_factory=nullcontext, compare=False)
    memory_name: str = ""
    rounds: bool = False

    @property
    def memory(self) -> str:
        """What ONNX Runtime calls its memory."""
        return self.memory_name or self.name

    @property
    def executor(self) -> str:
        """What profiles call it."""
        return f"{EXECUTOR}{self.name}"

    @property
    def is_cpu(self) -> bool:
        """Whether its memory is that of this process."""
        return self.provider == "CPUExecutionProvider"

    @property
    def reference(self) -> Device:
        """Where the reference is asked: on the CPU, where fp32 says the same but for the order of sums."""
        return self if self.rounds else CPU

    @property
    def is_cuda(self) -> bool:
        """Whether NVIDIA's runtime reaches its memory."""
        return self.provider == "CUDAExecutionProvider"


CPU = Device("cpu", "CPUExecutionProvider", "onnxruntime")
# An exhaustive search for the quickest convolution takes half a second a batch size.
_CUDA = ("CUDAExecutionProvider", "onnxruntime-gpu[cuda,cudnn]")
_SEARCH = ("cudnn_conv_algo_search", "HEURISTIC")
CUDA = Device("cuda", *_CUDA, (("use_tf32", "0"), _SEARCH))
# TF32 rounds what goes into a product to ten bits: several times as fast, and no longer the model as it was given. Who
# says that this is the reference, as PyTorch's and TensorRT's users often do, names this device.
CUDA_TF32 = Device("cuda-tf32", *_CUDA, (("use_tf32", "1"), _SEARCH), memory_name="cuda", rounds=True)
# All sessions of WebGPU share one queue of commands, and two that run at once can end the process
# (microsoft/onnxruntime#32561).
WEBGPU = Device("webgpu", "WebGpuExecutionProvider", "onnxruntime-webgpu", turn=RLock())
DEVICES = {device.name: device for device in (CPU, CUDA, CUDA_TF32, WEBGPU)}


_CUDA_ERROR = re.compile(r"CUDA failure \d+: [^;]*[^; ]")  # behind the names of C++ functions


def open_session(
    model: onnx.ModelProto, *, threads: int, optimised: bool = False, device: Device = CPU
) -> ort.InferenceSession:
    """A session that spins on no core while it waits. An ``optimised`` graph, one of the CPU's, is left as it is.

    Operators that the device's provider does not have run on the CPU. On the CPU equal graphs are one session, and
    equal weights of others one array, on CUDA too: see :mod:`offramp_worker.weights`. There a graph that plans for
    sizes of batches is :class:`offramp_worker.padded.Padded`.

    Raises
    ------
    RuntimeError
        ONNX Runtime did not take the device; it may raise bare exceptions of its C++ side, too.
    """
    if optimised:
        return _open_shared(model, threads=threads)
    if device.is_cpu:
        # A graph that cannot be written and read again runs as it was given, or says itself what is wrong with it.
        with contextlib.suppress(Exception):
            return _open_shared(optimised_graph(model), threads=threads)
    weights = share(model, memory=device.memory) if device.is_cuda else NOTHING
    open_one = partial(_open_on, model, weights, threads=threads, device=device)
    return Padded(open_one) if device.is_cuda and plans_for_sizes(model) else open_one()


def _open_on(model: onnx.ModelProto, weights: Shared, *, threads: int, device: Device) -> ort.InferenceSession:
    with device.turn:
        data, options = model.SerializeToString(), _options(threads=threads)
        session = _Session(data, options, device, weights, left_out=_left_out(model))
    if session.get_providers()[0] != device.provider:
        raise RuntimeError(f"{device.provider} finds nothing to run on")
    return session


def optimised_graph(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph that ONNX Runtime runs for ``model`` on this machine's CPU. It raises bare exceptions of its C++
    side."""
    left_out = _left_out(model)
    return onnx.load_model_from_string(_written(model.SerializeToString(), _options(threads=1), left_out))


def _left_out(model: onnx.ModelProto) -> list[str]:
    """Steps of optimisation that a graph must do without: blocked layouts, which are of CPUs alone, can end the process
    where there is float16 (ONNX Runtime 1.31.1)."""
    return ["NchwcTransformer"] if computes_in_halves(model) else []


def _written(model: bytes, options: ort.SessionOptions, left_out: Sequence[str]) -> bytes:
    """ONNX Runtime hands an optimised graph out through a file only; on Linux one in memory, since a pod's disk may be
    read-only."""
    if sys.platform == "linux":
        file = os.memfd_create("optimised")
        try:
            options.optimized_model_filepath = f"/proc/self/fd/{file}"
            _write(model, options, left_out)
            return os.pread(file, os.fstat(file).st_size, 0)
        finally:
            os.close(file)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "optimised.onnx"
        options.optimized_model_filepath = str(path)
        _write(model, options, left_out)
        return path.read_bytes()


def _write(model: bytes, options: ort.SessionOptions, left_out: Sequence[str]) -> None:
    ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], disabled_optimizers=left_out)


class _Session(ort.InferenceSession):  # type: ignore[misc]
    """A session that keeps the ``weights`` that it shares, and not the bytes that it was made of."""

    def __init__(
        self,
        model: bytes,
        options: ort.SessionOptions,
        device: Device,
        weights: Shared = NOTHING,
        left_out: Sequence[str] = (),
    ) -> None:
        weights.into(options)
        super().__init__(
            model,
            options,
            providers=[(device.provider, dict(device.options))],
            disabled_optimizers=left_out,
            enable_fallback=0,  # to the CPU, when a run fails on the device: every price would be wrong from then on
        )
        self._weights = weights
        # ONNX Runtime's class holds them, the weights once more, for a fallback alone.
        self._model_bytes = None


_opened: WeakValueDictionary[tuple[bytes, int], _Session] = WeakValueDictionary()


def _open_shared(model: onnx.ModelProto, *, threads: int) -> ort.InferenceSession:
    """A session on the CPU for an optimised graph; there may be one for an equal graph."""
    data = model.SerializeToString()
    key = hashlib.blake2b(data, digest_size=32).digest(), threads
    session = _opened.get(key)
    if session is None:
        options = _options(threads=threads)
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = _opened[key] = _Session(data, options, CPU, share(model))
    return session


def _options(*, threads: int) -> ort.SessionOptions:
    options = closed_options()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # what fails is raised
    for entry, value in _ENTRIES.items():
        options.add_session_config_entry(entry, value)
    return options


def missing(device: Device) -> str:
    """Why nothing can run there, and what would help; empty where something can."""
    if device.is_cpu:
        return ""
    if device.provider not in ort.get_available_providers():
        return f"this ONNX Runtime has no {device.provider}; install {device.package} in place of onnxruntime"
    if device.is_cuda:
        if why := driverless(int(ort.cuda_version.partition(".")[0])):
            return why
        ort.preload_dlls()  # of NVIDIA's packages beside this one
    try:
        _run_small_model(device)
    except Exception as error:  # ONNX Runtime raises bare exceptions of its C++ side
        return why_not(str(error), device)
    return ""


def why_not(error: str, device: Device) -> str:
    """What an error of ONNX Runtime on a device means, and what would help."""
    own = _CUDA_ERROR.search(error)
    first = own[0] if own else error.partition("\n")[0]
    return f"{first}; are a GPU, its driver and the libraries of {device.package} there, and handed to this container?"


def share_arena() -> None:
    """Let all sessions on the CPU that are opened from now on take memory for what they compute from one arena. Each
    has its own otherwise and keeps the most that it ever needed, also while others run."""
    if ARENA not in _ENTRIES:
        memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
        ort.create_and_register_allocator(memory, None)
        _ENTRIES[ARENA] = "1"
    _run_small_model(CPU)  # which takes what comes once and for all, whichever model is first


def _run_small_model(device: Device) -> None:
    session = open_session(_small_model(), threads=1, device=device)
    with device.turn:
        session.run(None, {"x": np.ones((1, 1, 3, 3), np.float32)})


def _small_model() -> onnx.ModelProto:
    """A convolution and a product: the libraries for these are looked for when the first one comes."""
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", 1, 3, 3]) for name in "xy")
    one = helper.make_tensor("one", onnx.TensorProto.FLOAT, [1, 1, 1, 1], [1.0])
    nodes = [helper.make_node("Conv", ["x", "one"], ["c"]), helper.make_node("MatMul", ["c", "x"], ["y"])]
    graph = helper.make_graph(nodes, "small", [x], [y], [one])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
