"""Recorded scores of tokens, and what every threshold does to every answer.

A file of tokens is a records file with one more array: ``answer`` says by a whole number which answer a row belongs to,
and rows of one answer stand in the order of its tokens. Where there is ``time``, answers go by that of their first
token, else by their order in the file. Scores are recorded along the model's own greedy answer
(teacher forcing). So what is said of a *whole answer* is exact: up to the first token that leaves with another word
nothing differs. What a token that left leaves behind in the caches of later layers is in no record; CALM copies its
state upwards (section 3).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from offramp_core.errors import InvalidRecordsError
from offramp_core.records import FloatArray, IndexArray, Records, SecondsArray, records_from_arrays

Loss = Literal["answer", "tokens"]
LOSSES: tuple[Loss, ...] = ("answer", "tokens")
#: The thresholds that rules go through, from the safest on.
GRID: SecondsArray = np.arange(100, -1, -1) / 100
TEMPERATURE = 4.0  # of the decay; the user's to choose in the paper


@dataclass(frozen=True, slots=True)
class TokenRecords:
    """Scores of tokens. ``first`` [n] is the row at which each answer begins; rows before the next are its own."""

    tokens: Records
    first: IndexArray

    def __len__(self) -> int:
        return len(self.first)

    @property
    def lengths(self) -> IndexArray:
        """Tokens of each answer: (n,)."""
        return np.diff(np.append(self.first, len(self.tokens)))

    @property
    def places(self) -> IndexArray:
        """Which token of its answer a row is, from 0 on: (N,)."""
        return np.arange(len(self.tokens)) - np.repeat(self.first, self.lengths)


@dataclass(frozen=True, slots=True)
class Effects:
    """What thresholds do: (m, n), ``loss`` in [0, 1] and ``seconds`` of each answer; ``early`` (m,) is the share of
    tokens that leave. ``full_seconds`` [n] are those of the model without exits."""

    thresholds: SecondsArray
    loss: SecondsArray
    seconds: SecondsArray
    early: SecondsArray
    full_seconds: SecondsArray


def token_records(arrays: Mapping[str, npt.NDArray[Any]]) -> TokenRecords:
    """Checked records of tokens.

    Raises
    ------
    InvalidRecordsError
        The contract of records is broken, or rows of an answer do not stand together; names the array.
    """
    answer = np.asarray(arrays["answer"])
    tokens = records_from_arrays({name: values for name, values in arrays.items() if name != "answer"})
    if answer.shape != (len(tokens),) or not np.issubdtype(answer.dtype, np.integer):
        raise InvalidRecordsError(
            f"answer has shape {list(answer.shape)} and type {answer.dtype}; it must be one whole number for each of "
            f"the {len(tokens)} rows"
        )
    if not tokens.n_ramps:
        raise InvalidRecordsError("uncertainty has no columns; tokens need an exit to leave at")
    first = np.flatnonzero(np.append(True, answer[1:] != answer[:-1]))
    if len(np.unique(answer)) != len(first):
        raise InvalidRecordsError("answer comes back to a number after another one; rows of an answer stand together")
    if len(first) < 2:
        raise InvalidRecordsError(f"answer names {len(first)} answer; a replay needs at least 2")
    _check_costs(tokens)
    if tokens.time is None:
        return TokenRecords(tokens, first)
    order = np.argsort(tokens.time[first], kind="stable")
    lengths = np.diff(np.append(first, len(tokens)))[order]
    ends = np.cumsum(lengths)
    rows = np.arange(len(tokens)) + np.repeat(first[order] - (ends - lengths), lengths)
    return TokenRecords(tokens.take(rows), ends - lengths)


def _check_costs(tokens: Records) -> None:
    """Refuse seconds whose sums are no numbers, or nothing: savings are shares of them."""
    full = tokens.costs.baseline_seconds
    with np.errstate(all="ignore"):
        seconds = tokens.costs.leave_seconds(range(tokens.n_ramps))
        sound = full > 0 and bool(np.isfinite(np.append(seconds, full) * len(tokens) / full).all())
    if not sound:
        raise InvalidRecordsError(
            f"segment_seconds and ramp_seconds come to {float(np.max(seconds)):g} s of a token, and the model to "
            f"{float(full):g} s; savings cannot be told of that"
        )


def decayed(threshold: float, places: IndexArray, *, longest: int, temperature: float = TEMPERATURE) -> SecondsArray:
    """The threshold of each token: higher at the beginning of an answer, where a mistake has most behind it.

    Source: CALM (Schuster et al. 2022), arXiv:2207.07061, section 3 ("decaying threshold"): clip(9/10 threshold + 1/10
    exp(-temperature place / longest), 0, 1).

    Examples
    --------
    >>> decayed(0.5, np.array([0, 8]), longest=8).round(3).tolist()
    [0.55, 0.452]
    """
    decay = np.exp(-temperature * places / longest)
    clipped: SecondsArray = np.clip(0.9 * threshold + 0.1 * decay, 0.0, 1.0)
    return clipped


def leaves_at(confidence: FloatArray, thresholds: SecondsArray) -> IndexArray:
    """The first exit at which a token's confidence reaches its threshold; the number of exits where none does."""
    sure = confidence >= thresholds[:, None]
    first: IndexArray = np.where(sure.any(axis=1), sure.argmax(axis=1), confidence.shape[1])
    return first


def effects(records: TokenRecords, loss: Loss, *, thresholds: SecondsArray = GRID) -> Effects:
    """What each threshold does to each answer. Every exit is computed until a token leaves, and paid for."""
    tokens = records.tokens
    cost = tokens.costs.leave_seconds(range(tokens.n_ramps))
    wrong = np.column_stack([~tokens.agrees, ~tokens.final_agrees])
    rows, places, longest = np.arange(len(tokens)), records.places, int(records.lengths.max())
    confidence = 1 - tokens.uncertainty
    losses, seconds, early = [], [], []
    for threshold in thresholds:
        left = leaves_at(confidence, decayed(float(threshold), places, longest=longest))
        errors = np.add.reduceat(wrong[rows, left].astype(np.float64), records.first)
        losses.append(np.minimum(errors, 1.0) if loss == "answer" else errors / records.lengths)
        seconds.append(np.add.reduceat(cost[left], records.first))
        early.append(float((left < tokens.n_ramps).mean()))
    full = (tokens.costs.baseline_seconds * records.lengths).astype(np.float64)
    return Effects(thresholds, np.array(losses), np.array(seconds), np.array(early), full)
