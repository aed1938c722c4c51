"""Why NVIDIA's driver runs nothing here, asked of the driver itself: ONNX Runtime logs some of it and puts the rest
behind the name of a function of six hundred characters."""

from __future__ import annotations

import ctypes

LIBRARY = "libcuda.so.1"
DRIVERS = {12: "525", 13: "580"}  # the first for each version of CUDA, which runs every release of it
_MPS = range(805, 810)  # of the errors of cuInit, those of the daemon through which processes share a GPU


def driverless(cuda: int) -> str:
    """Why nothing that is built for this version of CUDA can run in this process, and what would help; empty where it
    can.

    A driver is there where its library is: NVIDIA's container runtime puts it into a container that was given a GPU.
    """
    try:
        library = ctypes.CDLL(LIBRARY)
        version, count = ctypes.c_int(), ctypes.c_int()
        error = library.cuDriverGetVersion(ctypes.byref(version))
        if not error and version.value < 1000 * cuda:
            return too_old(version.value, cuda)
        error = error or library.cuInit(0) or library.cuDeviceGetCount(ctypes.byref(count))
        return broken(error, _words(library, error)) if error else "" if count.value else broken(100, "no GPU")
    except (OSError, AttributeError) as error:  # no such file, or a file that is no driver
        return (
            f"NVIDIA's driver is not here ({error}); in a cluster, workers must ask for a GPU, on a node whose "
            "container runtime hands the driver to them (its default, or spec.worker.runtimeClassName)"
        )


def too_old(version: int, cuda: int) -> str:
    """What to do about a driver that says it is for a ``version`` of CUDA, as 12040 is 12.4."""
    of = f"{version // 1000}.{version % 1000 // 10}"
    newer = f"{DRIVERS[cuda]} or newer" if cuda in DRIVERS else "one for that"
    return (
        f"the GPU's driver is too old: it is for CUDA {of}, and the worker needs one for CUDA {cuda}; update it to "
        f"{newer}, or run where it is"
    )


def broken(error: int, words: str) -> str:
    """What to do about a driver that gives no GPU: the number and words of its error."""
    if error in _MPS:
        remedy = "see that the MPS daemon runs on that machine, and how many processes may share its GPU"
    else:
        remedy = "in a cluster, workers must ask for one; nvidia-smi on that machine tells whether it is well"
    return f"NVIDIA's driver gives this process no GPU ({words}, error {error}); {remedy}"


def _words(library: ctypes.CDLL, error: int) -> str:
    text = ctypes.c_char_p()
    known = library.cuGetErrorString(error, ctypes.byref(text)) == 0
    return (text.value or b"").decode(errors="replace") if known else "unknown"
