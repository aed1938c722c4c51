"""Models that nobody asks for leave memory until somebody does."""

from __future__ import annotations

import asyncio
import time

from offramp_worker.logs import log_event
from offramp_worker.shared.repository import Repository

POLL_SECONDS = 0.5  # between two looks for them


async def unload_idle(repository: Repository) -> None:
    """Until the repository closes."""
    while not repository.closing:
        await asyncio.sleep(POLL_SECONDS)
        try:
            if any(model.idle(time.monotonic()) for model in repository.models.values()):
                async with repository.changing:
                    await _unload(repository, time.monotonic())
        except Exception as error:  # the next look may find them well
            log_event("unload-failed", level="error", error=repr(error))


async def _unload(repository: Repository, now: float) -> None:
    leaving = [model for model in repository.models.values() if model.idle(now)]
    for model in leaving:
        unused = round(now - model.used_at, 1)
        log_event("model-unloaded", model=model.name, bytes=model.size_bytes, unused_seconds=unused)
        model.unloads += 1
        model.at_rest = True
    await repository.leave_all(leaving)
