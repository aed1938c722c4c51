"""A worker that generates, as both ports see it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_core.generation.admission import AdmissionLimits
from offramp_core.generation.columns import variant_columns, variant_costs
from offramp_core.generation.drafts import Drafts
from offramp_core.generation.losses import AnswerLosses, answer_pattern
from offramp_core.protocol import Observations, RampInfo, RecordBlock, WorkerState
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.generate.accounts import Accounts
from offramp_worker.generate.desk import DeskOptions, GenerationDesk
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.plan_target import GenerationPlans, judged_as, off_runtime, variant_seconds
from offramp_worker.generate.routes import Dispatch, draft_ratios, draft_settings, own_active, parse_route
from offramp_worker.generate.seam import REFERENCE, DecodingRoute, GenerationBundle, Loaded, Loader, Tokenizer
from offramp_worker.generate.settings import GenerationSettings
from offramp_worker.generate.tickets import Deliver
from offramp_worker.logs import log_event
from offramp_worker.process import ServingProcess
from offramp_worker.reporting import blank_state, in_force, owes_audits
from offramp_worker.settings import Settings


class GenerationWorker(ServingProcess):
    """A worker that generates."""

    def __init__(
        self,
        settings: Settings,
        generation: GenerationSettings,
        *,
        load: Loader,
        deliver: Deliver,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.metrics = GenerationMetrics()
        super().__init__(settings, self.metrics, on_lost=on_lost)
        self.generation, self._load, self._deliver = generation, load, deliver
        self.accounts = Accounts(self.metrics)
        self.desk: GenerationDesk | None = None
        self.arms: Arms | None = None
        self._loaded: Loaded | None = None
        self._columns: tuple[RampInfo, ...] = ()
        self._seconds: dict[str, float] = {}
        self._digest = ""
        self._dispatch: Dispatch | None = None
        self.longest_token = 1
        self._show_state()

    @property
    def serving(self) -> GenerationDesk | None:
        return self.desk

    @property
    def bundle(self) -> GenerationBundle | None:
        return self._loaded.bundle if self._loaded is not None else None

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._loaded is not None
        return self._loaded.tokenizer

    def load(self) -> None:
        """Load and verify the bundle, take the plan file's document, and begin to serve. Blocks for seconds.

        Raises
        ------
        InvalidBundleError, InvalidArgumentError
            The worker is left in phase ``broken``, and may be asked again.
        """
        settings = self.settings
        try:
            loaded = self._load(settings.bundle, threads=settings.threads, cache_bytes=self.generation.cache_bytes)
            if settings.model_digest is not None and loaded.bundle.digest != settings.model_digest:
                loaded.engine.close()
                raise InvalidBundleError.foreign(
                    f"manifest.json: the bundle is {loaded.bundle.digest}; this worker must serve "
                    f"{settings.model_digest}"
                )
        except InvalidBundleError as error:
            self._refuse(error)
            raise
        tokens = range(loaded.bundle.vocabulary)
        self.longest_token = max(1, *(len(loaded.tokenizer.token_bytes(token)) for token in tokens))
        desk = self._open(loaded)
        if self.marker.crashed_epoch is not None:
            log_event("earlier-process-crashed", level="warning", epoch=self.marker.crashed_epoch)
        desk.start()
        self._loaded, self.desk = loaded, desk
        self._began(loaded.bundle.name, task="generate")

    def _open(self, loaded: Loaded) -> GenerationDesk:
        """Everything between the bundle and its requests: accounts, arms, the desk, and where plans arrive."""
        settings, own, bundle = self.settings, self.generation, loaded.bundle
        seconds, digest = variant_seconds(bundle), judged_as(bundle, own.output, own.answer_pattern)
        columns = variant_columns(seconds)
        self.accounts = Accounts(
            self.metrics, output=own.output, columns=columns, digest=digest, token_seconds=seconds[REFERENCE]
        )
        counters = self.accounts.counters
        arms = Arms(
            off_runtime(bundle, counters, digest=digest, audit_rate=own.audit_rate),
            uid=settings.uid,
            boot_id=self.boot_id,
            clock=time.monotonic,
            crashed_epoch=self.marker.crashed_epoch,
        )
        route = parse_route(own.route, bundle) if own.route else DecodingRoute()
        if route.variant != REFERENCE and settings.has_control_plane:
            raise InvalidArgumentError(
                f"OFFRAMP_ROUTE is {own.route!r}; with a control plane its plans choose the variant, so begin it with "
                "fp32"
            )
        arms.active = own_active(arms.active, route)
        dispatch = Dispatch(
            arms,
            columns,
            reference=route if own.route else None,
            drafts=Drafts(draft_settings(bundle), draft_ratios(bundle)),
            lossy_sampling=own.lossy_sampling,
            available=loaded.engine.available,
        )
        self.accounts.distrust = dispatch.distrust
        pattern = answer_pattern(own.answer_pattern) if own.answer_pattern else None
        desk = GenerationDesk(
            loaded,
            accounts=self.accounts,
            deliver=self._deliver,
            lost=self._give_up,
            dispatch=dispatch,
            options=DeskOptions(
                AdmissionLimits(
                    own.waiting,
                    own.running,
                    own.reply_bytes,
                    own.patience_seconds,
                    own.first_token_seconds,
                    own.token_seconds,
                ),
                own.audit_share,
                AnswerLosses(pattern),
                self.marker,
            ),
        )
        self.arms, self._columns, self._seconds, self._digest, self._dispatch = arms, columns, seconds, digest, dispatch
        if settings.public_key is not None:
            self._open_desk(settings.public_key, self._target(desk, arms))
        return desk

    def _target(self, desk: GenerationDesk, arms: Arms) -> GenerationPlans:
        return GenerationPlans(
            desk.bundle,
            arms=arms,
            counters=self.accounts.counters,
            vitals=desk.vitals,
            columns=self._columns,
            digest=self._digest,
            metrics=self.metrics,
        )

    def end_answers(self) -> None:
        """What is still written ends with an error."""
        if self.desk is not None:
            self.desk.end_answers()

    def _end(self, seconds: float) -> None:
        if self.desk is not None:
            self.desk.close()
            if not self.desk.join(seconds):
                log_event("audits-abandoned", level="warning")

    def renew_lease(self) -> None:
        """The control plane is alive and can act."""
        if self.arms is not None:
            self.arms.meet()

    @property
    def owes_audits(self) -> bool:
        """Whether the control plane heard of draws that were open then and are compared by now: it would take them
        for lost."""
        return owes_audits(self._pulled, self.accounts.counters.snapshot())

    def state(self) -> WorkerState:
        """For ``GET /v1/state``; see :class:`offramp_core.protocol.WorkerState`."""
        bundle, arms = self.bundle, self.arms
        if bundle is None or arms is None:
            return replace(blank_state(self), message=self._reason if self.phase == "broken" else "")
        state = replace(
            blank_state(self),
            model=bundle.name,
            backbone_digest=bundle.digest,
            ramp_set_digest=self._digest,
            ramps=self._columns,
            costs=variant_costs(self._seconds),
            output=self.generation.output,
            message=self._describe(arms) if self.ready else "",
            ramp_sets=(self._digest,),
        )
        return in_force(state, self, arms)

    def _describe(self, arms: Arms) -> str:
        notes = (arms.describe(_asked), self._dispatch.describe() if self._dispatch else "")
        return "; ".join(note for note in notes if note)

    def observations(self, *, after: int, now: float, also: Mapping[str, int] | None = None) -> Observations:  # noqa: ARG002
        """For ``GET /v1/observations``: all counters, and records from sequence number ``after`` on. There are no other
        ramp sets for ``also``."""
        counters = self.accounts.counters
        if self.bundle is None:
            return Observations(self.settings.uid, self.boot_id, now, (), RecordBlock(0, 0, ""))
        self._pulled = counters.snapshot()
        return Observations(
            self.settings.uid,
            self.boot_id,
            now,
            self._pulled,
            self.accounts.ring.read(after),
            held_back=counters.held_back(),
            plans=counters.plans(),
            refused=counters.refused,
            routes=self.accounts.routes(),
        )

    def _show_state(self) -> None:
        """Gauges ask when somebody scrapes."""

        def of_desk(value: Callable[[GenerationDesk], float]) -> Callable[[], float]:
            return lambda: value(self.desk) if self.desk is not None else 0.0

        metrics = self.metrics
        metrics.waiting.set_function(of_desk(lambda d: float(d.load.waiting)))
        metrics.running.set_function(of_desk(lambda d: float(d.load.running)))
        metrics.audit_backlog.set_function(of_desk(lambda d: float(d.audits_owed)))
        metrics.cache_bytes.set_function(of_desk(lambda d: float(d.memory.used_bytes)))
        metrics.cache_limit.set_function(of_desk(lambda d: float(d.memory.limit_bytes)))


def _asked(runtime: Runtime) -> str:
    """How an arm answers."""
    first = [f"{ramp.id} below {ramp.threshold}" for ramp in runtime.plan.ramps if ramp.threshold > 0]
    return f"where not {', '.join(first)}" if first else "whole answers"
