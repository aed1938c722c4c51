"""How long a request would wait for its model: what Retry-After promises."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from offramp_worker.shared.model import Model
from offramp_worker.shared.room import leaving_seconds

FIRST_LOAD_SECONDS = 2.0  # before any load was measured


def expected_seconds(
    model: Model, line: Sequence[Model], models: Collection[Model], *, bound: int | None, now: float
) -> float:
    """Until ``model`` is loaded, with those that are before it in ``line`` and what must leave for them; of all
    ``models`` some loads are known."""
    known = [other for other in models if other.load_seconds]
    ahead = [*line[: line.index(model)], model] if model in line else [*line, model]
    total = 0.0
    for other in ahead:
        left = _load_seconds(other, known)
        total += max(0.0, left - (now - other.loading_since)) if other.state == "loading" else left
    coming = [other for other in dict.fromkeys(ahead) if other.state in ("out", "leaving")]
    return total + leaving_seconds(coming, models, bound=bound, now=now)


def _load_seconds(model: Model, known: Sequence[Model]) -> float:
    """As the last time; before the first, as other models by their bytes."""
    if model.load_seconds:
        return model.load_seconds
    if not known:
        return FIRST_LOAD_SECONDS
    by_byte = sum(m.load_seconds for m in known) / max(1, sum(m.file_bytes for m in known))
    return by_byte * model.file_bytes
