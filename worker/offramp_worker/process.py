"""One worker process, whatever it serves: loading, serving, broken or draining, and where its plans arrive."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, Protocol

from offramp_core.errors import InvalidBundleError
from offramp_core.protocol import ArmCounts
from offramp_worker.engine.arms.marker import CrashMarker
from offramp_worker.engine.vitals import Vitals
from offramp_worker.logs import log_event
from offramp_worker.metrics import WorkerSeries
from offramp_worker.plans.apply import PlanDesk
from offramp_worker.plans.memory import PlanMemory
from offramp_worker.plans.poll import PlanFile
from offramp_worker.plans.preparation import PlanTarget
from offramp_worker.reporting import Resting
from offramp_worker.settings import Settings

Phase = Literal["loading", "serving", "broken", "draining"]


class Serving(Protocol):
    """What answers requests once the bundle is loaded."""

    vitals: Vitals

    @property
    def alive(self) -> bool: ...


class ServingProcess(ABC):
    """What a process has and does. A worker whose bundle is broken stays up, unready, and says why."""

    def __init__(
        self, settings: Settings, series: WorkerSeries, *, on_lost: Callable[[], None], again: bool = False
    ) -> None:
        """``on_lost`` is called, from another thread, when only a new process may help; ``lost`` then says why.
        ``again`` if this process had another worker with the same state folder."""
        self.settings, self._on_lost = settings, on_lost
        self.boot_id = uuid.uuid4().hex
        self.marker = CrashMarker(settings.state_dir, again=again)
        self.memory = PlanMemory(settings.state_dir)
        self.phase: Phase = "loading"
        self._reason = "the bundle is being loaded"
        self.lost = ""
        self.plans: PlanDesk | None = None
        self._plan_file: PlanFile | None = None
        self._pulled: tuple[ArmCounts, ...] = ()
        series.ready.set_function(lambda: float(self.ready))

    @property
    @abstractmethod
    def serving(self) -> Serving | None:
        """None before the bundle is loaded."""

    @abstractmethod
    def _end(self, seconds: float) -> None:
        """Finish drawn audits for up to ``seconds``, then stop what serves."""

    @property
    def ready(self) -> bool:
        return self.phase == "serving" and self.serving is not None and self.serving.alive and not self.failing

    @property
    def failing(self) -> str:
        """Why a worker that has served takes no requests for now: every run of its executor fails. Empty for any
        other."""
        return self.serving.vitals.refuses if self.phase == "serving" and self.serving is not None else ""

    @property
    def reason(self) -> str:
        """Why it is not ready, for people."""
        return self.failing or self._reason

    @property
    def alive(self) -> bool:
        """Whether the process is of use; False asks for a restart. A broken bundle does not: a restart would not mend
        it."""
        return self.serving is None or self.phase == "draining" or self.serving.alive

    def drain(self) -> None:
        """Stop being ready; requests that still arrive are answered until the listener closes."""
        self.phase, self._reason = "draining", "the worker is shutting down"

    def finish(self, *, seconds: float) -> None:
        """After the last request: finish drawn audits for up to ``seconds``, then stop. Blocks."""
        if self._plan_file is not None:
            self._plan_file.stop()
        self._end(seconds)
        self.marker.close()
        self.memory.close()

    def _refuse(self, error: InvalidBundleError) -> None:
        self.phase, self._reason = "broken", f"{error}; {error.remedy}"
        log_event("bundle-refused", level="error", reason=str(error))

    def _began(self, model: str, **facts: Any) -> None:
        """The bundle is loaded: requests are taken, unless the process ends meanwhile."""
        if self.phase in ("loading", "broken"):
            self.phase, self._reason = "serving", ""
            settings = self.settings
            log_event("serving", model=model, bundle=str(settings.bundle), threads=settings.threads, **facts)

    def _open_desk(self, key: bytes, target: PlanTarget | Resting) -> None:
        """Open the door for signed plans, and take the last one of the file where there is one."""
        settings = self.settings
        desk = PlanDesk(target, public_key=key, service_uid=settings.service_uid, memory=self.memory)
        if settings.plan_file is not None:
            self._plan_file = PlanFile(settings.plan_file, desk, poll_seconds=settings.poll_seconds)
            self._plan_file.poll()
            self._plan_file.start()
        self.plans = desk

    def _give_up(self, reason: str) -> None:
        """The executor failed for too long; called from a thread of its own."""
        self.lost = reason
        log_event("executor-lost", level="error", reason=reason)
        self._on_lost()
