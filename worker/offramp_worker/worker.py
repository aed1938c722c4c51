"""One worker process as both ports see it: loading, serving, broken or draining."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from offramp_core.bundle import profile_arrays
from offramp_core.errors import InvalidBundleError, OfframpError
from offramp_core.protocol import ArmCounts, FetchProgress, Observations, RecordBlock, WorkerState
from offramp_worker.bundle.load import Bundle, load_bundle, row_bytes
from offramp_worker.edge.forwarding import Edge
from offramp_worker.edge.link import Link
from offramp_worker.engine.accounts.captures import Captures
from offramp_worker.engine.arms.marker import CrashMarker
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.execution.turns import SharedTurn
from offramp_worker.engine.options import EngineOptions
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.logs import log_event
from offramp_worker.memory import return_memory
from offramp_worker.metrics import Metrics
from offramp_worker.plans.apply import PlanDesk
from offramp_worker.plans.classifier import ClassifierPlans
from offramp_worker.plans.fixed import take_fixed_plan
from offramp_worker.plans.memory import PlanMemory
from offramp_worker.plans.poll import PlanFile
from offramp_worker.settings import Settings
from offramp_worker.tracing import Tracing

Phase = Literal["loading", "serving", "broken", "draining"]


class ExecutorLostError(OfframpError):
    """Every run failed for too long. The device may be gone for this process; another one begins with a new context."""


def most_rows(settings: Settings, bundle: Bundle) -> int:
    """Rows that may wait. A small file becomes a large row: where clients send such, rows that wait have the memory of
    all bodies."""
    if bundle.encoded is None:
        return settings.max_queue_rows
    return max(1, min(settings.max_queue_rows, settings.max_bodies_bytes // row_bytes(bundle.manifest.inputs[0])))


class InferenceWorker:
    """What a process has and does. A worker whose bundle is broken stays up, unready, and says why."""

    def __init__(
        self,
        settings: Settings,
        *,
        deliver: Callable[[list[Ticket]], None],
        on_lost: Callable[[], None] = lambda: None,
        turn: SharedTurn | None = None,
        again: bool = False,
    ) -> None:
        """``on_lost`` is called, from another thread, when only a new process may help; ``lost`` then says why.
        ``turn`` is the worker's where it shares an executor with others; ``again`` if this process had another worker
        with the same state folder."""
        self.settings, self._deliver, self._on_lost, self._turn = settings, deliver, on_lost, turn
        self.boot_id = uuid.uuid4().hex
        self.metrics = Metrics()
        self.marker = CrashMarker(settings.state_dir, again=again)
        self.memory = PlanMemory(settings.state_dir)
        self.phase: Phase = "loading"
        self._reason = "the bundle is being loaded"
        self._missing_device = ""
        self.lost = ""
        self.fetching: FetchProgress | None = None  # of a process that fetches the bundle and never serves
        self.engine: Engine | None = None
        self._loaded: Engine | None = None  # one that waits for its fixed plan
        self._link: Link | None = None
        self.plans: PlanDesk | None = None
        self.tracing: Tracing | None = None
        self._plan_file: PlanFile | None = None
        self._pulled: tuple[ArmCounts, ...] = ()
        self.metrics.ready.set_function(lambda: float(self.ready))

    def load(self) -> None:
        """Load and verify the bundle, build sessions, take the plan file's document, warm up; then be ready. Blocks for
        seconds.

        Raises
        ------
        InvalidBundleError
            The worker is left in phase ``broken``, and may be asked again.
        """
        engine = self._loaded = self._loaded or self._load_engine()
        self._take_plans(engine)
        engine.start(measure_seconds=self.settings.measure_seconds)
        self.engine, self._loaded = engine, None
        if self.phase in ("loading", "broken"):
            self.phase, self._reason = "serving", ""
            log_event(
                "serving",
                model=engine.bundle.manifest.name,
                bundle=str(self.settings.bundle),
                batching=self.settings.batching,
                batch_rows=engine.batch_rows,
                threads=self.settings.threads,
            )

    def _load_engine(self) -> Engine:
        settings = self.settings
        try:
            bundle = load_bundle(settings.bundle, expected_digest=settings.model_digest)
            if settings.model_name:
                bundle = replace(bundle, manifest=replace(bundle.manifest, name=settings.model_name))
            sessions = Sessions(bundle, threads=settings.threads)
        except InvalidBundleError as error:
            self._refuse(error)
            raise
        return_memory()
        edge = self._edge(bundle)
        if self.marker.crashed_epoch is not None:
            log_event("earlier-process-crashed", level="warning", epoch=self.marker.crashed_epoch)
        engine = Engine(
            bundle,
            sessions,
            self._options(bundle),
            marker=self.marker,
            metrics=self.metrics,
            deliver=self._deliver,
            captures=self._captures(bundle),
            lost=self._give_up,
            turn=self._turn,
            edge=edge,
        )
        if edge is not None:
            edge.link.watch(engine.wake)
        return engine

    def _edge(self, bundle: Bundle) -> Edge | None:
        """The core of an edge, met if it is there."""
        given = self.settings.edge
        if given is None:
            return None
        self._link = Link(given, bundle, metrics=self.metrics)
        try:
            self._link.open()
        except InvalidBundleError as error:
            self._link.close()
            self._refuse(error)
            raise
        return Edge(self._link, given.residue, given.offline)

    def _take_plans(self, engine: Engine) -> None:
        """Open the desk where plans arrive, and take the file's."""
        settings = self.settings
        if settings.public_key is not None:
            self.plans = PlanDesk(
                ClassifierPlans(engine),
                public_key=settings.public_key,
                service_uid=settings.service_uid,
                memory=self.memory,
            )
            if settings.plan_file is not None:
                self._plan_file = PlanFile(settings.plan_file, self.plans, poll_seconds=settings.poll_seconds)
                self._plan_file.poll()
                self._plan_file.start()
        elif settings.fixed_plan is not None:
            try:
                take_fixed_plan(settings.fixed_plan, ClassifierPlans(engine), self.memory)
            except InvalidBundleError as error:
                self._refuse(error)
                raise

    def _refuse(self, error: InvalidBundleError) -> None:
        self.phase, self._reason = "broken", f"{error}; {error.remedy}"
        self._missing_device = error.device
        log_event("bundle-refused", level="error", reason=str(error))

    def _options(self, bundle: Bundle) -> EngineOptions:
        settings = self.settings
        return EngineOptions(
            uid=settings.uid,
            boot_id=self.boot_id,
            latency_seconds=settings.latency_seconds,
            max_queue_rows=most_rows(settings, bundle),
            batching=settings.batching,
            cache_bytes=settings.cache_bytes,
            always_in_time=settings.always_in_time,
            ramp_set_store=settings.ramp_set_store,
            traced=self.tracing is not None,
        )

    def _give_up(self, reason: str) -> None:
        """The executor failed for too long; called from a thread of the engine's."""
        self.lost = reason
        log_event("executor-lost", level="error", reason=reason)
        self._on_lost()

    def _captures(self, bundle: Bundle) -> Captures | None:
        """Where inputs may be kept for training, if this worker was given a folder; none are kept before a document
        asks for it."""
        if self.settings.capture_dir is None:
            return None
        folder = self.settings.capture_dir / self.settings.uid
        return Captures(folder, bundle.manifest.inputs[0], max_bytes=self.settings.capture_bytes)

    @property
    def ready(self) -> bool:
        return self.phase == "serving" and self.engine is not None and self.engine.alive and not self.failing

    @property
    def failing(self) -> str:
        """Why a worker that has served takes no requests for now: every run of its executor fails. Empty for any
        other."""
        return self.engine.vitals.trouble if self.phase == "serving" and self.engine is not None else ""

    @property
    def reason(self) -> str:
        """Why it is not ready, for people."""
        return self.failing or self._reason

    @property
    def alive(self) -> bool:
        """Whether the process is of use; False asks for a restart. A broken bundle does not: a restart would not mend
        it."""
        return self.engine is None or self.phase == "draining" or self.engine.alive

    def renew_lease(self) -> None:
        """The control plane is alive and can act: it delivered a document, or pulled and confirmed it."""
        if self.engine is not None:
            self.engine.renew_lease()

    def rest(self, reason: str) -> None:
        """Before :meth:`load`: nobody loads the bundle for now, for this reason."""
        self._reason = reason

    def drain(self) -> None:
        """Stop being ready; requests that still arrive are answered until the listener closes."""
        self.phase, self._reason = "draining", "the worker is shutting down"

    def finish(self, *, seconds: float) -> None:
        """After the last request: finish drawn audits for up to ``seconds``, then stop. Blocks."""
        if self._plan_file is not None:
            self._plan_file.stop()
        if self.engine is not None:
            self.engine.close()
            if not self.engine.join(seconds):
                log_event("audits-abandoned", level="warning")
            if self.engine.captures is not None:
                self.engine.captures.close()
        if self._link is not None:
            self._link.close()
        self.marker.close()
        self.memory.close()

    @property
    def owes_audits(self) -> bool:
        """Whether the control plane heard of draws that were open then and are compared by now: it would take them
        for lost."""
        return self.engine is not None and owes_audits(self._pulled, self.engine.counters.snapshot())

    def state(self) -> WorkerState:
        """For ``GET /v1/state``. ``message`` of an unready worker is the reason of a broken bundle and nothing else."""
        if self.engine is None:
            return WorkerState(
                uid=self.settings.uid,
                boot_id=self.boot_id,
                service_uid=self.settings.service_uid,
                model="",
                ready=False,
                backbone_digest="",
                ramp_set_digest="",
                ramps=(),
                costs={},
                crashed_epoch=self.marker.crashed_epoch,
                message=self._reason if self.phase == "broken" else "",
                missing_device=self._missing_device if self.phase == "broken" else "",
                fetching=self.fetching,
            )
        engine, captures = self.engine, self.engine.captures
        manifest, active = engine.bundle.manifest, engine.active
        costs: dict[str, list[Any]] = {name: a.tolist() for name, a in profile_arrays(engine.bundle.profile).items()}
        return WorkerState(
            uid=self.settings.uid,
            boot_id=self.boot_id,
            service_uid=self.settings.service_uid,
            model=manifest.name,
            ready=self.ready,
            backbone_digest=manifest.backbone_digest,
            ramp_set_digest=manifest.ramp_set_digest,
            ramps=engine.bundle.columns,
            costs=costs,
            epoch=active.epoch,
            output=engine.task.spec.output,
            stable_hash=active.stable.plan.content_hash if active.stable else "",
            canary_hash=active.canary.plan.content_hash if active.canary and not engine.arms.canary_lease_ended else "",
            refused=self.plans.refused if self.plans else None,
            breaker_open=engine.arms.breaker_open,
            stopped_tiers=engine.arms.stopped_tiers,
            crashed_epoch=self.marker.crashed_epoch,
            message=engine.arms.describe() if self.ready else "",
            suspicion=engine.arms.suspicion,
            failing=self.failing,
            ramp_sets=engine.sets.digests,
            captures=captures.count if captures else 0,
            capture_since=captures.since if captures else None,
            newest_epoch=self.plans.newest_epoch if self.plans else 0,
            pace=engine.pace,
            overload_seconds=engine.overload_seconds(),
        )

    def observations(self, *, after: int, now: float, also: Mapping[str, int] | None = None) -> Observations:
        """For ``GET /v1/observations``: all counters, and records from sequence number ``after`` on.

        ``also`` has the numbers to go on from in the rings of other ramp sets, by digest.
        """
        if self.engine is None:
            return Observations(self.settings.uid, self.boot_id, now, (), RecordBlock(0, 0, ""))
        engine = self.engine
        own = engine.sets.own_digest
        others, records = [], RecordBlock(after, after, own)
        for held in engine.sets.held:
            if held.digest == own:
                records = held.ring.read(after)
            else:
                others.append(held.ring.read((also or {}).get(held.digest, 0)))
        self._pulled = engine.counters.snapshot()
        return Observations(
            self.settings.uid,
            self.boot_id,
            now,
            self._pulled,
            records,
            held_back=engine.counters.held_back(),
            plans=engine.counters.plans(),
            refused=engine.counters.refused,
            more_records=tuple(others),
        )


def owes_audits(pulled: Sequence[ArmCounts], now: Sequence[ArmCounts]) -> bool:
    """Whether draws that were open when the control plane ``pulled`` counts last have been compared by ``now``."""
    audited = {(c.epoch, c.arm): c.audited for c in now}
    return any(c.audited < c.drawn and c.audited < audited.get((c.epoch, c.arm), 0) for c in pulled)
