"""What is known of the bundle before and after it has come: progress while it is fetched, and the digest it was proven
with.

A URI without a digest may mean another bundle tomorrow. The first worker that becomes ready with what lies there proves
it; its digest is kept in the status, and every later worker is told to serve that one and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offramp_core.control.objects import ModelStatus
from offramp_core.control.snapshot import Worker
from offramp_core.control.spec import ServiceSpec
from offramp_core.protocol import FetchProgress
from offramp_core.reasons import Reason

MODELS_KEPT = 5
STALLING = frozenset(
    {
        Reason.INVALID_BUNDLE,
        Reason.INVALID_MODEL,
        Reason.WORKER_CLASS_NOT_FOUND,
        Reason.WORKER_CLASS_CONTRADICTED,
        Reason.WORKER_CLASSES_UNREADABLE,
        Reason.WORKER_POOL_NOT_FOUND,
        Reason.NO_PLACE_IN_POOL,
        Reason.DIGEST_MISMATCH,
        Reason.ADDRESS_REFUSED,
        Reason.BUNDLE_TOO_LARGE,
    }
)  # waiting will not help: the bundle itself is at fault, or somebody must make or change a class or a pool
PERCENT_STEP = 5  # a status that changed with every byte would be written with every pull


def proven_models(
    models: tuple[ModelStatus, ...], spec: ServiceSpec, workers: Iterable[Worker]
) -> tuple[ModelStatus, ...]:
    """The kept digests, with that of the spec's URI once a worker of the present template serves it.

    A digest that the spec names replaces the one that was proven; else the first one stands.
    """
    before = next((m for m in models if m.uri == spec.model_uri), None)
    if before is not None and spec.model_digest in (None, before.digest):
        return models
    serving = (
        w.state.backbone_digest
        for w in workers
        if w.endpoint.current and w.endpoint.ready and w.state is not None and w.state.ready
    )
    digest = next((d for d in serving if spec.model_digest in (None, d)), None)
    if digest is None or spec.model_uri.startswith("file://"):
        return models
    others = (m for m in models if m.uri != spec.model_uri)
    return (ModelStatus(spec.model_uri, digest), *others)[:MODELS_KEPT]


def fetching(workers: Sequence[Worker]) -> str:
    """How far the first worker that fetches its bundle has come, rounded; empty where none does."""
    for worker in workers:
        if (
            not (worker.endpoint.ready or worker.endpoint.ending)
            and worker.state is not None
            and worker.state.fetching is not None
        ):
            return f"{worker.endpoint.name}: {_progress(worker.state.fetching)}"
    return ""


def _progress(progress: FetchProgress) -> str:
    if progress.phase == "connecting":
        return "connecting to where the bundle is"
    if progress.phase != "downloading":
        return f"{progress.phase} the bundle"
    if not progress.total_bytes:
        return f"downloading the bundle, {_size(_two_digits(progress.done_bytes))} so far"
    percent = progress.done_bytes * 100 // progress.total_bytes // PERCENT_STEP * PERCENT_STEP
    done = progress.total_bytes * percent // 100
    return f"downloading the bundle, {_size(done)} of {_size(progress.total_bytes)} ({percent} %)"


def _two_digits(n: int) -> int:
    unit: int = 10 ** max(0, len(str(n)) - 2)
    return n // unit * unit


def _size(n: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if n >= size:
            return f"{n / size:.1f} {unit}"
    return f"{n} B"
