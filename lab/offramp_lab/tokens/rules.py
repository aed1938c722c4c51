"""Which threshold a rule takes, by what it knows of answers.

A rule is given the losses of calibration answers under each threshold, from the safest on: (m, n) in [0, 1], and says
how many of the thresholds it trusts. The last of those is served; with none the model answers by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from offramp_core.certify import largest_passing_count
from offramp_core.certify.betting import betting_p_value
from offramp_core.errors import InvalidArgumentError
from offramp_core.records import BoolArray, SecondsArray

Rule = Callable[[SecondsArray, float, float], int]
"""(losses, budget, level) -> how many thresholds pass; ``level`` is 1 - confidence."""


@dataclass(frozen=True, slots=True)
class TokenPolicy:
    """A rule as ``offramp replay`` lists it."""

    name: str
    #: One line: what it is, and its source.
    describe: str
    rule: Rule


def calm(losses: SecondsArray, budget: float, level: float) -> int:
    """Thresholds are tested from the safest on with Hoeffding's p-value, until the first that fails.

    Source: CALM (Schuster et al. 2022), arXiv:2207.07061, section 4 and algorithm 1: p = exp(-2 n max(0, budget -
    mean)^2), Learn-then-Test by fixed sequence (Angelopoulos et al. 2021, arXiv:2110.01052).
    """
    n = losses.shape[1]
    room = np.maximum(0.0, budget - losses.mean(axis=1))
    return _until_first_failure(np.exp(-2 * n * room**2) <= level)


def in_expectation(losses: SecondsArray, budget: float, _level: float) -> int:
    """The boldest threshold whose mean loss, one more answer of loss 1 counted in, keeps the budget, as all safer ones
    do.

    The *expected* loss keeps the budget; nothing is said of how often this calibration breaks it. Source: Fast yet Safe
    (Jazbec et al. 2024), arXiv:2405.20915, section 3, conformal risk control (Angelopoulos et al. 2022,
    arXiv:2208.02814).
    """
    n = losses.shape[1]
    return _until_first_failure((losses.sum(axis=1) + 1.0) / (n + 1) <= budget)


def upper_bound(losses: SecondsArray, budget: float, level: float) -> int:
    """The boldest threshold whose upper confidence bound, and that of all safer ones, lies below the budget.

    Source: Fast yet Safe (Jazbec et al. 2024), arXiv:2405.20915, section 3: upper confidence bounds as in Bates et al.
    (2021), arXiv:2101.02703, with the bound by betting of Waudby-Smith and Ramdas (arXiv:2010.09686).
    """
    return _until_first_failure(np.array([bound_lies_below(row, budget, level) for row in losses]))


def bound_lies_below(losses: SecondsArray, budget: float, level: float) -> bool:
    """Whether the bound by betting of a mean in [0, 1] lies below ``budget``, at confidence 1 - ``level``.

    The bound is the least R at which max_i prod_(j <= i) (1 - v_j (loss_j - R)) exceeds 1 / level; the product rises
    with R, so it is enough to look at the budget. Stakes v_j = min(1, sqrt(2 log(1 / level) / (n var_(j - 1)))) know
    only losses before j. Source: Bates et al. (2021), arXiv:2101.02703, section 3.1.3 ("Waudby-Smith-Ramdas bound").
    """
    n = len(losses)
    counts = np.arange(1, n + 1)
    means = (0.5 + np.cumsum(losses)) / (1 + counts)
    variances = (0.25 + np.cumsum((losses - means) ** 2)) / (1 + counts)
    before = np.append(0.25, variances[:-1])
    stakes = np.minimum(1.0, np.sqrt(2 * np.log(1 / level) / (n * before)))
    capital = np.cumsum(np.log1p(-stakes * (losses - budget)))
    return bool(capital.max() > -np.log(level))


def proven(losses: SecondsArray, budget: float, level: float) -> int:
    """The same sequence with the product's own tests: the exact binomial where answers lose all or nothing, else bets
    with fixed stakes.

    Source: this project, docs/decisions/0010.
    """
    if np.isin(losses, (0.0, 1.0)).all():
        passing = largest_passing_count(losses.shape[1], budget=budget, level=level)
        return _until_first_failure(losses.sum(axis=1) <= passing)
    tested = [betting_p_value(row - budget, most=1 - budget) <= level for row in losses]
    return _until_first_failure(np.array(tested))


def never(_losses: SecondsArray, _budget: float, _level: float) -> int:
    """The model as it was given."""
    return 0


def _until_first_failure(passed: BoolArray) -> int:
    return len(passed) if passed.all() else int(passed.argmin())


_LISTED = (
    TokenPolicy("proven", "the product's own tests on the same thresholds (this project; Learn-then-Test)", proven),
    TokenPolicy("calm", "decaying threshold, Learn-then-Test with Hoeffding's p-value (arXiv:2207.07061)", calm),
    TokenPolicy("fast-yet-safe-ucb", "decaying threshold, upper bound by betting (arXiv:2405.20915)", upper_bound),
    TokenPolicy(
        "fast-yet-safe-crc", "decaying threshold, budget kept in expectation (arXiv:2405.20915)", in_expectation
    ),
    TokenPolicy("exits-off", "the model as it was given", never),
)
TOKEN_POLICIES: dict[str, TokenPolicy] = {p.name: p for p in _LISTED}


def token_policy(name: str) -> TokenPolicy:
    """A rule by name.

    Raises
    ------
    InvalidArgumentError
        The name is unknown; the message lists the known ones.
    """
    if name not in TOKEN_POLICIES:
        raise InvalidArgumentError(
            f"policy {name!r} is none for files of tokens; choose from {', '.join(TOKEN_POLICIES)}"
        )
    return TOKEN_POLICIES[name]
