"""What a rule saves and loses on answers that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offramp_core.records import IndexArray
from offramp_lab.tokens.records import Effects
from offramp_lab.tokens.rules import TokenPolicy


@dataclass(frozen=True, slots=True)
class Limits:
    """Mean loss of answers that is allowed, and how sure a rule must be of it."""

    budget: float
    confidence: float


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of calibrations that were drawn from all answers: how often the loss over all answers exceeds the budget, and the
    median saving."""

    draws: int
    broken: int
    saving: float


@dataclass(frozen=True, slots=True)
class Judged:
    """``threshold`` is None where the model answers by itself. ``saving`` is a share of its time, ``early`` of tokens
    that leave."""

    policy: TokenPolicy
    threshold: float | None
    saving: float
    loss: float
    early: float
    drawn: Drawn | None = None


def judged(seen: Effects, policy: TokenPolicy, limits: Limits, *, known: IndexArray, asked: IndexArray) -> Judged:
    """A rule calibrated on the answers ``known``, judged on the answers ``asked``."""
    at = _chosen(seen, policy, limits, known)
    if at is None:
        return Judged(policy, None, 0.0, 0.0, 0.0)
    return Judged(
        policy,
        float(seen.thresholds[at]),
        _saving(seen, at, asked),
        float(seen.loss[at, asked].mean()),
        float(seen.early[at]),
    )


def drawn(
    seen: Effects, policies: Sequence[TokenPolicy], limits: Limits, *, draws: int, n: int, seed: int
) -> list[Drawn]:
    """Every rule on the same calibrations of ``n`` answers, drawn with replacement."""
    rng, answers = np.random.default_rng(seed), seen.loss.shape[1]
    everyone = np.arange(answers)
    broken, savings = np.zeros(len(policies), dtype=int), np.zeros((draws, len(policies)))
    for k in range(draws):
        known = rng.integers(0, answers, n)
        for i, policy in enumerate(policies):
            at = _chosen(seen, policy, limits, known)
            if at is not None:
                broken[i] += seen.loss[at].mean() > limits.budget
                savings[k, i] = _saving(seen, at, everyone)
    return [Drawn(draws, int(b), float(np.median(savings[:, i]))) for i, b in enumerate(broken)]


def _chosen(seen: Effects, policy: TokenPolicy, limits: Limits, known: IndexArray) -> int | None:
    trusted = policy.rule(seen.loss[:, known], limits.budget, 1 - limits.confidence)
    return trusted - 1 if trusted else None


def _saving(seen: Effects, at: int, answers: IndexArray) -> float:
    return 1 - float(seen.seconds[at, answers].sum() / seen.full_seconds[answers].sum())
