"""Generated answers in words: tokens per second with and without what makes them cheaper, and by which route."""

from __future__ import annotations

from offramp_core.control.objects import RouteUse
from offramp_operator.explain.family import Family


def token_rates(family: Family) -> str:
    """``48 tokens/s, 31 by the model alone``; empty before enough were written."""
    seen = family.service.status.observed
    if not seen.tokens_per_second:
        return ""
    alone = f", {seen.model_tokens_per_second} by the model alone" if seen.model_tokens_per_second else ""
    return f"{seen.tokens_per_second} tokens/s{alone}"


def routes(family: Family) -> list[str]:
    """A sentence for each route that answers took, that with the most tokens first; and one where no draft serves."""
    used = family.service.status.observed.routes
    off = used and not any("+" in use.name for use in used)
    return [*(_route(use) for use in used), *(["drafts off: every token was written without one"] if off else [])]


def _route(use: RouteUse) -> str:
    facts = [
        f"{use.share} of tokens",
        f"{use.tokens_per_second} tokens/s" if use.tokens_per_second else "",
        f"{use.accepted} of the draft's tokens accepted" if use.accepted else "",
    ]
    return f"{use.name}: {', '.join(filter(None, facts))}"
