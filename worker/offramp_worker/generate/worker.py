"""One worker process that generates, as both ports see it: loading, serving, broken or draining."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from offramp_core.errors import InvalidArgumentError, InvalidBundleError
from offramp_core.generation.admission import AdmissionLimits
from offramp_core.generation.columns import variant_columns, variant_costs
from offramp_core.generation.drafts import Drafts
from offramp_core.generation.losses import AnswerLosses, answer_pattern
from offramp_core.protocol import ArmCounts, Observations, RampInfo, RecordBlock, WorkerState
from offramp_worker.engine.arms.arms import Runtime
from offramp_worker.engine.arms.leases import Arms
from offramp_worker.engine.arms.marker import CrashMarker
from offramp_worker.generate.accounts import Accounts
from offramp_worker.generate.desk import DeskOptions, GenerationDesk
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.plan_target import GenerationPlans, judged_as, off_runtime, variant_seconds
from offramp_worker.generate.routes import Dispatch, draft_ratios, draft_settings, own_active, parse_route
from offramp_worker.generate.seam import REFERENCE, DecodingRoute, GenerationBundle, Loaded, Loader, Tokenizer
from offramp_worker.generate.settings import GenerationSettings
from offramp_worker.generate.tickets import Deliver
from offramp_worker.logs import log_event
from offramp_worker.plans.apply import PlanDesk
from offramp_worker.plans.memory import PlanMemory
from offramp_worker.plans.poll import PlanFile
from offramp_worker.reporting import blank_state, owes_audits
from offramp_worker.settings import Settings

Phase = Literal["loading", "serving", "broken", "draining"]


class GenerationWorker:
    """What a process has and does. A worker whose bundle is broken stays up, unready, and says why."""

    def __init__(
        self,
        settings: Settings,
        generation: GenerationSettings,
        *,
        load: Loader,
        deliver: Deliver,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self.settings, self.generation = settings, generation
        self._load, self._deliver, self._on_lost = load, deliver, on_lost
        self.boot_id = uuid.uuid4().hex
        self.metrics = GenerationMetrics()
        self.accounts = Accounts(self.metrics)
        self.marker = CrashMarker(settings.state_dir)
        self.memory = PlanMemory(settings.state_dir)
        self.phase: Phase = "loading"
        self._reason = "the bundle is being loaded"
        self.lost = ""
        self.desk: GenerationDesk | None = None
        self.plans: PlanDesk | None = None
        self.arms: Arms | None = None
        self._plan_file: PlanFile | None = None
        self._loaded: Loaded | None = None
        self._pulled: tuple[ArmCounts, ...] = ()
        self._columns: tuple[RampInfo, ...] = ()
        self._seconds: dict[str, float] = {}
        self._digest = ""
        self._dispatch: Dispatch | None = None
        self.longest_token = 1
        self._show_state()

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
            self.phase, self._reason = "broken", f"{error}; {error.remedy}"
            log_event("bundle-refused", level="error", reason=str(error))
            raise
        tokens = range(loaded.bundle.vocabulary)
        self.longest_token = max(1, *(len(loaded.tokenizer.token_bytes(token)) for token in tokens))
        desk = self._open(loaded)
        if self.marker.crashed_epoch is not None:
            log_event("earlier-process-crashed", level="warning", epoch=self.marker.crashed_epoch)
        desk.start()
        self._loaded, self.desk = loaded, desk
        if self.phase in ("loading", "broken"):
            self.phase, self._reason = "serving", ""
            log_event(
                "serving",
                model=loaded.bundle.name,
                bundle=str(settings.bundle),
                threads=settings.threads,
                task="generate",
            )

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
            self._take_plans(desk, arms, settings.public_key)
        return desk

    def _take_plans(self, desk: GenerationDesk, arms: Arms, public_key: bytes) -> None:
        """Open the door for signed plans, and read the file of the last one where there is one."""
        target = GenerationPlans(
            desk.bundle,
            arms=arms,
            counters=self.accounts.counters,
            vitals=desk.vitals,
            columns=self._columns,
            digest=self._digest,
            metrics=self.metrics,
        )
        settings = self.settings
        self.plans = PlanDesk(target, public_key=public_key, service_uid=settings.service_uid, memory=self.memory)
        if settings.plan_file is not None:
            self._plan_file = PlanFile(settings.plan_file, self.plans, poll_seconds=settings.poll_seconds)
            self._plan_file.poll()
            self._plan_file.start()

    @property
    def ready(self) -> bool:
        return self.phase == "serving" and self.desk is not None and self.desk.alive and not self.failing

    @property
    def failing(self) -> str:
        """Why a worker that has served takes no requests for now. Empty for any other."""
        return self.desk.vitals.refuses if self.phase == "serving" and self.desk is not None else ""

    @property
    def reason(self) -> str:
        """Why it is not ready, for people."""
        return self.failing or self._reason

    @property
    def alive(self) -> bool:
        """Whether the process is of use; False asks for a restart."""
        return self.desk is None or self.phase == "draining" or self.desk.alive

    def drain(self) -> None:
        """Stop being ready; requests that still arrive are answered until the listener closes."""
        self.phase, self._reason = "draining", "the worker is shutting down"

    def end_answers(self) -> None:
        """What is still written ends with an error."""
        if self.desk is not None:
            self.desk.end_answers()

    def finish(self, *, seconds: float) -> None:
        """After the last request: finish drawn audits for up to ``seconds``, then stop. Blocks."""
        if self._plan_file is not None:
            self._plan_file.stop()
        if self.desk is not None:
            self.desk.close()
            if not self.desk.join(seconds):
                log_event("audits-abandoned", level="warning")
        self.marker.close()
        self.memory.close()

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
        active = arms.active
        return replace(
            blank_state(self),
            model=bundle.name,
            ready=self.ready,
            backbone_digest=bundle.digest,
            ramp_set_digest=self._digest,
            ramps=self._columns,
            costs=variant_costs(self._seconds),
            epoch=active.epoch,
            output=self.generation.output,
            stable_hash=active.stable.plan.content_hash if active.stable else "",
            canary_hash=active.canary.plan.content_hash if active.canary and not arms.canary_lease_ended else "",
            refused=self.plans.refused if self.plans else None,
            breaker_open=arms.breaker_open,
            message=self._describe(arms) if self.ready else "",
            suspicion=arms.suspicion,
            failing=self.failing,
            ramp_sets=(self._digest,),
            newest_epoch=self.plans.newest_epoch if self.plans else 0,
        )

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

    def _give_up(self, reason: str) -> None:
        """The executor failed for too long; called from a thread of the desk's."""
        self.lost = reason
        log_event("executor-lost", level="error", reason=reason)
        self._on_lost()

    def _show_state(self) -> None:
        """Gauges ask when somebody scrapes."""

        def of_desk(value: Callable[[GenerationDesk], float]) -> Callable[[], float]:
            return lambda: value(self.desk) if self.desk is not None else 0.0

        metrics = self.metrics
        metrics.ready.set_function(lambda: float(self.ready))
        metrics.waiting.set_function(of_desk(lambda d: float(d.load.waiting)))
        metrics.running.set_function(of_desk(lambda d: float(d.load.running)))
        metrics.audit_backlog.set_function(of_desk(lambda d: float(d.audits_owed)))
        metrics.cache_bytes.set_function(of_desk(lambda d: float(d.memory.used_bytes)))
        metrics.cache_limit.set_function(of_desk(lambda d: float(d.memory.limit_bytes)))


def _asked(runtime: Runtime) -> str:
    """How an arm answers."""
    first = [f"{ramp.id} below {ramp.threshold}" for ramp in runtime.plan.ramps if ramp.threshold > 0]
    return f"where not {', '.join(first)}" if first else "whole answers"
