"""A worker that classifies, as both ports see it: its bundle loaded, at rest or gone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from offramp_core.errors import InvalidBundleError, OfframpError
from offramp_core.protocol import FetchProgress, Observations, RecordBlock, WorkerState
from offramp_worker.bundle.load import Bundle, load_bundle, row_bytes
from offramp_worker.edge.forwarding import Edge
from offramp_worker.edge.link import Link
from offramp_worker.engine.accounts.captures import Captures
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.execution.turns import SharedTurn
from offramp_worker.engine.options import EngineOptions
from offramp_worker.engine.queue.tickets import Ticket
from offramp_worker.engine.remains import Remains
from offramp_worker.logs import log_event
from offramp_worker.memory import return_memory
from offramp_worker.metrics import Metrics
from offramp_worker.plans.classifier import ClassifierPlans
from offramp_worker.plans.fixed import take_fixed_plan
from offramp_worker.process import ServingProcess
from offramp_worker.reporting import Resting, blank_state, observed, owes_audits, resting_of, state_of
from offramp_worker.settings import Settings
from offramp_worker.tracing import Tracing


class ExecutorLostError(OfframpError):
    """Every run failed for too long. The device may be gone for this process; another one begins with a new context."""


def most_rows(settings: Settings, bundle: Bundle) -> int:
    """Rows that may wait. A small file becomes a large row: where clients send such, rows that wait have the memory of
    all bodies."""
    if bundle.encoded is None:
        return settings.max_queue_rows
    return max(1, min(settings.max_queue_rows, settings.max_bodies_bytes // row_bytes(bundle.manifest.inputs[0])))


def _named_bundle(settings: Settings) -> Bundle:
    bundle = load_bundle(settings.bundle, expected_digest=settings.model_digest)
    if settings.model_name:
        bundle = replace(bundle, manifest=replace(bundle.manifest, name=settings.model_name))
    return bundle


def _end(engine: Engine, seconds: float) -> None:
    engine.close()
    if not engine.join(seconds):
        log_event("audits-abandoned", level="warning")
    if engine.captures is not None:
        engine.captures.close()


def _let_go(engine: Engine) -> None:
    """Of an engine that has not begun."""
    engine.close()
    if engine.captures is not None:
        engine.captures.close()


class InferenceWorker(ServingProcess):
    """A worker that classifies."""

    def __init__(
        self,
        settings: Settings,
        *,
        deliver: Callable[[list[Ticket]], None],
        on_lost: Callable[[], None] = lambda: None,
        turn: SharedTurn | None = None,
        again: bool = False,
    ) -> None:
        """``turn`` is the worker's where it shares an executor with others."""
        self.metrics = Metrics()
        super().__init__(settings, self.metrics, on_lost=on_lost, again=again)
        self._deliver, self._turn = deliver, turn
        self._missing_device = ""
        self.fetching: FetchProgress | None = None  # of a process that fetches the bundle and never serves
        self.engine: Engine | None = None
        self._loaded: Engine | None = None  # one that waits for its fixed plan
        self.edge: Edge | None = None  # of an edge, once its bundle is loaded: the core that it has
        self.tracing: Tracing | None = None
        self._resting: Resting | None = None
        self._until_asked = False

    @property
    def serving(self) -> Engine | None:
        return self.engine

    def load(self) -> None:
        """Load and verify the bundle, build sessions, take the plan file's document, warm up; then be ready. Blocks for
        seconds.

        Raises
        ------
        InvalidBundleError
            The worker is left in phase ``broken``, and may be asked again.
        """
        engine = self._loaded = self._loaded or self._load_engine()
        try:
            self._take_plans(engine)
            engine.start(measure_seconds=self.settings.measure_seconds)
        except Exception:
            if self._resting is not None:  # it goes on to rest, with what comes meanwhile
                self._loaded = None
                _let_go(engine)
                self._rest(engine)
            raise
        self.engine, self._loaded, self._resting, self.lost = engine, None, None, ""
        self._began(engine.bundle.manifest.name, batching=self.settings.batching, batch_rows=engine.batch_rows)

    def _load_engine(self) -> Engine:
        try:
            bundle = _named_bundle(self.settings)
            sessions = Sessions(bundle, threads=self.settings.threads)
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
            replace(self._options(bundle), before=self._before(bundle)),
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

    def _before(self, bundle: Bundle) -> Remains | None:
        """What goes on from before the bundle was unloaded. Another bundle in its place begins as another process."""
        remains = None if self._resting is None else self._resting.remains
        own = bundle.manifest.backbone_digest, bundle.manifest.ramp_set_digest
        if remains is None or (remains.backbone_digest, remains.ramp_set_digest) == own:
            return remains
        self.boot_id, self._pulled, self._resting = uuid.uuid4().hex, (), None
        return None

    def _edge(self, bundle: Bundle) -> Edge | None:
        """The core of an edge, met if it is there."""
        given = self.settings.edge
        if given is None:
            return None
        link = Link(given, bundle, metrics=self.metrics)
        self.edge = Edge(link, given.residue, given.offline)
        try:
            link.open()
        except InvalidBundleError as error:
            link.close()
            self._refuse(error)
            raise
        return self.edge

    def _take_plans(self, engine: Engine) -> None:
        """Open the desk where plans arrive, and take the file's."""
        settings = self.settings
        if self.plans is not None:
            self.plans.wake(ClassifierPlans(engine))
            if self._resting is not None and engine.active.document is not None:
                engine.arms.go_on(self._resting.leases)
        elif settings.public_key is not None:
            self._open_desk(settings.public_key, ClassifierPlans(engine))
        elif settings.fixed_plan is not None:
            try:
                take_fixed_plan(settings.fixed_plan, ClassifierPlans(engine), self.memory)
            except InvalidBundleError as error:
                self._refuse(error)
                raise

    def _refuse(self, error: InvalidBundleError) -> None:
        self._missing_device = error.device  # before the state says why: another thread may read it in between
        super()._refuse(error)

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

    def _captures(self, bundle: Bundle) -> Captures | None:
        """Where inputs may be kept for training, if this worker was given a folder; none are kept before a document
        asks for it."""
        if self.settings.capture_dir is None:
            return None
        folder = self.settings.capture_dir / self.settings.uid
        return Captures(folder, bundle.manifest.inputs[0], max_bytes=self.settings.capture_bytes)

    def renew_lease(self) -> None:
        """The control plane is alive and can act: it delivered a document, or pulled and confirmed it."""
        if (engine := self.engine) is not None:
            engine.renew_lease()
        elif (resting := self._resting) is not None:
            resting.renew()

    def rest(self, reason: str, *, until_asked: bool = False) -> None:
        """Nobody loads the bundle for now, for this reason. ``until_asked``: a request has it loaded."""
        self._reason, self._until_asked = reason, until_asked

    def await_first_request(self) -> None:
        """Instead of :meth:`load`: the bundle is verified and let go until a request has it loaded. Blocks, and raises
        as that does."""
        try:
            self._resting = resting_of(self, _named_bundle(self.settings))
        except InvalidBundleError as error:
            self._refuse(error)
            raise
        self.phase = "loading"
        if self.settings.public_key is not None and self.plans is None:
            self._open_desk(self.settings.public_key, self._resting)

    @property
    def may_rest(self) -> bool:
        """Whether it is loaded, and neither an audit is open nor a canary under way."""
        engine = self.engine
        return engine is not None and engine.active.canary is None and not engine.desk.open

    def unload(self, *, seconds: float) -> None:
        """Finish drawn audits for up to ``seconds``, then let the bundle go until the next :meth:`load`. What was
        counted, recorded and seen of its plans stays, and goes on then. Blocks."""
        engine, self.phase = self.engine, "loading"
        if engine is None:
            return
        try:
            _end(engine, seconds)
        except Exception as error:  # it leaves all the same
            log_event("finish-failed", level="error", error=repr(error))

        self._rest(engine)
        self.engine = None

    def _rest(self, engine: Engine) -> None:
        """The engine has ended, or never began: what it knew stays."""
        resting = partial(resting_of, self, engine.bundle, engine)
        self._resting = resting() if self.plans is None else self.plans.rest(resting)

    def _end(self, seconds: float) -> None:
        if self.engine is not None:
            _end(self.engine, seconds)
        if self.edge is not None:
            self.edge.link.close()

    @property
    def owes_audits(self) -> bool:
        """Whether the control plane heard of draws that were open then and are compared by now: it would take them
        for lost."""
        engine, resting = self.engine, self._resting
        kept = engine if engine is not None else None if resting is None else resting.remains
        return kept is not None and owes_audits(self._pulled, kept.counters.snapshot())

    def state(self) -> WorkerState:
        """For ``GET /v1/state``. ``message`` of an unready worker is the reason of a broken bundle and nothing else. Of
        one at rest it is as if the bundle were there."""
        engine, resting = self.engine, self._resting
        if engine is not None:
            return state_of(self, engine)
        broken = self.phase == "broken"
        if resting is None:
            state = replace(blank_state(self), fetching=self.fetching)
        else:
            refused = None if self.plans is None else self.plans.refused
            state = replace(resting.report(ready=self._until_asked and not broken), refused=refused)
        if not broken:
            return state
        return replace(state, message=self._reason, missing_device=self._missing_device)

    def observations(self, *, after: int, now: float, also: Mapping[str, int] | None = None) -> Observations:
        """For ``GET /v1/observations``: all counters, and records from sequence number ``after`` on.

        ``also`` has the numbers to go on from in the rings of other ramp sets, by digest.
        """
        engine, resting = self.engine, self._resting
        remains = None if resting is None else resting.remains
        report = Observations(self.settings.uid, self.boot_id, now, (), RecordBlock(0, 0, ""))
        if engine is not None:
            rings, own = {held.digest: held.ring for held in engine.sets.held}, engine.sets.own_digest
            report = observed(report, engine.counters, rings, own=own, after=after, also=also or {})
        elif remains is not None:
            own = remains.ramp_set_digest
            report = observed(report, remains.counters, remains.rings, own=own, after=after, also=also or {})
        self._pulled = report.counts
        return report
