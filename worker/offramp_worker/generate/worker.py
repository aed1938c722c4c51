"""One worker process that generates, as both ports see it: loading, serving, broken or draining."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from offramp_core.errors import InvalidBundleError
from offramp_core.generation.admission import Limits
from offramp_worker.generate.accounts import Accounts
from offramp_worker.generate.desk import DeskOptions, GenerationDesk
from offramp_worker.generate.metrics import GenerationMetrics
from offramp_worker.generate.records import LossBlock
from offramp_worker.generate.routes import Routes, parse_route
from offramp_worker.generate.seam import GenerationBundle, Loaded, Loader, Tokenizer
from offramp_worker.generate.settings import GenerationSettings
from offramp_worker.generate.tickets import Deliver
from offramp_worker.logs import log_event
from offramp_worker.settings import Settings

Phase = Literal["loading", "serving", "broken", "draining"]


@dataclass(frozen=True, slots=True)
class GenerationState:
    """One worker as it sees itself, for ``GET /v1/state``. ``routes`` are those in force: of every request, and by class."""

    uid: str
    boot_id: str
    service_uid: str
    task: str
    model: str
    digest: str
    ready: bool
    message: str
    variants: tuple[str, ...]
    drafts: tuple[str, ...]
    context_length: int
    epoch: int
    failing: str


@dataclass(frozen=True, slots=True)
class GenerationObservations:
    """One pull, for ``GET /v1/observations``: counts since the process started, and records since ``after``."""

    uid: str
    boot_id: str
    now: float
    counts: tuple[dict[str, Any], ...]
    losses: LossBlock
    refused: int
    audits_owed: int


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
        self.phase: Phase = "loading"
        self._reason = "the bundle is being loaded"
        self.lost = ""
        self.desk: GenerationDesk | None = None
        self._loaded: Loaded | None = None
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
        """Load and verify the bundle and begin to serve. Blocks for seconds.

        Raises
        ------
        InvalidBundleError, InvalidArgumentError
            The worker is left in phase ``broken``, and may be asked again.
        """
        settings, own = self.settings, self.generation
        try:
            loaded = self._load(settings.bundle, threads=settings.threads, cache_bytes=own.cache_bytes)
            if settings.model_digest is not None and loaded.bundle.digest != settings.model_digest:
                loaded.engine.close()
                raise InvalidBundleError.foreign(
                    f"manifest.json: the bundle is {loaded.bundle.digest}; this worker must serve {settings.model_digest}"
                )
        except InvalidBundleError as error:
            self.phase, self._reason = "broken", f"{error}; {error.remedy}"
            log_event("bundle-refused", level="error", reason=str(error))
            raise
        longest = max(
            (len(loaded.tokenizer.token_bytes(token)) for token in range(loaded.bundle.vocabulary)), default=1
        )
        desk = GenerationDesk(
            loaded, accounts=self.accounts, deliver=self._deliver, lost=self._give_up,
            options=DeskOptions(Limits(own.waiting, own.running, own.reply_bytes, own.patience_seconds), own.audit_share),
        )  # fmt: skip
        if own.route:
            desk.use(Routes(parse_route(own.route, loaded.bundle), audit_rate=own.audit_rate, config="settings"))
        desk.start()
        self.longest_token = max(1, longest)
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

    @property
    def ready(self) -> bool:
        return self.phase == "serving" and self.desk is not None and self.desk.alive and not self.failing

    @property
    def failing(self) -> str:
        """Why a worker that has served takes no requests for now. Empty for any other."""
        return self.desk.vitals.trouble if self.phase == "serving" and self.desk is not None else ""

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
        if self.desk is not None:
            self.desk.close()
            if not self.desk.join(seconds):
                log_event("audits-abandoned", level="warning")

    def state(self) -> GenerationState:
        bundle = self.bundle
        return GenerationState(
            uid=self.settings.uid, boot_id=self.boot_id, service_uid=self.settings.service_uid, task="generate",
            model=bundle.name if bundle else "", digest=bundle.digest if bundle else "", ready=self.ready, message=self.reason,
            variants=tuple(v.name for v in bundle.variants) if bundle else (),
            drafts=tuple(d.id for d in bundle.drafts) if bundle else (),
            context_length=bundle.context_length if bundle else 0, epoch=self.desk.routes.epoch if self.desk else 0,
            failing=self.failing,
        )  # fmt: skip

    def observations(self, *, after: int, now: float) -> GenerationObservations:
        counts = tuple(c.to_mapping() for c in self.accounts.counts())
        return GenerationObservations(
            self.settings.uid, self.boot_id, now, counts, self.accounts.ring.read(after), self.accounts.refused,
            self.desk.audits_owed if self.desk else 0,
        )  # fmt: skip

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
