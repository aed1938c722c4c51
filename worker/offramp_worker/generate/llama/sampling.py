"""From logits to the next token: greedy, by draw, and by draw behind a draft without changing the distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from offramp_core.errors import OfframpError
from offramp_worker.generate.seam import Sampling, Token

FloatArray = npt.NDArray[np.float32]
Chances = npt.NDArray[np.float64]
NUCLEUS_FIRST = 256  # tokens that are looked at first for a nucleus; nearly always enough


class BrokenLogitsError(OfframpError, ArithmeticError):
    """The model answered with what is no number."""


def greedy(row: FloatArray) -> tuple[int, float]:
    """The highest logit, of equal ones the lowest id; and how far it is above the second one. ``row`` (vocabulary,) is
    left as it was."""
    best = int(row.argmax())
    value = row[best]
    if not np.isfinite(value):
        raise BrokenLogitsError("a logit is no finite number")
    row[best] = -np.inf
    second = row.max() if len(row) > 1 else value
    row[best] = value
    return best, float(value - second)


def chances(row: FloatArray, sampling: Sampling) -> Chances:
    """Probability (vocabulary,) of each token at a temperature, within the smallest set of likeliest ones that reaches
    ``top_p``.

    Of equally likely tokens at its border those of lower ids belong to it.
    """
    top = row.max()
    if not np.isfinite(top):
        raise BrokenLogitsError("a logit is no finite number")
    p: Chances = np.exp((row - top).astype(np.float64) / sampling.temperature)
    total = float(p.sum())
    if not 1.0 <= total < np.inf:  # the likeliest token alone counts 1
        raise BrokenLogitsError(f"chances at temperature {sampling.temperature} are no finite numbers")
    p /= total
    if sampling.top_p >= 1.0:
        return p
    order = _likeliest(p, sampling.top_p)
    before = np.cumsum(p[order]) - p[order]
    kept = order[before < sampling.top_p]
    nucleus = np.zeros_like(p)
    nucleus[kept] = p[kept]
    nucleus /= nucleus.sum()
    return nucleus


def _likeliest(p: Chances, top_p: float) -> npt.NDArray[np.int64]:
    """Ids by falling chance, at least as many as reach ``top_p``."""
    if len(p) > NUCLEUS_FIRST:
        border = np.partition(p, len(p) - NUCLEUS_FIRST)[len(p) - NUCLEUS_FIRST]
        some = np.flatnonzero(p >= border)  # by rising id, so that a stable sort keeps the order of equals
        if p[some].sum() > top_p:
            return some[np.argsort(-p[some], kind="stable")]
    return np.argsort(-p, kind="stable")


def drawn(p: Chances, rng: np.random.Generator) -> int:
    """One token by its chance."""
    line = np.cumsum(p)
    at = int(np.searchsorted(line, rng.random() * line[-1], side="right"))
    return min(at, int(np.flatnonzero(p)[-1]))


def verified(p: Chances, proposed: int, q: Chances | None, rng: np.random.Generator) -> tuple[int, bool]:
    """The next token of a model with chances ``p`` where a draft with chances ``q`` drew ``proposed``; and whether that
    was accepted.

    None is a draft that always proposes this token. The token is distributed as ``p`` whatever ``q`` is: accepted with
    min(1, p / q), else drawn from what p has above q. Source: Leviathan et al. (2023), arXiv:2211.17192, algorithm 1;
    Chen et al. (2023), arXiv:2302.01318.
    """
    chance = 1.0 if q is None else float(q[proposed])
    if rng.random() * chance < p[proposed]:
        return proposed, True
    rest = p.copy() if q is None else np.maximum(p - q, 0.0)
    if q is None:
        rest[proposed] = 0.0
    if not rest.sum() > 0.0:  # p is q up to rounding
        return drawn(p, rng), False
    return drawn(rest, rng), False


def with_logprobs(row: FloatArray, token: int, margin: float, sampling: Sampling) -> Token:
    """A chosen token with what was asked about it."""
    if not sampling.logprobs:
        return Token(token, margin=margin)
    top = row.max()
    normalizer = float(top) + float(np.log(np.exp((row - top).astype(np.float64)).sum()))
    return Token(
        token,
        float(row[token]) - normalizer,
        tuple((i, float(row[i]) - normalizer) for i in best(row, sampling.top_logprobs)),
        margin,
    )


def best(row: FloatArray, count: int) -> Sequence[int]:
    """Ids of the highest logits, best first, of equal ones the lower id first."""
    count = min(count, len(row))
    if count <= 0:
        return []
    border = np.partition(row, len(row) - count)[len(row) - count]
    some = np.flatnonzero(row >= border)
    return [int(i) for i in some[np.argsort(-row[some], kind="stable")][:count]]
