"""An engine for tests: what a test does not name is quiet."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from offramp_worker.bundle.load import Bundle
from offramp_worker.engine.arms.marker import CrashMarker
from offramp_worker.engine.engine import Engine
from offramp_worker.engine.execution.sessions import Sessions
from offramp_worker.engine.options import EngineOptions
from offramp_worker.metrics import Metrics

OPTIONS = frozenset(field.name for field in fields(EngineOptions))


def new_engine(bundle: Bundle, sessions: Sessions, **given: Any) -> Engine:
    """Options and what the engine works with, told apart by their names."""
    options = {"uid": "worker-1", "max_queue_rows": 4096} | {k: v for k, v in given.items() if k in OPTIONS}
    works_with = {"marker": CrashMarker(None)} | {k: v for k, v in given.items() if k not in OPTIONS}
    if "metrics" not in works_with:
        works_with["metrics"] = Metrics()
    return Engine(bundle, sessions, EngineOptions(**options), **works_with)
