"""One worker process as both ports see it: loading, serving, broken or draining."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, Literal

from offramp_core.bundle import profile_arrays
from offramp_core.errors import InvalidBundleError
from offramp_core.protocol import Observations, RecordBlock, WorkerState
from offramp_worker.bundle.load import load_bundle
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.marker import CrashMarker
from offramp_worker.engine.sessions import Sessions
from offramp_worker.engine.tickets import Ticket
from offramp_worker.logs import log_event
from offramp_worker.metrics import Metrics
from offramp_worker.plans.apply import PlanDesk
from offramp_worker.plans.poll import PlanFile
from offramp_worker.settings import Settings

Phase = Literal["loading", "serving", "broken", "draining"]


class Worker:
    """What a process has and does. A worker whose bundle is broken stays up, unready, and says why."""

    def __init__(self, settings: Settings, *, deliver: Callable[[list[Ticket]], None]) -> None:
        self.settings, self._deliver = settings, deliver
        self.boot_id = uuid.uuid4().hex
        self.metrics = Metrics()
        self.marker = CrashMarker(settings.state_dir)
        self.phase: Phase = "loading"
        self.reason = "the bundle is being loaded"
        self.engine: Engine | None = None
        self.desk: PlanDesk | None = None
        self._plan_file: PlanFile | None = None

    def load(self) -> None:
        """Load and verify the bundle, build sessions, take the plan file's document, warm up; then be ready. Blocks for seconds.

        Raises
        ------
        InvalidBundleError
            The worker is left in phase ``broken``.
        """
        settings = self.settings
        try:
            bundle = load_bundle(settings.bundle, expected_digest=settings.model_digest)
            sessions = Sessions(bundle, threads=settings.threads)
        except InvalidBundleError as error:
            self.phase, self.reason = "broken", str(error)
            log_event("bundle-refused", level="error", reason=str(error))
            raise
        engine = Engine(
            bundle, sessions, uid=settings.uid, latency_seconds=settings.latency_seconds, max_queue_rows=settings.max_queue_rows,
            marker=self.marker, metrics=self.metrics, deliver=self._deliver, batching_name=settings.batching, cache_bytes=settings.cache_bytes,
            always_in_time=settings.always_in_time,
        )  # fmt: skip
        if self.marker.crashed_epoch is not None:
            log_event("earlier-process-crashed", level="warning", epoch=self.marker.crashed_epoch)
        if settings.public_key is not None:
            self.desk = PlanDesk(engine, public_key=settings.public_key, service_uid=settings.service_uid)
            if settings.plan_file is not None:
                self._plan_file = PlanFile(settings.plan_file, self.desk, poll_seconds=settings.poll_seconds)
                self._plan_file.look()
                self._plan_file.start()
        engine.start()
        self.engine = engine
        if self.phase == "loading":
            self.phase, self.reason = "serving", ""
            log_event(
                "serving",
                model=bundle.manifest.name,
                bundle=str(settings.bundle),
                batching=settings.batching,
                batch_rows=engine.batch_rows,
                threads=settings.threads,
            )

    @property
    def ready(self) -> bool:
        return self.phase == "serving" and self.engine is not None and self.engine.alive

    @property
    def alive(self) -> bool:
        """Whether the process is of use; False asks for a restart. A broken bundle does not: a restart would not mend it."""
        return self.engine is None or self.phase == "draining" or self.engine.alive

    def drain(self) -> None:
        """Stop being ready; requests that still arrive are answered until the listener closes."""
        self.phase, self.reason = "draining", "the worker is shutting down"

    def finish(self, *, seconds: float) -> None:
        """After the last request: finish drawn audits for up to ``seconds``, then stop. Blocks."""
        if self._plan_file is not None:
            self._plan_file.stop()
        if self.engine is not None:
            self.engine.close()
            if not self.engine.join(seconds):
                log_event("audits-abandoned", level="warning")
        self.marker.close()

    def state(self) -> WorkerState:
        """For ``GET /v1/state``. ``message`` of an unready worker is the reason of a broken bundle and nothing else."""
        if self.engine is None:
            return WorkerState(
                uid=self.settings.uid, boot_id=self.boot_id, service_uid=self.settings.service_uid, model="", ready=False,
                backbone_digest="", ramp_set_digest="", ramps=(), costs={}, crashed_epoch=self.marker.crashed_epoch,
                message=self.reason if self.phase == "broken" else "",
            )  # fmt: skip
        engine = self.engine
        manifest, active = engine.bundle.manifest, engine.active
        costs: dict[str, list[Any]] = {name: a.tolist() for name, a in profile_arrays(engine.bundle.profile).items()}
        return WorkerState(
            uid=self.settings.uid, boot_id=self.boot_id, service_uid=self.settings.service_uid, model=manifest.name, ready=self.ready,
            backbone_digest=manifest.backbone_digest, ramp_set_digest=manifest.ramp_set_digest,
            ramps=engine.bundle.columns, costs=costs, epoch=active.epoch,
            stable_hash=active.stable.plan.content_hash if active.stable else "",
            canary_hash=active.canary.plan.content_hash if active.canary else "",
            refused=self.desk.refused if self.desk else None, breaker_open=engine.breaker_open,
            crashed_epoch=self.marker.crashed_epoch, message=engine.describe() if self.ready else "",
        )  # fmt: skip

    def observations(self, *, after: int, now: float) -> Observations:
        """For ``GET /v1/observations``: all counters, and records from sequence number ``after`` on."""
        if self.engine is None:
            return Observations(self.settings.uid, self.boot_id, now, (), RecordBlock(0, 0, ""))
        return Observations(
            self.settings.uid, self.boot_id, now, self.engine.counters.snapshot(), self.engine.ring.read(after)
        )
