"""Room in memory: what models take, which leave for others, and how long that is expected to take."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from offramp_core.sharing import Held, evicted
from offramp_worker.shared.model import Model

LEAVE_SECONDS = 12.0  # for the replies of a model that leaves
AUDIT_SECONDS = 5.0  # then for its audits


def held(models: Collection[Model], *, now: float, pressed: bool = False) -> list[Held]:
    """Models that are in memory and serve. One to which somebody was told to come back stays until they have, unless
    memory is ``pressed``."""
    return [
        Held(
            m.name,
            m.size_bytes,
            m.load_seconds,
            m.popularity.rate(now),
            kept=m.given.keep_loaded or (not pressed and m.owed(now)),
        )
        for m in models
        if m.ready
    ]


def leaving_of(models: Collection[Model], *, needed_bytes: int, now: float) -> tuple[str, ...] | None:
    """The models that leave so that so many bytes become free: promises are broken only where nothing else does."""
    kept = evicted(held(models, now=now), needed_bytes=needed_bytes)
    return kept if kept is not None else evicted(held(models, now=now, pressed=True), needed_bytes=needed_bytes)


def wanted_bytes(model: Model, models: Collection[Model], *, bound: int) -> int:
    """Room for a model. What was never surely measured may take less than is expected: it is tried if its files fit
    beside what is kept."""
    left = bound - kept_bytes(models)
    return model.measured_bytes if model.sure else min(model.size_bytes, max(model.file_bytes, left))


def kept_bytes(models: Collection[Model]) -> int:
    """Of those that are in memory and stay there."""
    return sum(model.size_bytes for model in models if model.ready and model.given.keep_loaded)


def leaving_for(
    coming: Sequence[Model], models: Collection[Model], *, bound: int, now: float
) -> tuple[str, ...] | None:
    """The models that leave so that those that are ``coming`` have room; None where that does not do."""
    used = sum(model.size_bytes for model in models if model.state in ("in", "loading"))
    wanted = sum(wanted_bytes(model, models, bound=bound) for model in coming)
    return leaving_of(models, needed_bytes=used + wanted - bound, now=now)


def leaving_seconds(coming: Sequence[Model], models: Collection[Model], *, bound: int | None, now: float) -> float:
    """Until those have left that leave already, and then those that must, all at once for each that is ``coming``."""
    leaving = max(
        (max(0.0, m.leave_seconds - (now - m.leaving_since)) for m in models if m.state == "leaving"), default=0.0
    )
    if bound is None or not coming:
        return leaving
    names = leaving_for(coming, models, bound=bound, now=now)
    each = [
        m.leave_seconds for m in models if m.ready and not m.given.keep_loaded and (names is None or m.name in names)
    ]
    return leaving + min(sum(each), max(each, default=0.0) * len(coming))
